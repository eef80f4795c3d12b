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
from experiments import grouped_curves, grouped_top
from experiments.grouped_rows import Row, rows
from experiments.grouped_settings import PICTURES, RUNS, SCALES, TOP, Setting
from experiments.study import Results, Study, Work, derived, trained


def works(scale: str) -> list[Work]:
  """All works of a scale, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    found += _of_setting(setting)
  return found + _pictures(scale) + _top(scale)


def _of_setting(s: Setting) -> Iterator[Work]:
  for row in rows(s):
    yield _trained(s, row)


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
  del console, results, scale


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
