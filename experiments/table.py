"""How do the runs below a folder compare?

python -m experiments.table runs/demo
python -m experiments.table runs/demo --html out.html --markdown out.md --png plot.png
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from vqjax.lab import report
from vqjax.lab.report import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, writes what was asked for, and returns the exit code."""
  options = _parser().parse_args(arguments)
  try:
    runs = _runs(options.folder)
  except (FileNotFoundError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  columns = report.default_columns(runs)
  console = Console()
  console.print(report.console_table(columns, runs, console.width))
  try:
    if options.html:
      report.write_page(runs, options.html, title=options.title or options.folder.resolve().name)
    if options.markdown:
      write_whole(options.markdown, report.markdown_table(columns, runs))
    if options.png:
      _save_plots(runs, options.png)
  except (OSError, ValueError) as error:
    print(f"error: cannot write: {error}; give another file", file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.table",
    description="Compares the runs below a folder by the JSON that they wrote.",
    epilog="A missing value prints as a dash, one of a failed run as failed, the best one in bold.",
  )
  parser.add_argument("folder", type=pathlib.Path, help="a run folder, or one that holds some")
  parser.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write one HTML page")
  parser.add_argument("--title", help="title of the page; the folder's name by default")
  parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the table")
  parser.add_argument(
    "--png",
    type=pathlib.Path,
    metavar="FILE",
    help="write head bytes against perplexity to FILE, and the loss curves to FILE with -loss",
  )
  return parser


def _runs(folder: pathlib.Path) -> list[report.Run]:
  if not folder.is_dir():
    raise FileNotFoundError(f"there is no folder {folder}; give one that holds runs")
  runs = report.read_runs(folder)
  if not runs:
    raise FileNotFoundError(
      f"{folder} holds no runs: no config.json or result.json in or below it; start one with"
      " python -m experiments.train configs/NAME.py"
    )
  return runs


def _save_plots(runs: Sequence[report.Run], path: pathlib.Path):
  """Both plots; one that no run has numbers for is left out, and standard error says so."""
  path.parent.mkdir(parents=True, exist_ok=True)
  curves = path.with_stem(f"{path.stem}-loss")
  plots = {path: report.size_against_perplexity(runs), curves: report.loss_curves(runs)}
  for target, figure in plots.items():
    if figure is None:
      print(f"{target} not written: no run has the numbers it shows", file=sys.stderr)
    else:
      report.save_png(figure, target)


if __name__ == "__main__":
  sys.exit(main())
