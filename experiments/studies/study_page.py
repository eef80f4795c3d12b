"""Generated blocks, tables, figures and seed statistics of the studies' pages.

A page is prose written by hand. Computed tables and figures stand between markers,

  <!-- generated: NAME -->
  ...
  <!-- end: NAME -->

and `update_page` rewrites only these blocks.
"""

import collections
import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from vqjax.lab import report
from vqjax.lab.report import units
from vqjax.outputs import write_text

Results = Mapping[str, Mapping[str, Any]]
"""Name of a job -> its kept result and the measurements beside it."""

DOCS = pathlib.Path(__file__).parents[2] / "docs"
"""The folder of the pages and of their images."""

_BLOCK = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- end: \1 -->\n", re.DOTALL)


def update_page(page: pathlib.Path, blocks: Mapping[str, str]) -> bool:
  """Rewrite the generated blocks of a page; return whether the page changed.

  Raises:
    ValueError: a marker of the page has no block, or a block has no marker.
  """
  text = page.read_text()
  names = [match[1] for match in _BLOCK.finditer(text)]
  unmatched = set(names) ^ set(blocks) | {name for name in names if names.count(name) > 1}
  if unmatched:
    raise ValueError(
      f"`page` must have one pair of markers for each block; {page} differs in"
      f" {', '.join(sorted(unmatched))}. Correct the page's markers."
    )

  def block(match: re.Match) -> str:
    name = match[1]
    return f"<!-- generated: {name} -->\n\n{blocks[name].strip()}\n\n<!-- end: {name} -->\n"

  updated = _BLOCK.sub(block, text)
  if updated != text:
    write_text(page, updated)
  return updated != text


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


def save_figures(figures: Mapping[str, Figure], docs: pathlib.Path) -> list[pathlib.Path]:
  """Write each figure to docs/images/NAME; return the paths."""
  paths = [docs / "images" / name for name in figures]
  for figure, path in zip(figures.values(), paths, strict=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save_png(figure, path)
  return paths


def origins(results: Results) -> str:
  """Sentences on the number, days, devices and commits of the results; their lines have each."""
  kept = [row["result"] for row in results.values()]
  if not kept:
    return "No results."
  distinct = lambda values: ", ".join(sorted(set(values)))
  days = sorted(row["date"][:10] for row in kept)
  commits = {row["commit"].removesuffix("+") for row in kept}
  jax = distinct(row["versions"]["jax"] for row in kept if "versions" in row)
  changed = distinct(
    f"`{name}`" for name, row in results.items() if row["result"]["commit"].endswith("+")
  )
  days = " to ".join(dict.fromkeys((days[0], days[-1])))
  devices = " and ".join(sorted({row["device"] for row in kept}))
  return (
    f"{len(kept)} results of {len(commits)} commits, {days}, on {devices}, with jax {jax};"
    " results.jsonl has each commit and all versions."
    + (f" With uncommitted changes: {changed}." if changed else "")
  )


def publish_page(
  docs: pathlib.Path,
  name: str,
  results: Results,
  blocks: Mapping[str, str],
  figures: Mapping[str, Figure | None],
) -> list[pathlib.Path]:
  """Rewrite the generated blocks and the figures of a page; return the paths.

  Args:
    docs: folder of the documents.
    name: the page is results/NAME.md.
    results: results of the study, whose origins and failures are the block "origins".
    blocks: the other blocks by their names.
    figures: figures by their files in images; None is not drawn.
  """
  path = docs / "results" / f"{name}.md"
  update_page(path, {**blocks, "origins": f"{origins(results)}\n\n{failures(results)}"})
  drawn = {file: figure for file, figure in figures.items() if figure is not None}
  return [path, *save_figures(drawn, docs)]


def read_paper(path: pathlib.Path) -> dict[str, dict[str, dict[str, str]]]:
  """The values of a paper.csv as the paper prints them, by table, row and column."""
  tables: dict[str, Any] = collections.defaultdict(lambda: collections.defaultdict(dict))
  for cell in pd.read_csv(path, dtype=str).itertuples():
    tables[cell.table][cell.row][cell.column] = cell.value
  return {table: dict(by_row) for table, by_row in tables.items()}


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
  """The points (x, y) of which none with a smaller x has as small a y, by rising x."""
  best: list[tuple[float, float]] = []
  for x, y in sorted(points):
    if not best or y < best[-1][1]:
      best.append((x, y))
  return best


def bench(docs: pathlib.Path, name: str) -> dict[str, Any] | None:
  """The figures of a benchmark in results/bench.json; None without a full run."""
  path = docs / "results" / "bench.json"
  kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
  figures = kept.get(name)
  return None if figures is None or figures["provenance"].get("quick") else figures


def failures(results: Results) -> str:
  """A list of the failed runs with their errors; empty if none failed."""
  failed = (kept for kept in results.values() if kept["result"]["status"] == "failed")
  return "".join(f"- {kept['name']} failed: {kept['result']['error']}\n" for kept in failed)


@dataclasses.dataclass(frozen=True)
class Spread:
  """A number over seeds.

  Attributes:
    mean: mean over the seeds.
    deviation: sample standard deviation over the seeds; None for one seed.
    seeds: number of seeds.
  """

  mean: float
  deviation: float | None
  seeds: int

  @classmethod
  def of(cls, values: Sequence[float]) -> "Spread | None":
    """The spread of `values`; None if they are empty."""
    if not values:
      return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return cls(statistics.fmean(values), deviation, len(values))

  def show(self, digits: int, sign: str = "") -> str:
    """Text such as "158.2 ± 0.4"."""
    mean = f"{self.mean:{sign},.{digits}f}"
    return mean if self.deviation is None else f"{mean} ± {self.deviation:,.{digits}f}"


def seeds(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The kept results of a row "ptb/full", by seed; "ptb/full-s1" is that of seed 1."""
  form = re.compile(re.escape(name) + r"(?:-s(\d+))?")
  matches = ((form.fullmatch(job), kept) for job, kept in results.items())
  return {int(match[1] or 0): kept for match, kept in matches if match}


def finished_results(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The "result" of a row's finished runs, by seed."""
  rows = {seed: kept["result"] for seed, kept in seeds(results, name).items()}
  return {seed: row for seed, row in rows.items() if row["status"] == "finished"}
