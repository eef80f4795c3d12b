"""Tables of any columns, as pandas has them, in Markdown and in a terminal."""

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from vqjax.lab.report import units

__all__ = ["markdown", "show_frame"]


def markdown(frame: pd.DataFrame, left: int = 1) -> str:
  """A table in GitHub's Markdown with `left` left-aligned columns.

  Cells are shown by `str`; a missing cell is a dash, and a column without any cell is left out.
  """
  texts = _texts(frame).map(lambda text: text.replace("|", "\\|"))
  align = ["left"] * left + ["right"] * (texts.shape[1] - left)
  return texts.to_markdown(index=False, disable_numparse=True, colalign=align, tablefmt="pipe")


def show_frame(console: Console, title: str, frame: pd.DataFrame) -> None:
  """Print a table in a terminal, in parts if its columns do not fit."""
  texts = _texts(frame)
  label, *columns = texts.columns
  # Titles may be broken between words, labels anywhere, and numbers must not.
  widths = {name: max(map(len, [*name.split(), *texts[name]])) for name in columns}
  parts: list[list[str]] = [[]]
  for name in columns:
    if 24 + sum(3 + widths[other] for other in [*parts[-1], name]) > console.width:
      parts.append([])
    parts[-1].append(name)
  console.print(title, highlight=False, markup=False, style="bold")
  for part in filter(None, parts):
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(label, overflow="fold")
    for name in part:
      table.add_column(name, justify="right", width=widths[name], overflow="fold")
    for row in texts[[label, *part]].itertuples(index=False):
      table.add_row(*row)
    console.print(table, highlight=False, markup=False)


def _texts(frame: pd.DataFrame) -> pd.DataFrame:
  filled = frame.dropna(axis="columns", how="all")
  return filled.map(lambda cell: units.MISSING if pd.isna(cell) else str(cell))
