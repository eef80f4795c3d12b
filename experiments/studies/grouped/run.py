"""Run the study of the grouped head.

python -m experiments.studies.grouped.run --scale cpu         runs what has no result, then renders
python -m experiments.studies.grouped.run --scale cpu --list  lists the jobs, and which are done
python -m experiments.studies.grouped.run --scale cpu --only lm-128/gpt-2,lm-128/grouped
python -m experiments.studies.grouped.run --render            updates the page from the results
python -m experiments.studies.grouped.run --sheet sheet.png   draws pictures of the classes
python -m experiments.studies.grouped.run --judge-url URL --judge-model NAME
                                                      grades stories too, as in the paper's Table 1

`--scale paper` reads TinyStories from its two files below $VQJAX_DATA, and `--scale cpu` slices of
it. A run that was stopped resumes. `python -m experiments.bench` measures memory and speed.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from configs.grouped.shapes import dense, grouped
from experiments.studies.grouped import report
from experiments.studies.grouped.judge import Judge
from experiments.studies.grouped.rows import (
  PICTURES,
  RUNS,
  SCALES,
  TEACHER,
  TOP,
  GroupedRow,
  GroupedSetting,
  rows,
)
from experiments.studies.grouped.sheet import save_sheet
from experiments.studies.grouped.stories import graded
from experiments.studies.study import PaperStudy
from vqjax import GroupedHead, Head
from vqjax.lab import exits
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.run_files import read_metrics
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.study.jobs import JobList, StudyJob, derived, training_job
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

CURVE_POINTS = 60
"""Approximate number of points of a kept training curve."""

TOP_SETTINGS = {"k": 50, "positions": 30}
"""The number of best tokens, and of positions in the text at which they are searched."""

STORIES = {"stories": 30, "tokens": 200, "temperature": 1.0}
"""Number of graded stories, most tokens of a completion, and temperature of sampling."""


def jobs(scale: str, judge: Judge | None = None) -> list[StudyJob]:
  """All jobs of a scale, each after those that it starts from."""
  settings = SCALES[scale]
  made = [_row(s, row) for s in settings.values() for row in rows(s)]
  for name, head in (("dense", dense), ("grouped", grouped)):
    experiment = PICTURES[scale](f"pictures-{name}", head)
    folder = f"{RUNS}/{scale}/pictures/{name}"
    made.append(training_job(f"pictures/{name}", f"CNN, {name}", experiment, folder, curves))
  for name in TOP[scale]:
    s = settings[name]
    row = next(row for row in rows(s) if row.name == "grouped")
    measure = functools.partial(time_top_k, row.make(s), pathlib.Path(s.path("grouped")))
    label = f"the {TOP_SETTINGS['k']} best tokens"
    made.append(derived(f"top/{name}", label, _row(s, row), TOP_SETTINGS, measure))
  for s in settings.values():
    made += [_graded(scale, s, row, judge) for row in rows(s) if TEACHER in s.rows and row.trained]
  return [job for job in made if job is not None]


def _row(s: GroupedSetting, row: GroupedRow) -> StudyJob:
  """The job of a language model: training, or evaluation as it starts."""
  name, experiment = f"{s.name}/{row.name}", row.make(s)
  if row.trained:
    needs = (f"{s.name}/{row.needs}",) if row.needs else ()
    return training_job(name, row.label, experiment, s.path(row.name), curves, needs)
  source = _row(s, next(other for other in rows(s) if other.name == row.needs))
  settings = {"experiment": config_hash(experiment)}
  return derived(name, row.label, source, settings, functools.partial(initial_scores, experiment))


def _graded(scale: str, s: GroupedSetting, row: GroupedRow, judge: Judge | None) -> StudyJob | None:
  """The job of grading a row's stories; without a judge, a kept result or None."""
  name = f"grades/{s.name}-{row.name}"
  if judge is None:
    settings = STUDY.read(scale).get(name, {}).get("settings")
  else:
    smoke = {"stories": 2, "tokens": 4} if scale == "smoke" else {}
    settings = STORIES | smoke | {"model": judge.model}
  if settings is None:
    return None
  measure = functools.partial(graded, row.make(s), pathlib.Path(s.path(row.name)), settings, judge)
  job = derived(name, f"grades of {row.label}", _row(s, row), settings, measure)
  return job if judge is not None or JobList([job], STUDY.results(scale)).is_done(job) else None


def curves(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """Curves of a run at a plot's resolution: {"curves": {name: [[step, value]]}}.

  "train" has means of the loss between its points. "valid" has the loss of every evaluation and,
  for pictures, "accuracy" and "group_accuracy" have rates.
  """
  del experiment
  found = read_metrics(folder)
  if found.problem:
    raise found.problem
  metrics = found.rows
  losses = [(row["step"], row["loss"]) for row in metrics if "loss" in row]
  width = max(1, len(losses) // CURVE_POINTS)
  kept = {"train": []}
  for first in range(0, len(losses), width):
    part = losses[first : first + width]
    kept["train"].append([part[-1][0], round(statistics.fmean(loss for _, loss in part), 4)])
  evaluations = [(row["step"], row["valid"]) for row in metrics if "valid" in row]
  for name in ("valid", "accuracy", "group_accuracy"):
    key = "nats_per_token" if name == "valid" else name
    points = [[step, round(valid[key], 4)] for step, valid in evaluations if key in valid]
    if points:
      kept[name] = points
  return {"curves": kept}


def initial_scores(experiment: Experiment) -> dict[str, Any]:
  """Scores of the held-out splits by an untrained model with its initial variables."""
  text = load_text(experiment)
  run = text.experiment
  program = Program(run, make_mesh(run.train.mesh))
  init_key, _ = keys(run.seed)
  variables = run.init_from(text, run.model, program.init(init_key).variables)
  result, head = held_out_scores(run.model, variables, text), run.model.head
  return {"result": result | {"head": {"class": type(head).__name__, "params": head.size().params}}}


def time_top_k(experiment: Experiment, folder: pathlib.Path, calls: int = 7) -> dict[str, Any]:
  """Time of a trained grouped head's exact top-k, by search and by all groups.

  Args:
    experiment: the trained run.
    folder: its run folder.
    calls: timed calls of each way at each position, of which the median counts.

  Returns:
    {"result": {}, "top": medians over positions, one token at a time}.
  """
  text = load_text(experiment)
  model = text.experiment.model
  variables, step = read_run_variables(folder)
  tokens = np.asarray(text.splits["test"].tokens)
  count = max(1, min(TOP_SETTINGS["positions"], len(tokens) // model.context))
  windows_NT = tokens[: count * model.context].reshape(count, -1).astype(np.int32)
  hidden_NTD = jax.jit(lambda v, x: model.apply(v, x, method="hidden"))(variables, windows_NT)
  head = model.head.clone(parent=None)
  own = {name: tree["head"] for name, tree in variables.items() if "head" in tree}
  k = min(TOP_SETTINGS["k"], head.vocab)
  ways = {
    "seconds": jax.jit(lambda own, h: head.apply(own, h, k, method=GroupedHead.top_k_visited)),
    "seconds_all": jax.jit(lambda own, h: head.apply(own, h, k, method=Head.top_k)),
  }
  measured = []
  for hidden_D in np.asarray(hidden_NTD)[:, -1]:
    # The first call of each way compiles, or warms caches, and does not count.
    outputs = {name: jax.block_until_ready(way(own, hidden_D)) for name, way in ways.items()}
    times = {name: [] for name in ways}
    for _ in range(calls):
      for name, way in ways.items():
        start = time.perf_counter()
        jax.block_until_ready(way(own, hidden_D))
        times[name].append(time.perf_counter() - start)
    log_prob, _, visited = outputs["seconds"]
    measured.append({name: statistics.median(values) for name, values in times.items()})
    # Both ways sum up to `vocab` float32 probabilities, in different orders.
    same = np.allclose(log_prob, outputs["seconds_all"][0], atol=1e-4, rtol=0)
    measured[-1] |= {"visited": int(visited), "same": bool(same)}
    measured[-1]["mass"] = float(np.exp(log_prob).sum())
  median = lambda key: statistics.median(row[key] for row in measured)
  top = {
    "vocab": head.vocab,
    "groups": head.groups_and_slots()[0],
    "k": k,
    "positions": count,
    "seconds": median("seconds"),
    "seconds_all": median("seconds_all"),
    "ratio": median("seconds") / median("seconds_all"),
    "visited": median("visited"),
    "visited_most": max(row["visited"] for row in measured),
    "mass": median("mass"),
    "same": all(row["same"] for row in measured),
    "step": step,
  }
  return {"result": {}, "top": top}


OPTIONS = argparse.ArgumentParser("python -m experiments.studies.grouped.run", add_help=False)
OPTIONS.add_argument("--judge-url", metavar="URL", help="an OpenAI-compatible endpoint, to /v1")
OPTIONS.add_argument("--judge-model", metavar="NAME", help="its model, which grades stories")
OPTIONS.add_argument(
  "--sheet", metavar="PNG", type=pathlib.Path, help="only draw pictures of the classes to a file"
)

STUDY = PaperStudy(
  name="grouped",
  description=__doc__,
  scales=tuple(SCALES),
  jobs=jobs,
  tables=report.shown_tables,
  update=report.update,
  options=(OPTIONS,),
)


def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command with the judge that its options name; return the exit code."""
  own, _ = OPTIONS.parse_known_args(arguments)
  if (own.judge_url is None) != (own.judge_model is None):
    OPTIONS.error("--judge-url and --judge-model must be given together")
  if own.sheet is not None:
    save_sheet(own.sheet)
    return 0
  if own.judge_url is None:
    return STUDY.main(arguments)
  try:
    judge = Judge(own.judge_url, own.judge_model, pathlib.Path(RUNS, "judge"))
  except ValueError as error:
    OPTIONS.error(str(error))
  return dataclasses.replace(STUDY, jobs=functools.partial(jobs, judge=judge)).main(arguments)


if __name__ == "__main__":
  exits.run_main(main)
