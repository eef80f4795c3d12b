"""Run the study of the grouped head.

python -m experiments.studies.grouped.run --scale cpu         runs what has no result, then renders
python -m experiments.studies.grouped.run --scale cpu --list  lists the jobs, and which are done
python -m experiments.studies.grouped.run --scale cpu --only lm-128/gpt-2,lm-128/grouped
python -m experiments.studies.grouped.run --render            updates the page from the results
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
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd

from experiments.studies.grouped import report
from experiments.studies.grouped.rows import ROWS
from experiments.studies.grouped.stories import graded
from experiments.studies.study import PaperStudy
from vqjax import GroupedHead, Head
from vqjax.lab import exits
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.run_files import read_metrics
from vqjax.lab.study.compressed import held_out_scores
from vqjax.lab.study.jobs import StudyJob, derived, training_job
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

CURVE_POINTS = 60
"""Approximate number of points of a kept training curve."""

TOP_SETTINGS = {"k": 50, "positions": 30}
"""The number of best tokens, and of positions in the text at which they are searched."""

STORIES = {"stories": 30, "tokens": 200}
"""Number of graded stories, and most tokens of a completion."""


def jobs(scale: str, judge: Mapping[str, str] | None = None) -> list[StudyJob]:
  """All jobs of a scale, each after those that it starts from; grades only with a judge."""
  made: dict[str, StudyJob] = {}

  def measure(name: str, label: str, of: str, settings: Mapping[str, Any], call: Callable, *args):
    made[name] = derived(name, label, made[of], settings, functools.partial(call, *args))

  for job, row in ROWS[scale].items():
    needs = () if row.needs is None else (f"{job.split('/')[0]}/{row.needs}",)
    if row.trained:
      run = job, row.label, row.experiment, row.folder
      made[job] = training_job(*run, curves, needs)
    else:
      settings = {"experiment": config_hash(row.experiment)}
      measure(job, row.label, needs[0], settings, initial_scores, row.experiment)
  for job, row in ROWS[scale].items():
    setting, run = job.split("/")[0], (row.experiment, pathlib.Path(row.folder))
    if job in ("lm-128/grouped", "wide/grouped"):
      measure(f"top/{setting}", "the best tokens", job, TOP_SETTINGS, time_top_k, *run)
    if judge and row.trained and setting.startswith("lm"):
      name, settings = f"grades/{job.replace('/', '-')}", STORIES | judge
      measure(name, f"grades of {row.label}", job, settings, graded, *run, settings)
  return list(made.values())


def curves(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """Curves of a run at a plot's resolution: {"curves": {name: [[step, value]]}}.

  "train" has means of the loss between its points. For pictures, "accuracy" and "group_accuracy"
  have the rates of every evaluation.
  """
  del experiment
  metrics = read_metrics(folder).rows
  losses = pd.DataFrame([(row["step"], row["loss"]) for row in metrics if "loss" in row])
  parts = losses.groupby(losses.index // max(1, len(losses) // CURVE_POINTS))
  kept = {"train": [list(point) for point in zip(parts[0].last(), parts[1].mean().round(4))]}
  evaluations = [(row["step"], row["valid"]) for row in metrics if "valid" in row]
  for key in ("accuracy", "group_accuracy"):
    kept[key] = [[step, round(valid[key], 4)] for step, valid in evaluations if key in valid]
  return {"curves": {name: points for name, points in kept.items() if points}}


def initial_scores(experiment: Experiment) -> dict[str, Any]:
  """Scores of the held-out splits by an untrained model with its initial variables."""
  text = load_text(experiment)
  run = text.experiment
  init_key, _ = keys(run.seed)
  variables = Program(run, make_mesh(run.train.mesh)).init(init_key).variables
  return {"result": held_out_scores(run.model, run.init_from(text, run.model, variables), text)}


def time_top_k(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """Time of a trained grouped head's exact top-k, by search and by all groups.

  Args:
    experiment: the trained run.
    folder: its run folder.

  Returns:
    {"result": {}, "top": medians over positions, one token at a time}.

  Raises:
    AssertionError: the two ways differ.
  """
  text = load_text(experiment)
  model, (variables, _) = text.experiment.model, read_run_variables(folder)
  tokens = np.asarray(text.splits["test"].tokens)
  count = min(TOP_SETTINGS["positions"], len(tokens) // model.context)
  windows_NT = tokens[: count * model.context].reshape(count, -1).astype(np.int32)
  hidden = jax.jit(functools.partial(model.apply, method="hidden"))
  hidden_ND = hidden(variables, windows_NT)[:, -1]
  k = min(TOP_SETTINGS["k"], model.head.vocab)
  ways = {
    "seconds": lambda model, hidden: GroupedHead.top_k_visited(model.head, hidden, k),
    "seconds_all": lambda model, hidden: Head.top_k(model.head, hidden, k),
  }
  ways = {name: jax.jit(functools.partial(model.apply, method=way)) for name, way in ways.items()}
  measured = []
  for hidden_D in hidden_ND:
    (log_prob, _, visited), (in_all, _) = (way(variables, hidden_D) for way in ways.values())
    line = {"visited": int(visited), "mass": float(np.exp(log_prob).sum())}
    # Both ways sum up to `vocab` float32 probabilities, in different orders.
    np.testing.assert_allclose(log_prob, in_all, atol=1e-4, rtol=0)
    for name, way in ways.items():
      call = lambda way=way, at=hidden_D: jax.block_until_ready(way(variables, at))
      line[name] = statistics.median(timeit.repeat(call, number=1, repeat=7))
    measured.append(line)
  table = pd.DataFrame(measured)
  sizes = {"vocab": model.head.vocab, "groups": model.head.groups_and_slots()[0]}
  sizes["visited_most"] = int(table["visited"].max())
  return {"result": {}, "top": table.median().to_dict() | sizes}


STUDY = PaperStudy(
  name="grouped",
  description=__doc__,
  scales=tuple(ROWS),
  jobs=jobs,
  tables=report.tables,
  update=report.update,
)


def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command with the judge that its options name; return the exit code."""
  parser = argparse.ArgumentParser(STUDY.name, add_help=False, allow_abbrev=False)
  parser.add_argument("--judge-url", dest="url")
  parser.add_argument("--judge-model", dest="model")
  judge, others = parser.parse_known_args(arguments)
  if (judge.url is None) != (judge.model is None):
    parser.error("--judge-url and --judge-model must be given together")
  with_judge = functools.partial(jobs, judge=vars(judge) if judge.url else None)
  return dataclasses.replace(STUDY, jobs=with_judge).main(others)


if __name__ == "__main__":
  exits.run_main(main)
