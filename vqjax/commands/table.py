"""Command that compares the runs below a folder.

vqjax table runs/demo
vqjax table runs/demo --html out.html --markdown out.md --png plot.png
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from vqjax.commands.console import OutputFile, new_parser, option, run
from vqjax.lab import exits, report
from vqjax.outputs import write_text

__all__ = []


def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command; return its exit code: 2 for a wrong call."""
  parser = new_parser(
    "table",
    "Compare the runs below a folder by the JSON that they wrote.",
    "A missing value is a dash, one of a failed run is 'failed'. The best value is bold; of quality"
    " only where all runs have equally many steps and tokens.",
  )
  parser.add_argument(
    "folder", type=pathlib.Path, help="a run folder, or a folder with run folders"
  )
  option(parser, "--html", "write an HTML page", OutputFile)
  option(parser, "--title", "title of the page (default: the folder's name)")
  option(parser, "--markdown", "write the table in Markdown", OutputFile)
  option(
    parser,
    "--png",
    "plot head bytes against perplexity in FILE, and the loss curves in FILE with -loss",
    OutputFile,
  )
  return run(parser, arguments, _table)


def _table(options: argparse.Namespace) -> int:
  runs = _read_runs(options.folder)
  columns = report.default_columns(runs)
  console = Console()
  console.print(report.console_table(columns, runs, console.width))
  try:
    if options.html:
      report.write_run_page(
        runs, options.html, title=options.title or options.folder.resolve().name
      )
    if options.markdown:
      write_text(options.markdown, report.markdown_table(columns, runs))
    if options.png:
      _save_plots(runs, options.png)
  except (OSError, ValueError) as error:
    exits.say(f"error: cannot write: {error}. Give another file.")
    return 2
  return 0


def _read_runs(folder: pathlib.Path) -> list[report.Run]:
  if not folder.is_dir():
    raise FileNotFoundError(
      f"`folder` must be a folder with runs; got {folder}, which is not one. Give one such as runs."
    )
  runs = report.read_runs(folder)
  if not runs:
    raise FileNotFoundError(
      f"`folder` must hold runs; got {folder} without a config.json or result.json. Start a run"
      " with vqjax train configs/NAME.py."
    )
  return runs


def _save_plots(runs: Sequence[report.Run], path: pathlib.Path) -> None:
  """Write both plots; a message on standard error names a plot that has no data."""
  curves = path.with_stem(f"{path.stem}-loss")
  plots = {path: report.size_against_perplexity(runs)}
  if path.is_file() or not path.exists():
    plots[curves] = report.loss_curves(runs)
  else:  # a new file beside a device would stay there
    exits.say(f"{curves} is not written: {path} is not a regular file")
  for target, figure in plots.items():
    if figure is None:
      print(f"{target} is not written: no run has the numbers that it shows", file=sys.stderr)
    else:
      report.save_png(figure, target)
