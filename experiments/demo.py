"""What do the vocabulary layers cost and lose, side by side, on text that every machine has?"""

import argparse
import pathlib
import sys

from rich.console import Console

from vqjax.lab import report
from vqjax.lab.config import load, override
from vqjax.lab.console import exit_code, speak_plainly
from vqjax.lab.training import fit

CONFIGS = ("lm_dense", "lm_tied", "lm_codebook", "lm_codebook_bias", "lm_grouped")


def main(arguments: list[str] | None = None) -> int:
  """Trains every config in turn, then prints the table and writes the page."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.demo",
    description="Train a small decoder with each vocabulary layer on the docstrings of Python's"
    " standard library; print a table and write a page with plots. Run again to resume.",
  )
  parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/demo"), metavar="DIR")
  parser.add_argument("--steps", type=int, help="train for so many steps instead")
  options = parser.parse_args(arguments)
  speak_plainly()
  return exit_code(lambda: _demo(options))


def _demo(options: argparse.Namespace) -> None:
  experiments = [_experiment(name, options.steps) for name in CONFIGS]
  folders = [options.runs / experiment.name for experiment in experiments]
  for experiment, folder in zip(experiments, folders):
    fit(experiment, folder)
  runs = [report.read_run(folder) for folder in folders]
  console = Console()
  console.print(report.console_table(report.default_columns(runs), runs, console.width))
  page = options.runs / "report.html"
  report.write_page(runs, page, title="Vocabulary layers, side by side")
  console.print(f"page: {page}", highlight=False)


def _experiment(name: str, steps: int | None):
  experiment = load(pathlib.Path(__file__).parents[1] / "configs" / f"{name}.py")
  if steps is None:
    return experiment
  return override(experiment, [f"train.steps={steps}"])


if __name__ == "__main__":
  sys.exit(main())
