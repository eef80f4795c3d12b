"""What do the tables of VQ-Logits say, measured: its methods, its baselines, and what goes beyond?

python -m experiments.vq_tables --scale smoke
python -m experiments.vq_tables --scale cpu            runs what has no result yet, then renders
python -m experiments.vq_tables --scale cpu --list     what there is, and what is done
python -m experiments.vq_tables --scale cpu --only ptb/vq-1024,ptb/full
python -m experiments.vq_tables --render               the page, from the committed results

A run that was stopped goes on; each result is copied to docs/results/vq/SCALE/, which is all that
the page is made of.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

from rich.console import Console

from experiments import vq_report, vq_results
from experiments.console import exit_code, speak_plainly
from experiments.vq_heads import Row, all_rows
from experiments.vq_settings import SCALES, Setting
from vqjax.config import Experiment
from vqjax.training import NotFiniteError, fit


@dataclasses.dataclass(frozen=True)
class Run:
  """A row of some tables, with a seed.

  Attributes:
    setting: its text and body.
    row: its head.
    seed: of everything.
  """

  setting: Setting
  row: Row
  seed: int

  @property
  def name(self) -> str:
    """setting/row, and the seed where it is not 0."""
    return f"{self.setting.name}/{self.row.name}" + (f"-s{self.seed}" if self.seed else "")

  @property
  def experiment(self) -> Experiment:
    """What is run."""
    return self.row.make(self.setting, self.seed)


def runs(scale: str) -> dict[str, Run]:
  """All runs of a scale by name, each after those that it starts from."""
  found = []
  for setting in SCALES[scale].values():
    rows = all_rows(setting)
    for seed in range(setting.seeds):
      found += [Run(setting, row, seed) for row in rows if seed == 0 or row.headline]
  return {run.name: run for run in found}


RUNS = {scale: {name: run.experiment for name, run in runs(scale).items()} for scale in SCALES}
"""Scale -> name -> experiment."""

PAPER = vq_report.PAPER
"""Table -> row -> the paper's numbers."""


def main(arguments: list[str] | None = None) -> int:
  """Runs and renders; returns the exit code: 2 for a wrong call, 128 + n for signal n."""
  options = _parser().parse_args(arguments)
  speak_plainly()
  return exit_code(lambda: _act(options))


def _act(options: argparse.Namespace) -> None:
  console = Console()
  if options.render:
    return _render(console, options)
  chosen = _chosen(options.scale, options.only)
  if options.list:
    return _print_list(console, options.scale, chosen)
  for run in chosen:
    _run(options.scale, run)
  _render(console, options)


def _run(scale: str, run: Run) -> None:
  """Trains what has no result, and keeps a copy of the result with the floors of its codes."""
  if vq_results.is_done(scale, run.name, run.experiment):
    return
  folder = pathlib.Path(run.setting.path(run.row.name, run.seed))
  try:
    fit(run.experiment, folder)
  except NotFiniteError as error:
    # Its row says so, and the others go on.
    print(f"{run.name} failed: {error}", file=sys.stderr)
  vq_results.keep(scale, run.name, run.experiment, folder)


def _chosen(scale: str, only: str | None) -> list[Run]:
  """The runs that were asked for, with those that they start from."""
  every = runs(scale)
  if only is None:
    return list(every.values())
  names = only.split(",")
  unknown = [name for name in names if name not in every]
  if unknown:
    raise ValueError(f"no run {', '.join(unknown)} at scale {scale}; there are {', '.join(every)}")
  wanted: dict[str, Run] = {}

  def add(run: Run):
    for needed in run.row.needs:
      add(Run(run.setting, _row(run.setting, needed), run.seed))
    wanted.setdefault(run.name, run)

  for name in names:
    add(every[name])
  return list(wanted.values())


def _row(setting: Setting, name: str) -> Row:
  return next(row for row in all_rows(setting) if row.name == name)


def _print_list(console: Console, scale: str, chosen: list[Run]) -> None:
  for run in chosen:
    done = vq_results.is_done(scale, run.name, run.experiment)
    console.print(f"{'done' if done else '    '}  {run.name}  {run.row.label}", highlight=False)


def _render(console: Console, options: argparse.Namespace) -> None:
  results = _of_this_code(options.scale)
  for table in vq_report.tables(results, options.scale):
    console.print(table.rich())
  if options.scale == "cpu":
    for path in vq_report.write(results):
      console.print(f"wrote {path}", highlight=False)


def _of_this_code(scale: str) -> dict[str, Any]:
  """The kept results; not those of runs that are now configured otherwise, which it names."""
  every, found = runs(scale), {}
  for name, kept in vq_results.read(scale).items():
    if name in every and vq_results.is_done(scale, name, every[name].experiment):
      found[name] = kept
    else:
      print(f"{name} is left out: its result is of another configuration", file=sys.stderr)
  return found


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.vq_tables",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--scale", choices=SCALES, default="cpu", help="(default: %(default)s)")
  parser.add_argument("--only", metavar="NAMES", help="these runs, and what they start from")
  parser.add_argument("--list", action="store_true", help="print the runs and which are done")
  parser.add_argument("--render", action="store_true", help="train nothing")
  return parser


if __name__ == "__main__":
  sys.exit(main())
