"""What do the tables of the grouped head say, measured: perplexity, grades, memory, throughput?

python -m experiments.grouped_tables --scale smoke
python -m experiments.grouped_tables --scale cpu            runs what has no result, then renders
python -m experiments.grouped_tables --scale cpu --list     what there is, and what is done
python -m experiments.grouped_tables --scale cpu --only lm-128/gpt-2,lm-128/grouped
python -m experiments.grouped_tables --render               the page, from the committed results

A run that was stopped goes on; each result is copied to docs/results/grouped/SCALE/, which is all
that the page is made of.
"""

import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from configs.grouped_shapes import dense, grouped
from experiments import grouped_begun, grouped_curves, grouped_page, grouped_report, grouped_top
from experiments.grouped_rows import Row, rows
from experiments.grouped_settings import PICTURES, RUNS, SCALES, TOP, Setting
from experiments.study import DOCS, Results, Study, Work, derived, trained
from vqjax.config import config_hash
from vqjax.training.run import read_json


def works(scale: str) -> list[Work]:
  """All works of a scale, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    found += _of_setting(setting)
  return found + _pictures(scale) + _top(scale)


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
  cost = read_json(DOCS / "results" / "grouped" / "cost.json")
  for table in grouped_report.tables(results, scale, cost):
    console.print(table.rich())
  if scale == "cpu":
    for path in grouped_page.write(results):
      console.print(f"wrote {path}", highlight=False)


STUDY = Study(
  name="grouped",
  module="experiments.grouped_tables",
  description=__doc__,
  scales=tuple(SCALES),
  works=works,
  render=_render,
)


def main(arguments: Sequence[str] | None = None) -> int:
  """`STUDY.main`."""
  return STUDY.main(arguments)


if __name__ == "__main__":
  sys.exit(main())
