"""A contact sheet of the picture classes that `experiments.studies.grouped.shapes` draws."""

import io
import pathlib
import textwrap

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image

from experiments.studies.grouped import shapes
from vqjax.lm.pages import INK


def save_sheet(path: pathlib.Path, seed: int = 0) -> None:
  """Draw a contact sheet of the picture classes.

  The file is a PNG of 256 colours: the noise of all colours would make it four times as large.
  """
  # A cross, since each of its rotations looks different.
  base = shapes.Attributes(
    shape=7, pattern=1, rotation=1, colour=5, size=3, texture=0, opacity=3, border=0
  )
  width = max(map(len, shapes.NAMES.values()))
  lines: list[list[str]] = []
  for attribute, names in shapes.NAMES.items():
    # Attributes stand side by side in the first line that has room.
    for line in lines:
      if sum(len(shapes.NAMES[other]) for other in line) + len(names) <= width:
        line.append(attribute)
        break
    else:
      lines.append([attribute])
  chosen = np.random.default_rng(seed).integers(0, shapes.NUM_CLASSES, (3, 9))
  heights = [1.1 * len(lines) + 0.3, len(chosen) * (10 / chosen.shape[1] + 0.45) + 0.3]
  figure = Figure(figsize=(10, sum(heights)))
  upper, lower = figure.subfigures(2, 1, height_ratios=heights)

  def draw(part, grid, classes, seed) -> list[Axes]:
    numbers = jnp.arange(len(classes)) + seed * shapes.NUM_CLASSES
    panels = []
    images = shapes.draw(jnp.stack([jnp.asarray(classes), numbers], axis=-1))
    for cell, image in zip(grid, np.asarray(images), strict=True):
      panels.append(part.add_subplot(cell))
      panels[-1].imshow(image)
      panels[-1].axis("off")
    return panels

  title = f"{shapes.caption(int(shapes.class_of(base)))} - and with one attribute changed"
  upper.suptitle(title, size=9, y=0.99, color=INK)
  grid = GridSpec(len(lines), width, upper, 0.01, 0.01, 0.99, 0.88, hspace=0.55, wspace=0.06)
  for at, line in enumerate(lines):
    column = 0
    for attribute in line:
      names = shapes.NAMES[attribute]
      classes = [shapes.class_of(base._replace(**{attribute: i})) for i in range(len(names))]
      cells = [grid[at, column + i] for i in range(len(names))]
      panels = draw(upper, cells, np.array(classes, np.int32), seed)
      for axes, name in zip(panels, names, strict=True):
        axes.set_title(name, size=7, pad=2, color="#5a626d")
      first = panels[0]
      first.text(0, 1.22, attribute, transform=first.transAxes, size=8, weight="bold", color=INK)
      column += len(names)
  lower.suptitle("classes at random", size=9, y=0.99, color=INK)
  grid = GridSpec(*chosen.shape, lower, 0.01, 0.1, 0.99, 0.93, hspace=0.62, wspace=0.16)
  cells = [grid[at] for at in np.ndindex(chosen.shape)]
  for axes, of in zip(draw(lower, cells, chosen.ravel(), seed + 1), chosen.flat, strict=True):
    words = textwrap.fill(shapes.caption(int(of)), 225 // chosen.shape[1])
    axes.text(0.5, -0.04, words, transform=axes.transAxes, ha="center", va="top", size=6)
  buffer = io.BytesIO()
  figure.savefig(buffer, dpi=100)
  path.parent.mkdir(parents=True, exist_ok=True)
  # Of the methods, this one keeps the colours that few pixels have.
  image = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
  image.save(path, "PNG", optimize=True)
