"""How do numbers that come from many files become a table, in a terminal and on a page?"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from vqjax.lab import report
from vqjax.lab.report import Column, Run


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows side by side.

  Attributes:
    title: "Table 1: ...".
    columns: of all rows; those that no row fills are left out, but for the first two.
    lines: what `columns` read.
  """

  title: str
  columns: Sequence[Column]
  lines: Sequence[Run]

  def rich(self) -> Group:
    """For a console of 80 columns."""
    shown = report.console_table(self.used(), list(self.lines))
    return Group(Text(f"\n{self.title}", style="bold"), shown)

  def markdown(self) -> str:
    """For the page, without its title."""
    return report.markdown_table(self.used(), list(self.lines))

  def used(self) -> list[Column]:
    """The columns that are shown."""
    filled = lambda column: any(column.get(line) is not None for line in self.lines)
    return [c for at, c in enumerate(self.columns) if at < 2 or filled(c)]


def line(name: str, **fields: Any) -> Run:
  """A row as the tables of `vqjax.lab.report` read it."""
  return Run(pathlib.Path(), {}, None, (), {"name": name, "status": "finished", **fields})


def failure(name: str) -> Run:
  """A row whose run failed: its cells say so."""
  return dataclasses.replace(line(name), result={"name": name, "status": "failed"})


def column(title: str, key: str, show=str, meaning: str = "") -> Column:
  """Shows the field `key` of a row."""
  return Column(title, lambda run: run.get(key), show, meaning)
