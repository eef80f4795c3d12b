"""What do the tables of the grouped head say, measured: perplexity, grades, memory, throughput?

python -m experiments.studies.grouped.run --scale smoke
python -m experiments.studies.grouped.run --scale cpu            runs what has no result, then renders
python -m experiments.studies.grouped.run --scale cpu --list     what there is, and what is done
python -m experiments.studies.grouped.run --scale cpu --only lm-128/gpt-2,lm-128/grouped
python -m experiments.studies.grouped.run --render               the page, from the committed results

python -m experiments.studies.grouped.run --judge-url http://127.0.0.1:8000/v1 --judge-model NAME
                                                            grades stories too, as Table 1 does

`--scale paper` reads TinyStories, which `python -m vqjax.lab.data.build vqjax_tiny_stories` prepares of
its two files, and `--scale cpu` the slices of it that are below $VQJAX_DATA.
A run that was stopped goes on; each result is copied to docs/results/grouped/SCALE/, which is all
that the page is made of.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from configs.grouped_shapes import dense, grouped
from experiments.studies.grouped import begun as grouped_begun
from experiments.studies.grouped import curves as grouped_curves
from experiments.studies.grouped import grades as grouped_grades
from experiments.studies.grouped import page as grouped_page
from experiments.studies.grouped import report as grouped_report
from experiments.studies.grouped import top as grouped_top
from experiments.studies.grouped.grades import Sheet
from experiments.studies.grouped.judge import Judge
from experiments.studies.grouped.rows import TEACHER, Row, rows
from experiments.studies.grouped.settings import PICTURES, RUNS, SCALES, TOP, Setting
from experiments.studies.study import DOCS, Results, Study, Work, derived, trained
from vqjax.lab.config import config_hash

CACHE = pathlib.Path(RUNS, "judge")
"""Folder of a judge's answers."""

SHEETS = {"smoke": Sheet(stories=2, tokens=4), "cpu": Sheet(), "paper": Sheet()}
"""Scale -> what is graded of each model."""


def works(scale: str, judge: Judge | None = None) -> list[Work]:
  """All works of a scale, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    found += _of_setting(setting)
  return [*found, *_pictures(scale), *_top(scale), *_grades(scale, judge)]


def _of_setting(s: Setting) -> Iterator[Work]:
  for row in rows(s):
    yield _work(s, row)


def _work(s: Setting, row: Row) -> Work:
  """Trained, or evaluated as it begins."""
  if row.trained:
    return _trained(s, row)
  experiment = row.make(s)
  source = next(other for other in rows(s) if other.name == row.needs)
  settings = {"experiment": config_hash(experiment)}
  measure = functools.partial(grouped_begun.scores, experiment)
  return derived(f"{s.name}/{row.name}", row.label, _trained(s, source), settings, measure)


def _trained(s: Setting, row: Row) -> Work:
  needs = (f"{s.name}/{row.needs}",) if row.needs else ()
  experiment, folder = row.make(s), s.path(row.name)
  return trained(
    f"{s.name}/{row.name}", row.label, experiment, folder, grouped_curves.beside, needs
  )


def _pictures(scale: str) -> list[Work]:
  """The classification of pictures, dense and grouped."""
  found = []
  for name, label, head in (("dense", "CNN, dense", dense), ("grouped", "CNN, grouped", grouped)):
    experiment = PICTURES[scale](f"pictures-{name}", head)
    folder = f"{RUNS}/{scale}/pictures/{name}"
    found.append(trained(f"pictures/{name}", label, experiment, folder, grouped_curves.beside))
  return found


def _top(scale: str) -> list[Work]:
  """Exact decoding: the time of the best tokens of trained grouped heads."""
  found = []
  for name in TOP[scale]:
    s = SCALES[scale][name]
    row = next(row for row in rows(s) if row.name == "grouped")
    source, folder = _trained(s, row), pathlib.Path(s.path("grouped"))
    measure = functools.partial(grouped_top.measure, row.make(s), folder)
    settings = {"k": grouped_top.K, "positions": grouped_top.POSITIONS}
    label = f"the {grouped_top.K} best tokens"
    found.append(derived(f"top/{name}", label, source, settings, measure))
  return found


def _render(console: Console, results: Results, scale: str) -> None:
  cost = grouped_report.read_cost(DOCS)
  for table in grouped_report.tables(results, scale, cost):
    console.print(table.rich())
  if scale == "cpu":
    for path in grouped_page.write(results):
      console.print(f"wrote {path}", highlight=False)


def _grades(scale: str, judge: Judge | None) -> Iterator[Work]:
  """The grades of every language model; without a judge those that one gave before."""
  for s in SCALES[scale].values():
    for row in rows(s) if TEACHER in s.rows else ():
      name = grouped_report.grades_of(f"{s.name}/{row.name}")
      kept = STUDY.read(scale).get(name)
      asked = grouped_grades.asked(SHEETS[scale], judge) if judge else (kept or {}).get("settings")
      if row.trained and asked is not None:
        source, folder = _trained(s, row), pathlib.Path(s.path(row.name))
        measure = functools.partial(grouped_grades.graded, row.make(s), folder, asked, judge)
        work = derived(name, f"grades of {row.label}", source, asked, measure)
        if judge or STUDY.is_done(scale, work):
          yield work


def _options() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("python -m experiments.studies.grouped.run", add_help=False)
  parser.add_argument("--judge-url", metavar="URL", help="an OpenAI-compatible endpoint, to /v1")
  parser.add_argument("--judge-model", metavar="NAME", help="its model, which grades stories")
  return parser


STUDY = Study(
  name="grouped",
  description=__doc__,
  scales=tuple(SCALES),
  works=works,
  render=_render,
  options=(_options(),),
)


def main(arguments: Sequence[str] | None = None) -> int:
  """`STUDY.main`, with the judge that the arguments name."""
  own, _ = _options().parse_known_args(arguments)
  if own.judge_url is None and own.judge_model is None:
    return STUDY.main(arguments)
  if own.judge_url is None or own.judge_model is None:
    _options().error("--judge-url and --judge-model go together; give both")
  try:
    judge = Judge(own.judge_url, own.judge_model, CACHE)
  except ValueError as error:
    _options().error(str(error))
  return dataclasses.replace(STUDY, works=functools.partial(works, judge=judge)).main(arguments)


if __name__ == "__main__":
  sys.exit(main())
