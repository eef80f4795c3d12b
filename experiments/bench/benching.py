"""What do all benches share: their options, how a table is printed, what is written?"""

import argparse
import json
import math
import os
import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def parser(module: str, description: str) -> argparse.ArgumentParser:
  """The options of a bench: `--quick` and `--json`."""
  made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
  made.add_argument("--quick", action="store_true", help="tiny sizes: to see that it works")
  made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures")
  return made


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Prints a table; the first column holds names, the others numbers."""
  say(title)
  table = Table()
  for index, column in enumerate(columns):
    table.add_column(column, justify="right" if index else "left", no_wrap=not index)
  for row in rows:
    table.add_row(*map(Text, row))
  Console().print(table)


def say(text: str) -> None:
  """Prints a line as it is."""
  Console().print(text, highlight=False, markup=False, soft_wrap=True)


def mib(count: int | None) -> str:
  """Bytes in MiB; a dash for None."""
  return "—" if count is None else f"{count / 2**20:.1f}"


def write(file: pathlib.Path | None, figures: dict) -> None:
  """Writes the figures, where a file was asked for; null for what is not a finite number."""
  if file is None:
    return
  file.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(_plain(figures), indent=2, allow_nan=False)
  beside = file.with_name(f".{file.name}.{os.getpid()}")
  beside.write_text(text + "\n", encoding="utf-8")
  beside.replace(file)  # who is stopped has the file as it was


def _plain(value):
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
