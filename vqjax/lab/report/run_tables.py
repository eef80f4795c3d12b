"""Tables of runs on a console and in Markdown."""

import html
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vqjax.lab.report.runs import Column, Run, labels
from vqjax.lab.report.units import MISSING, shorten

__all__ = ["console_table", "markdown_table"]


class TableCell(NamedTuple):
  """A value of a run.

  Attributes:
    text: the value with its unit; a dash where it is missing, "failed" where the run failed.
    exact: the value as the run wrote it; empty where it is missing.
    best: whether no other run has a better value.
  """

  text: str
  exact: str = ""
  best: bool = False


def cells(columns: Sequence[Column], runs: Sequence[Run]) -> list[list[TableCell]]:
  """Return one row for each run, with one cell for each column."""
  rows: list[list[TableCell]] = [[] for _ in runs]
  for column in columns:
    values = [column.get(run) for run in runs]
    finite = {v for v in values if isinstance(v, (int, float)) and math.isfinite(v)}
    best = None
    if column.smaller_is_better is not None and len(finite) > 1:
      best = min(finite) if column.smaller_is_better else max(finite)
    for row, run, value in zip(rows, runs, values):
      if value is None:
        row.append(TableCell("failed" if run.status == "failed" else MISSING))
      else:
        row.append(TableCell(column.show(value), repr(value), best is not None and value == best))
  return rows


def console_table(columns: Sequence[Column], runs: Sequence[Run], width: int = 80) -> Group:
  """Return a table for `rich`, in parts of at most `width` characters.

  The best value of a column is bold.
  """
  names = [shorten(label, width // 4) for label in labels(runs)]
  first_room = width - max(map(len, ["run", *names])) - 4  # blanks beside it and at both ends
  by_column = list(zip(*cells(columns, runs)))
  parts: list[list[tuple[Column, Sequence[TableCell], int]]] = []
  room = -1
  for column, column_cells in zip(columns, by_column):
    # So wide that no word of the header and no cell is broken.
    wide = max(len(word) for word in [*column.title.split(), *(cell.text for cell in column_cells)])
    if wide + 3 > room:
      parts.append([])
      room = first_room
    parts[-1].append((column, column_cells, wide))
    room -= wide + 3
  tables = []
  for part in parts:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True, vertical="bottom")
    for column, _, wide in part:
      table.add_column(column.title, justify="right", vertical="bottom", min_width=wide)
    for name, *row in zip(names, *(column_cells for _, column_cells, _ in part)):
      style = lambda cell: "bold" if cell.best else "red" if cell.text == "failed" else ""
      table.add_row(Text(name), *(Text(cell.text, style(cell)) for cell in row))
    tables.append(table)
  return Group(*tables)


def markdown_table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
  """Return a table in GitHub's Markdown; the best value of a column is bold."""
  rows = [["run", *(column.title for column in columns)], ["---", *("---:" for _ in columns)]]
  for label, row in zip(labels(runs), cells(columns, runs)):
    texts = (f"**{_plain(cell.text)}**" if cell.best else _plain(cell.text) for cell in row)
    rows.append([_plain(label), *texts])
  lines = [f"| {' | '.join(row)} |" for row in rows]
  return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
  """The text in Markdown: without HTML, links and emphasis, and in one cell of one row."""
  escaped = html.escape(" ".join(text.split()), quote=False)
  return re.sub(r"([\\`*\[\]|])", r"\\\1", escaped)
