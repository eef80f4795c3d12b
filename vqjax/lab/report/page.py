"""One HTML page with the tables, plots and origins of runs."""

import html
import os
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from vqjax.lab.report.plots import SERIES, loss_curves, size_against_perplexity, svg
from vqjax.lab.report.runs import Column, Run, common_split, default_columns, labels
from vqjax.lab.report.tables import breakable, html_table
from vqjax.lab.report.units import MISSING
from vqjax.lm import records

DARK_SERIES = ("#5db2ec", "#ff9152", "#3ccf9f", "#e38cc3", "#d9b23d", "#a9d4f5")
"""`SERIES` in the same order, light enough for a dark ground."""

SHELL = string.Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { $light }
@media screen and (prefers-color-scheme: dark) { :root { $dark } }
:root {
  --ground: #ffffff; --ink: #1b1e23; --quiet: #5a626d; --line: #d7dbe0; --raised: #f5f6f8;
  --failed: #b3261e;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #14171c; --ink: #e4e7eb; --quiet: #a0a8b3; --line: #363c45; --raised: #1d2128;
    --failed: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: $width; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
$style
</style>
</head>
<body>
<main>
<h1>$title</h1>
$body
</main>
</body>
</html>
""")
"""What all pages have: colours for light and dark, and the look of text."""

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


def document(title: str, body: str, style: str, width: str = "72rem") -> str:
  """A page of HTML that loads nothing from outside.

  Args:
    title: title and heading, as text.
    body: what follows the heading, in HTML.
    style: rules beside those of all pages, in CSS.
    width: largest width of the page.
  """
  series = lambda colors: "; ".join(f"--series-{at}: {color}" for at, color in enumerate(colors))
  return SHELL.substitute(
    title=html.escape(title),
    light=series(SERIES),
    dark=series(DARK_SERIES),
    body=body.strip(),
    style=style.strip(),
    width=width,
  )


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
