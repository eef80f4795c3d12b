"""Pages of HTML that load nothing from outside, and figures in them."""

from __future__ import annotations

import html
import io
import re
import string
import typing

# It is loaded where a figure is drawn: most commands that can write a page do not.
if typing.TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

INK = "#1b1e23"
"""Colour of text and axes; in an SVG the page may set another as the CSS variable `--ink`."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#9a7400", "#3d8fc4")
"""Colours of runs, after Okabe and Ito, dark enough for text; in CSS `--series-0` to `-5`."""

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


def blank(height: float) -> tuple[Figure, Axes]:
  """Return a figure of the page's width and its axes, on a transparent ground."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7.2, height), layout="constrained")
  figure.patch.set_alpha(0)
  axes = figure.add_subplot()
  axes.patch.set_alpha(0)
  axes.spines[["top", "right"]].set_visible(False)
  axes.spines[:].set_color(INK)
  axes.tick_params(colors=INK, labelsize=9)
  axes.xaxis.label.set_color(INK)
  axes.yaxis.label.set_color(INK)
  axes.grid(color=INK, alpha=0.15, linewidth=0.6)
  axes.set_axisbelow(True)
  return figure, axes


def svg(figure: Figure, name: str, description: str) -> str:
  """Return a figure as an `<svg>` element, the same text for the same figure.

  Args:
    figure: the figure.
    name: prefix of every id in the element, so that a page can hold several figures.
    description: text for readers who cannot see the figure.
  """
  import matplotlib

  buffer = io.StringIO()
  # A fixed salt and no date: the text changes only where a number does. Letters are outlines,
  # because the reader's machine may lack the font.
  with matplotlib.rc_context({"svg.hashsalt": "vqjax", "svg.fonttype": "path"}):
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=no_metadata)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
  # The style of the page sets the size; the viewBox keeps the proportions.
  text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
  text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
  label = f'role="img" aria-label="{html.escape(description)}"'
  text = text.replace("<svg ", f"<svg {label} ", 1).replace(INK, f"var(--ink, {INK})")
  for at, color in enumerate(SERIES):
    text = text.replace(color, f"var(--series-{at}, {color})")
  return text.strip()
