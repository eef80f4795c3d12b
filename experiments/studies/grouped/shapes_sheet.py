"""What do the pictures of the 184,320 classes look like?

python -m experiments.studies.grouped.shapes_sheet --out sheet.png

A contact sheet: a row for each attribute, with the class that is named above in all its values, and
below it pictures of classes that are drawn at random.
"""

import argparse
import io
import pathlib
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image

from vqjax.lab.data import shapes

BASE = shapes.Attributes(
  shape=7, pattern=1, rotation=1, colour=5, size=3, texture=0, opacity=3, border=0
)
"""Of the rows of attributes: a cross, since every turn of it shows."""

WIDEST = max(map(len, shapes.NAMES.values()))
"""Pictures beside each other: as many as there are colours."""

INK, QUIET = "#1b1e23", "#5a626d"


def main(arguments: list[str] | None = None) -> int:
  """Draws the sheet; the exit status."""
  options = _parser().parse_args(arguments)
  if min(options.rows, options.columns, options.dpi) < 1 or options.seed < 0:
    print("--rows, --columns, --dpi: give 1 or more; --seed: 0 or more", file=sys.stderr)
    return 2
  draw = np.random.default_rng(options.seed)
  chosen = draw.integers(0, shapes.NUM_CLASSES, (options.rows, options.columns))
  save(sheet(chosen, options.seed), options.out, options.dpi)
  print(options.out)
  return 0


def save(figure: Figure, path: pathlib.Path, dpi: int) -> None:
  """Writes a PNG of 256 colours: noise of all colours would be four times as large."""
  whole = io.BytesIO()
  figure.savefig(whole, dpi=dpi)
  path.parent.mkdir(parents=True, exist_ok=True)
  # Of the methods, this one keeps the colours that few pixels have.
  image = Image.open(whole).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
  image.save(path, "PNG", optimize=True)


def sheet(chosen: np.ndarray, seed: int = 0) -> Figure:
  """The contact sheet: the values of each attribute, and below them these classes.

  Args:
    chosen: classes [rows, columns].
    seed: of the drawings.
  """
  rows, columns = chosen.shape
  heights = [1.1 * len(_lines()) + 0.3, rows * (10 / columns + 0.45) + 0.3]
  figure = Figure(figsize=(10, sum(heights)))
  upper, lower = figure.subfigures(2, 1, height_ratios=heights)
  _values(upper, seed)
  _drawn(lower, chosen, seed)
  return figure


def _lines() -> list[list[str]]:
  """Attributes that have room beside each other, each in the first line that has room."""
  lines = []
  for attribute, names in shapes.NAMES.items():
    taken = lambda line: sum(len(shapes.NAMES[one]) for one in line)
    free = (line for line in lines if taken(line) + len(names) <= WIDEST)
    line = next(free, None)
    if line is None:
      lines.append([attribute])
    else:
      line.append(attribute)
  return lines


def _values(figure, seed: int) -> None:
  """Each attribute's values, side by side."""
  base = shapes.caption(int(shapes.class_of(BASE)))
  figure.suptitle(f"{base} - and with one attribute changed", size=9, y=0.99, color=INK)
  lines = _lines()
  grid = GridSpec(
    len(lines), WIDEST, figure, 0.01, 0.01, 0.99, 0.88, hspace=0.55, wspace=0.06
  )  # fmt: skip
  for row, line in enumerate(lines):
    column = 0
    for attribute in line:
      names = shapes.NAMES[attribute]
      values = [int(shapes.class_of(BASE._replace(**{attribute: at}))) for at in range(len(names))]
      for at, (image, name) in enumerate(zip(_pictures(values, seed), names)):
        axes = _show(figure, grid[row, column + at], image)
        axes.set_title(name, size=7, pad=2, color=QUIET)
        if at == 0:
          axes.text(0, 1.22, attribute, transform=axes.transAxes, size=8, weight="bold", color=INK)
      column += len(names)


def _drawn(figure, chosen: np.ndarray, seed: int) -> None:
  """The chosen classes, each with its attributes below it."""
  figure.suptitle("classes at random", size=9, y=0.99, color=INK)
  rows, columns = chosen.shape
  grid = GridSpec(rows, columns, figure, 0.01, 0.1, 0.99, 0.93, hspace=0.62, wspace=0.16)
  for place, image in enumerate(_pictures(chosen.ravel(), seed + 1)):
    axes = _show(figure, grid[divmod(place, columns)], image)
    words = textwrap.fill(shapes.caption(int(chosen.flat[place])), 225 // columns)
    axes.text(0.5, -0.04, words, transform=axes.transAxes, ha="center", va="top", size=6)


def _pictures(classes, seed: int) -> np.ndarray:
  numbers = np.arange(len(classes)) + seed * shapes.NUM_CLASSES
  return np.asarray(shapes.draw(jnp.stack([jnp.asarray(classes), jnp.asarray(numbers)], axis=-1)))


def _show(figure, place, image: np.ndarray):
  axes = figure.add_subplot(place)
  axes.imshow(image)
  axes.axis("off")
  return axes


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.studies.grouped.shapes_sheet",
    description="Draw a contact sheet of the pictures of the 184,320 classes.",
  )
  parser.add_argument("--out", type=pathlib.Path, required=True, metavar="PNG")
  parser.add_argument("--rows", type=int, default=3, help="of random classes (default: 3)")
  parser.add_argument("--columns", type=int, default=9, help="of random classes (default: 9)")
  parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
  parser.add_argument("--dpi", type=int, default=100, help="dots of an inch (default: 100)")
  return parser


if __name__ == "__main__":
  sys.exit(main())
