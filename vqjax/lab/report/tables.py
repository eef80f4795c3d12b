"""How do runs read side by side, on a console, in Markdown and in HTML?"""

import dataclasses
import html
import math
import re
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vqjax.lab.report.columns import Column
from vqjax.lab.report.rows import Run, labels
from vqjax.lab.report.units import MISSING, shorten


@dataclasses.dataclass(frozen=True)
class Cell:
  """One value of one run.

  Attributes:
    text: as a person reads it; a dash where it is missing, "failed" where the run failed.
    exact: as the run wrote it; empty where it is missing.
    best: whether no other run has a better one.
  """

  text: str
  exact: str = ""
  best: bool = False


def cells(columns: Sequence[Column], runs: Sequence[Run]) -> list[list[Cell]]:
  """One row for each run, one cell for each column."""
  by_column = [_column_cells(column, runs) for column in columns]
  return [list(row) for row in zip(*by_column, strict=True)] if columns else [[] for _ in runs]


def _column_cells(column: Column, runs: Sequence[Run]) -> list[Cell]:
  values = [column.get(run) for run in runs]
  best = _best(column, values)
  return [_cell(column, run, value, best) for run, value in zip(runs, values, strict=True)]


def _best(column: Column, values: Sequence[Any]) -> Any:
  """The best value; None where fewer than two differ."""
  known = {v for v in values if isinstance(v, (int, float)) and math.isfinite(v)}
  if column.smaller_is_better is None or len(known) < 2:
    return None
  return min(known) if column.smaller_is_better else max(known)


def _cell(column: Column, run: Run, value: Any, best: Any) -> Cell:
  if value is None:
    return Cell("failed" if run.status == "failed" else MISSING)
  return Cell(column.show(value), repr(value), best is not None and value == best)


def console_table(columns: Sequence[Column], runs: Sequence[Run], width: int = 80) -> Group:
  """For `rich`: the columns in as many tables below each other as `width` characters ask for.

  The best value of a column is bold.
  """
  names = [shorten(label, width // 4) for label in labels(runs)]
  start = width - max(map(len, ["run", *names])) - 4  # blanks beside it and at both ends
  parts, room = [], -1
  for column in columns:
    column_cells = _column_cells(column, runs)
    if _width(column.title, column_cells) + 3 > room:
      parts.append([])
      room = start
    parts[-1].append((column.title, column_cells))
    room -= _width(column.title, column_cells) + 3
  return Group(*(_console_part(part, names) for part in parts))


def _width(title: str, column_cells: Sequence[Cell]) -> int:
  """Characters that a column needs so that no word of its header and no cell is broken."""
  return max(len(word) for word in [*title.split(), *(cell.text for cell in column_cells)])


def _console_part(part: Sequence[tuple[str, Sequence[Cell]]], names: Sequence[str]) -> Table:
  table = Table(box=box.SIMPLE_HEAD)
  table.add_column("run", no_wrap=True, vertical="bottom")
  for title, column_cells in part:
    width = _width(title, column_cells)
    table.add_column(title, justify="right", vertical="bottom", min_width=width)
  for at, name in enumerate(names):
    row = (column_cells[at] for _, column_cells in part)
    table.add_row(Text(name), *(Text(cell.text, _console_style(cell)) for cell in row))
  return table


def _console_style(cell: Cell) -> str:
  return "bold" if cell.best else "red" if cell.text == "failed" else ""


def markdown_table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
  """A table in GitHub's Markdown: the best value of a column is bold."""
  header = ["run", *(column.title for column in columns)]
  body = [
    [label, *(f"**{cell.text}**" if cell.best else cell.text for cell in row)]
    for label, row in zip(labels(runs), cells(columns, runs), strict=True)
  ]
  rule = ["---", *("---:" for _ in columns)]
  lines = [_markdown_row(header), f"| {' | '.join(rule)} |", *map(_markdown_row, body)]
  return "\n".join(lines) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
  # A bar would end the cell, and a line break the row.
  escaped = (" ".join(text.split()).replace("|", "\\|") for text in texts)
  return f"| {' | '.join(escaped)} |"


def html_table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
  """A `<table>`: exact values are in the cells' titles, the best of a column is class "best"."""
  header = "".join(f'<th scope="col">{html.escape(column.title)}</th>' for column in columns)
  rows = [
    f'<tr><th scope="row">{breakable(label)}</th>{"".join(map(_html_cell, row))}</tr>'
    for label, row in zip(labels(runs), cells(columns, runs), strict=True)
  ]
  body = "\n".join(rows)
  return (
    f'<table>\n<thead><tr><th scope="col">run</th>{header}</tr></thead>\n'
    f"<tbody>\n{body}\n</tbody>\n</table>"
  )


def breakable(label: str) -> str:
  """Escaped, and free to break after an underscore or a slash."""
  return re.sub(r"([_/])", r"\1<wbr>", html.escape(label))


def _html_cell(cell: Cell) -> str:
  kind = "best" if cell.best else "failed" if cell.text == "failed" else ""
  attributes = f' class="{kind}"' if kind else ""
  attributes += f' title="{html.escape(cell.exact)}"' if cell.exact else ""
  return f"<td{attributes}>{html.escape(cell.text)}</td>"
