"""Tables, seeds and generated blocks that the pages of all studies share.

A page is prose written by hand. What is computed stands between markers,

  <!-- generated: NAME -->
  ...
  <!-- end: NAME -->

and `update` rewrites these blocks alone.
"""

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.studies.study import Results
from vqjax.lab import report
from vqjax.lab.report import units

_BLOCK = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- end: \1 -->\n", re.DOTALL)


def update(page: pathlib.Path, blocks: Mapping[str, str]) -> bool:
  """Rewrites the generated blocks of a page; returns whether the page changed.

  Raises:
    ValueError: a marker of the page has no block, or a block has no marker.
  """
  text = page.read_text()
  names = [match[1] for match in _BLOCK.finditer(text)]
  wrong = sorted(set(names) ^ set(blocks)) + sorted({n for n in names if names.count(n) > 1})
  if wrong:
    raise ValueError(
      f"{page}: markers and generated blocks must match once each; these do not: {', '.join(wrong)}"
    )
  block = lambda match: (
    f"<!-- generated: {match[1]} -->\n\n{blocks[match[1]].strip()}\n\n<!-- end: {match[1]} -->\n"
  )
  updated = _BLOCK.sub(block, text)
  if updated != text:
    page.write_text(updated)
  return updated != text


def markdown(frame: pd.DataFrame) -> str:
  """A table in GitHub's Markdown: one row a line, the first column left, the others right.

  Cells are text as `str` gives it; a missing one is a dash. Columns without any value are left out.
  """
  texts = _texts(frame).map(lambda text: text.replace("|", "\\|"))
  align = ["left", *["right"] * (texts.shape[1] - 1)]
  return texts.to_markdown(index=False, disable_numparse=True, colalign=align, tablefmt="pipe")


def show(console: Console, title: str, frame: pd.DataFrame) -> None:
  """Prints a table with its title in a terminal."""
  texts = _texts(frame)
  table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
  for number, name in enumerate(texts.columns):
    table.add_column(name, justify="right" if number else "left", overflow="fold")
  for row in texts.itertuples(index=False):
    table.add_row(*row)
  console.print(table, highlight=False, markup=False)


def _texts(frame: pd.DataFrame) -> pd.DataFrame:
  filled = frame.dropna(axis="columns", how="all")
  return filled.map(lambda cell: units.MISSING if pd.isna(cell) else str(cell))


def save_figures(figures: Mapping[str, Figure], docs: pathlib.Path) -> list[pathlib.Path]:
  """Writes figures to docs/images/NAME, unless they are there already; returns their paths."""
  paths = [docs / "images" / name for name in figures]
  for figure, path in zip(figures.values(), paths, strict=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save_png(figure, path)
  return paths


def origins(results: Results) -> str:
  """A line that names the commits, devices and versions of the results."""
  distinct = lambda key: ", ".join(sorted({str(kept["result"][key]) for kept in results.values()}))
  return f"Commits {distinct('commit')}; {distinct('device')}; {distinct('versions')}."


def failures(results: Results) -> str:
  """A list of the failed runs with their errors; empty if none failed."""
  failed = (kept for kept in results.values() if kept["result"]["status"] == "failed")
  return "".join(f"- {kept['name']} failed: {kept['result']['error']}\n" for kept in failed)


@dataclasses.dataclass(frozen=True)
class Spread:
  """A number over seeds.

  Attributes:
    mean: mean over the seeds.
    deviation: standard deviation of the sample; None for one seed.
    seeds: number of seeds.
  """

  mean: float
  deviation: float | None
  seeds: int

  @classmethod
  def of(cls, values: Sequence[float]) -> "Spread | None":
    """The spread of `values`; None if there are none."""
    if not values:
      return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return cls(statistics.fmean(values), deviation, len(values))

  def show(self, digits: int, sign: str = "") -> str:
    """Text such as "158.2 ± 0.4"."""
    mean = f"{self.mean:{sign},.{digits}f}"
    return mean if self.deviation is None else f"{mean} ± {self.deviation:,.{digits}f}"


def seeds(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The results of a row "ptb/full" by seed; seed 1 is the work "ptb/full-s1"."""
  form = re.compile(re.escape(name) + r"(?:-s(\d+))?")
  matches = ((form.fullmatch(run), kept) for run, kept in results.items())
  return {int(match[1] or 0): kept for match, kept in matches if match}


def finished(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """`seeds`, of the finished runs alone."""
  found = {seed: kept["result"] for seed, kept in seeds(results, name).items()}
  return {seed: row for seed, row in found.items() if row["status"] == "finished"}


# To be removed with the last study that calls them by these names.
save = save_figures


def known(results: Results, key: str) -> str:
  """The different values of a field of the results, such as their commits."""
  found = sorted({str(kept["result"][key]) for kept in results.values()})
  return ", ".join(found) or units.MISSING
