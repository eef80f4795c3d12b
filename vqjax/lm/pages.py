"""Pages of HTML that load nothing from outside, and figures in them."""

from __future__ import annotations

import html
import io
import pathlib
import re
import string
import typing
from collections.abc import Iterable

__all__ = ["INK", "SERIES", "blank"]

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


def document(title: str, body: str, width: str = "72rem") -> str:
  """A page of HTML that loads nothing from outside.

  Args:
    title: title and heading, as text.
    body: what follows the heading, in HTML.
    width: largest width of the page.
  """
  series = lambda colors: "; ".join(f"--series-{at}: {color}" for at, color in enumerate(colors))
  page = pathlib.Path(__file__).with_name("page.html").read_text("utf-8")
  return string.Template(page).substitute(
    title=html.escape(title),
    light=series(SERIES),
    dark=series(DARK_SERIES),
    body=body.strip(),
    width=width,
  )


def element(tag: str, content: str, **attributes: str) -> str:
  """An element of HTML; attributes without a value are left out, and `kind` is its class."""
  given = {{"kind": "class"}.get(name, name): value for name, value in attributes.items() if value}
  listed = "".join(f' {name}="{html.escape(value)}"' for name, value in given.items())
  return f"<{tag}{listed}>{content}</{tag}>"


def html_table(columns: Iterable[str], rows: Iterable[Iterable[str]], kind: str, label: str) -> str:
  """A table that scrolls where the window is narrow.

  Args:
    columns: titles of the columns, as text.
    rows: elements th and td of each row, in HTML.
    kind: its class, which sets how it looks.
    label: text for readers who cannot see it.
  """
  header = "".join(element("th", html.escape(title), scope="col") for title in columns)
  lines = "\n".join(element("tr", "".join(row)) for row in rows)
  body = f"\n<thead><tr>{header}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n"
  shown = element("table", body, kind=kind)
  attributes = {"tabindex": "0", "role": "region", "aria-label": label}
  return element("div", shown, kind="scroll", **attributes)


def plot(figure: Figure, name: str, caption: str) -> str:
  """A figure with its caption, a text; `name` is that of `svg`."""
  drawn = element("div", svg(figure, name, caption), kind="plot", tabindex="0")
  return element("figure", f"\n{drawn}\n{element('figcaption', html.escape(caption))}\n")


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
