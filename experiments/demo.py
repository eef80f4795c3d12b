"""Command that trains and compares a small decoder with each vocabulary layer.

python -m experiments.demo
"""

import argparse
import pathlib

from rich.console import Console

from vqjax.commands.console import configure_warnings
from vqjax.commands.run_folders import exit_code_of_run
from vqjax.lab import exits, report
from vqjax.lab.config import load_config, override
from vqjax.lab.training import fit

CONFIGS = ("lm_dense", "lm_tied", "lm_codebook", "lm_codebook_bias", "lm_grouped")


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call, 128 + n for signal n."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.demo",
    description="Train a small decoder with each vocabulary layer on the docstrings of Python's"
    " standard library; print a table and write a page with plots. The same command again resumes.",
  )
  parser.add_argument(
    "--runs",
    type=pathlib.Path,
    default=pathlib.Path("runs/demo"),
    metavar="DIR",
    help="folder of the runs and the page (default: %(default)s)",
  )
  parser.add_argument("--steps", type=int, help="number of training steps instead of the configs'")
  options = parser.parse_args(arguments)
  configure_warnings()
  return exit_code_of_run(
    lambda: _demo(options.runs, options.steps), out_of_memory=exits.LESS_OF_A_STEP
  )


def _demo(folder: pathlib.Path, steps: int | None) -> None:
  changes = [] if steps is None else [f"train.steps={steps}"]
  configs = pathlib.Path(__file__).parents[1] / "configs"
  experiments = []
  for name in CONFIGS:
    config = configs / f"{name}.py"
    experiments.append(override(load_config(config), changes))
    source = {"config": str(config), "overrides": changes}
    fit(experiments[-1], folder / experiments[-1].name, source=source)
  runs = [report.read_run(folder / experiment.name) for experiment in experiments]
  console = Console()
  columns = report.default_columns(runs)
  console.print(report.console_table(columns, runs, console.width))
  page = folder / "report.html"
  report.write_run_page(runs, page, title="Vocabulary layers, side by side")
  console.print(f"page: {page}", highlight=False)


if __name__ == "__main__":
  exits.run_main(main)
