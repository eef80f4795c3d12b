"""One HTML page with the tables, plots and origins of runs."""

import html
import os
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from vqjax.lab.report.plots import loss_curves, size_against_perplexity
from vqjax.lab.report.run_tables import cells
from vqjax.lab.report.runs import Column, Run, common_split, default_columns, labels
from vqjax.lab.report.units import MISSING
from vqjax.lm.pages import document, element, html_table, plot
from vqjax.outputs import write_text

__all__ = ["write_run_page"]

BODY = string.Template("""\
<p>$states. Quality is that of the <b>$split</b> split$reason. The best value of a column is bold;\
 the exact value of a cell shows when the pointer is on it.</p>
$table
$curves
$sizes
<h2>What the columns mean</h2>
<dl class="meanings">
$meanings
</dl>
<h2>Where the numbers come from</h2>
<div class="cards">
$cards
</div>
""")


def write_run_page(
  runs: Sequence[Run],
  path: str | os.PathLike,
  title: str = "Runs",
  columns: Sequence[Column] | None = None,
) -> None:
  """Write a page with tables, plots, meanings of columns, and origins of runs.

  The page loads nothing from outside, and replaces an older one atomically.
  """
  columns = default_columns(runs) if columns is None else columns
  # One split for all runs: a column must not mix validation with test.
  states, split = Counter(run.status for run in runs), common_split(runs)
  counts = [f"{states[s]} {s}" for s in ("finished", "failed", "unfinished") if states[s]]
  cards = [
    element("h3", html.escape(label)) + element("dl", _entries(_origin(run)))
    for label, run in zip(labels(runs), runs)
  ]
  body = BODY.substitute(
    states=f"{len(runs)} runs: {', '.join(counts)}",
    split=split,
    reason="" if split == "test" else " (not every finished run has test numbers)",
    table=_table(columns, runs),
    curves=_figure(
      loss_curves(runs),
      "loss",
      "Loss over optimiser steps. Lines: training, lightly smoothed; rings: validation.",
    ),
    sizes=_figure(
      size_against_perplexity(runs),
      "size",
      f"Bytes of the head against perplexity on the {split} split. Lower left is better.",
    ),
    meanings=_entries((column.title, column.meaning) for column in columns),
    cards="\n".join(element("section", card, kind="card") for card in cards),
  )
  write_text(path, document(title, body))


def _table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
  """A table with exact values as titles and the best ones marked."""
  rows = []
  for label, row in zip(labels(runs), cells(columns, runs)):
    rows.append([element("th", html.escape(label), scope="row")])
    for cell in row:
      kind = "best" if cell.best else "failed" if cell.text == "failed" else ""
      rows[-1].append(element("td", html.escape(cell.text), kind=kind, title=cell.exact))
  titles = ["run", *(column.title for column in columns)]
  return html_table(titles, rows, "runs", "Comparison of runs")


def _figure(figure, name: str, caption: str) -> str:
  if figure is None:
    return f"<p>No run has what this plot needs: {html.escape(caption)}</p>"
  return plot(figure, name, caption)


def _origin(run: Run) -> list[tuple[str, str]]:
  """Return what a reader needs to repeat a run, as (name, text)."""
  head, tied = run.get("head.class"), run.get("head.tied")
  versions = run.get("versions") or {}
  values = {
    "status": run.status,
    "error": run.get("error"),
    "head": f"{head}{', tied to the embedding' if tied else ''}" if head else None,
    "config": run.get("config_hash") or run.config_hash,
    "commit": run.get("commit"),
    "seed": run.get("seed"),
    "device": run.get("device"),
    "date": run.get("date"),
    "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
  }
  if values["error"] is None:
    del values["error"]
  return [(name, MISSING if value is None else str(value)) for name, value in values.items()]


def _entries(pairs: Iterable[tuple[str, str]]) -> str:
  return "\n".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in pairs)
