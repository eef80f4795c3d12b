"""Generated blocks, figures and paper numbers of the studies' pages.

A page is prose written by hand. Computed tables and figures stand between markers,

  <!-- generated: NAME -->
  ...
  <!-- end: NAME -->

and `update_page` rewrites only these blocks. A table that is longer than the page needs is whole in
a CSV file beside the page.
"""

import collections
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from vqjax.lab import report
from vqjax.lab.study import Study, load_study
from vqjax.lab.study.seeds import Results, failures, origins
from vqjax.lab.study.work import Work
from vqjax.outputs import write_text

DOCS = pathlib.Path(__file__).parents[2] / "docs"
"""The folder of the pages and of their images."""

_BLOCK = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- end: \1 -->\n", re.DOTALL)


Kept = Mapping[str, tuple[Study, Results]]
"""Name of a study -> it and its kept results."""


def works(folder: str, names: Iterable[str], file: str = "") -> dict[str, Work]:
  """Studies with the folders of their kept results, FOLDER/NAME.

  Args:
    folder: a folder beside this file.
    names: the studies.
    file: the file that has a function for each study; "": each has a file NAME.py.
  """
  at, made = pathlib.Path(__file__).parent / folder, {}
  for name in names:
    path, function = (at / file, name) if file else (at / f"{name}.py", "study")
    made[name] = Work(load_study(path, function), at / name, path, function=function)
  return made


def current(works: Mapping[str, Work]) -> Kept:
  """Studies and their results, without those of another configuration."""
  return {name: (work.study, work.job_list().current()) for name, work in works.items()}


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


def save_table(path: pathlib.Path, table: pd.DataFrame) -> pathlib.Path:
  """Write a table as a CSV file, in which missing cells are empty; return the path."""
  write_text(path, table.to_csv(index=False, lineterminator="\n"))
  return path


def save_figures(figures: Mapping[str, Figure], docs: pathlib.Path) -> list[pathlib.Path]:
  """Write each figure to docs/images/NAME; return the paths."""
  paths = [docs / "images" / name for name in figures]
  for figure, path in zip(figures.values(), paths, strict=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save_png(figure, path)
  return paths


def publish_page(
  docs: pathlib.Path,
  name: str,
  kept: Kept,
  blocks: Mapping[str, str],
  figures: Mapping[str, Figure | None],
  tables: Mapping[str, pd.DataFrame] | None = None,
) -> list[pathlib.Path]:
  """Rewrite the generated blocks, the figures and the CSV files of a page; return the paths.

  Args:
    docs: folder of the documents.
    name: the page is results/NAME.md.
    kept: the studies, whose results' origins and failures are the block "origins".
    blocks: the other blocks by their names.
    figures: figures by their files in images; None is not drawn.
    tables: whole tables by their CSV files in results.
  """
  path = docs / "results" / f"{name}.md"
  results = {f"{name}/{job}": one for name, (_, own) in kept.items() for job, one in own.items()}
  update_page(path, {**blocks, "origins": f"{origins(results)}\n\n{failures(results)}"})
  drawn = {file: figure for file, figure in figures.items() if figure is not None}
  saved = [save_table(path.with_name(file), table) for file, table in (tables or {}).items()]
  return [path, *save_figures(drawn, docs), *saved]


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
