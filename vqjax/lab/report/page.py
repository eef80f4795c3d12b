"""How do runs become one HTML page that needs nothing but itself?"""

import html
import os
import pathlib
from collections import Counter
from collections.abc import Sequence

from matplotlib.figure import Figure

from vqjax.lab.report.columns import Column, common_split, default_columns
from vqjax.lab.report.plots import loss_curves, size_against_perplexity
from vqjax.lab.report.rows import Run, labels
from vqjax.lab.report.style import style
from vqjax.lab.report.svg import svg
from vqjax.lab.report.tables import breakable, html_table
from vqjax.lab.report.units import MISSING


def write_page(
  runs: Sequence[Run],
  path: str | os.PathLike,
  title: str = "Runs",
  columns: Sequence[Column] | None = None,
) -> None:
  """Writes the table, the plots, what each column means and where each run comes from.

  The file asks for nothing outside itself and replaces an older one as a whole.
  """
  columns = default_columns(runs) if columns is None else columns
  sections = [_intro(runs, title), _table(columns, runs), *_plots(runs)]
  sections += [_meanings(columns), _provenance(runs)]
  write_whole(path, _document(title, "\n".join(sections)))


def write_whole(path: str | os.PathLike, text: str) -> None:
  """Writes a file so that a reader sees the old text or the new one, never a part."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_name(f".{path.name}.{os.getpid()}")
  beside.write_text(text, encoding="utf-8")
  beside.replace(path)


def _document(title: str, body: str) -> str:
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{style()}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _intro(runs: Sequence[Run], title: str) -> str:
  states = Counter(run.status for run in runs)
  told = ", ".join(f"{states[s]} {s}" for s in ("finished", "failed", "unfinished") if states[s])
  split = common_split(runs)
  why = "" if split == "test" else " (not every finished run has test numbers)"
  return (
    f"<h1>{html.escape(title)}</h1>\n<p>{len(runs)} runs: {told}. Quality is that of the"
    f" <b>{split}</b> split{why}. The best value of a column is bold; exact values show on"
    " hovering.</p>"
  )


def _table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
  # Reachable by keyboard, because a narrow screen has to scroll it.
  attributes = 'class="scroll" tabindex="0" role="region" aria-label="Comparison of runs"'
  return f"<div {attributes}>\n{html_table(columns, runs)}\n</div>"


def _plots(runs: Sequence[Run]) -> list[str]:
  curves = "Loss over optimiser steps. Lines: training, lightly smoothed; rings: validation."
  sizes = (
    f"Bytes of the head against perplexity on the {common_split(runs)} split. Lower left is better."
  )
  return [
    _plot(loss_curves(runs), "loss", curves),
    _plot(size_against_perplexity(runs), "size", sizes),
  ]


def _plot(figure: Figure | None, name: str, says: str) -> str:
  if figure is None:
    return f"<p>No run has what this plot needs: {html.escape(says)}</p>"
  drawn = svg(figure, name, says)
  caption = f"<figcaption>{html.escape(says)}</figcaption>"
  return f'<figure>\n<div class="plot" tabindex="0">{drawn}</div>\n{caption}\n</figure>'


def _meanings(columns: Sequence[Column]) -> str:
  return '<h2>What the columns mean</h2>\n<dl class="meanings">\n' + _entries(
    (column.title, column.meaning) for column in columns
  )


def _provenance(runs: Sequence[Run]) -> str:
  cards = [
    f'<section class="card">\n<h3>{breakable(label)}</h3>\n<dl>\n{entries}\n</section>'
    for label, entries in zip(labels(runs), (_entries(_origin(run)) for run in runs), strict=True)
  ]
  heading = "<h2>Where the numbers come from</h2>"
  return "\n".join([heading, '<div class="cards">', *cards, "</div>"])


def _origin(run: Run) -> list[tuple[str, str]]:
  versions = run.get("versions") or {}
  tied = ", tied to the embedding" if run.get("head.tied") else ""
  head = run.get("head.class")
  known = [
    ("status", run.status),
    ("error", run.get("error")),
    ("head", f"{head}{tied}" if head else None),
    ("config", run.get("config_hash") or run.config_hash),
    ("commit", run.get("commit")),
    ("seed", run.get("seed")),
    ("device", run.get("device")),
    ("date", run.get("date")),
    ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) or None),
  ]
  always = [(name, MISSING if value is None else str(value)) for name, value in known]
  return [(name, value) for name, value in always if value != MISSING or name != "error"]


def _entries(pairs) -> str:
  lines = (f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in pairs)
  return "\n".join(lines) + "\n</dl>"
