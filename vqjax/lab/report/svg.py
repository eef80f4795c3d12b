"""How does a figure become an SVG that reads on light and dark pages and is always the same?"""

import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

INK = "#1b1e23"
"""Colour of text and axes; in an SVG the page may set another as the CSS variable `--ink`."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#9a7400", "#3d8fc4")
"""Colours of runs, after Okabe and Ito, dark enough for text; in CSS `--series-0` to `-5`."""


def svg(figure: Figure, name: str, description: str) -> str:
  """The figure as an `<svg>` element, the same text for the same figure.

  Args:
    figure: what to draw.
    name: starts every id in it, so that one page can hold several figures.
    description: what it shows, in plain text, for those who cannot see it.
  """
  buffer = io.StringIO()
  with matplotlib.rc_context({"svg.hashsalt": "vqjax", "svg.fonttype": "path"}):
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=nothing)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
  text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
  text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
  return _themed(_labelled(text, description)).strip()


def _labelled(text: str, description: str) -> str:
  label = f'role="img" aria-label="{html.escape(description)}"'
  return text.replace("<svg ", f"<svg {label} ", 1)


def _themed(text: str) -> str:
  text = text.replace(INK, f"var(--ink, {INK})")
  for at, color in enumerate(SERIES):
    text = text.replace(color, f"var(--series-{at}, {color})")
  return text
