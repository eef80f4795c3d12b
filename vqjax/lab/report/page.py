"""One HTML page with the tables, plots and origins of runs."""

import html
import os
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from vqjax.lab.report.plots import loss_curves, size_against_perplexity
from vqjax.lab.report.runs import Column, Run, common_split, default_columns, labels
from vqjax.lab.report.tables import breakable, html_table
from vqjax.lab.report.units import MISSING
from vqjax.lm import records
from vqjax.lm.pages import document, svg

STYLE = """\
h3 { font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p, dd { max-width: 46rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
td { font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; }
thead th { vertical-align: bottom; white-space: normal; color: var(--quiet); font-weight: 600; }
tbody tr { border-top: 1px solid var(--line); }
th:first-child {
  position: sticky; left: 0; text-align: left; background: var(--raised); font-weight: 600;
}
tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
td.best { font-weight: 700; }
td.failed { color: var(--failed); }
figure { margin: 2rem 0 0; max-width: 52rem; }
.plot { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 30rem; height: auto; }
figcaption { color: var(--quiet); font-size: .875rem; margin-top: .4rem; }
dt { font-weight: 600; }
dd { margin: 0; }
.meanings dd { margin-bottom: .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .8rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; }
.card { background: var(--raised); }
.card dl { display: grid; grid-template-columns: auto 1fr; gap: .1rem .8rem; margin: 0; }
.card dl { font-size: .85rem; }
.card dt { color: var(--quiet); font-weight: 400; }
.card dd { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  tbody th { min-width: 7rem; max-width: 9rem; }
  th, td { padding: .4rem .5rem; }
}
@media print {
  main { max-width: none; padding: 0; }
  .scroll, .plot { overflow: visible; border: 0; }
  figure svg { min-width: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .3rem; }
  tbody th { min-width: 6rem; }
  figure, .card { break-inside: avoid; }
}
"""

BODY = string.Template("""\
<p>$states. Quality is that of the <b>$split</b> split$reason. The best value of a column is bold;\
 the exact value of a cell shows when the pointer is on it.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Comparison of runs">
$table
</div>
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


def write_page(
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
    f'<section class="card">\n<h3>{breakable(label)}</h3>\n<dl>\n{_entries(_origin(run))}\n</dl>'
    "\n</section>"
    for label, run in zip(labels(runs), runs)
  ]
  body = BODY.substitute(
    states=f"{len(runs)} runs: {', '.join(counts)}",
    split=split,
    reason="" if split == "test" else " (not every finished run has test numbers)",
    table=html_table(columns, runs),
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
    cards="\n".join(cards),
  )
  records.write_text(path, document(title, body, STYLE))


def _figure(figure, name: str, caption: str) -> str:
  if figure is None:
    return f"<p>No run has what this plot needs: {html.escape(caption)}</p>"
  drawn = f'<div class="plot" tabindex="0">{svg(figure, name, caption)}</div>'
  return f"<figure>\n{drawn}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


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
