"""Where do labels go so that they overlap neither each other nor the points?"""

import itertools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from vqjax.lab.report.svg import INK
from vqjax.lab.report.units import shorten


def spread(wanted: Sequence[float], gap: float) -> list[float]:
  """Positions in [0, 1], `gap` apart and in the same order, nearest to the wanted ones.

  Neighbours that are too close form a block around the mean of what they want: least squares by
  isotonic regression, once positions are shifted by their rank. Too many for [0, 1] leave it at
  the top.
  """
  order = sorted(range(len(wanted)), key=lambda at: (wanted[at], at))
  blocks: list[list[float]] = []
  for rank, at in enumerate(order):
    blocks.append([wanted[at] - rank * gap])
    while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
      blocks[-2:] = [blocks[-2] + blocks[-1]]
  last = max(0.0, 1 - (len(wanted) - 1) * gap)
  shifted = [min(max(_mean(block), 0.0), last) for block in blocks for _ in block]
  placed = {at: shifted[rank] + rank * gap for rank, at in enumerate(order)}
  return [placed[at] for at in range(len(wanted))]


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)


def label_points(axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str]):
  """Writes a text beside each point, at the nearest free place, with a line where it is far."""
  # The layout moves the axes, and a line to a label must not: places are known from here on.
  FigureCanvasAgg(axes.figure).draw()
  axes.autoscale(False)
  points = axes.transData.transform(list(zip(xs, ys, strict=True)))
  taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
  for (x, y), text in zip(points, texts, strict=True):
    artist = axes.text(0, 0, shorten(text), color=INK, fontsize=9, va="bottom", ha="left")
    extent = artist.get_window_extent()
    box, far = _free_place(x, y, extent.width, extent.height, taken, axes.bbox)
    artist.set_position(axes.transData.inverted().transform((box.x0, box.y0)))
    taken.append(box)
    if far:
      _leader(axes, (x, y), box)


def _free_place(x, y, width, height, taken: Sequence[Bbox], inside: Bbox) -> tuple[Bbox, bool]:
  """The nearest of the places around a point that is free and inside the axes."""
  for distance, turn in itertools.product((9, 20, 34, 50, 68), (0, 4, 2, 6, 1, 7, 3, 5)):
    dx, dy = math.cos(turn * math.pi / 4), math.sin(turn * math.pi / 4)
    left = x + distance * dx + (dx - 1) / 2 * width
    box = Bbox.from_bounds(left, y + distance * dy + (dy - 1) / 2 * height, width, height)
    fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0
    if fits and box.y1 <= inside.y1 and box.count_overlaps(taken) == 0:
      return box, distance > 20
  return Bbox.from_bounds(x + 9, y - height / 2, width, height), False


def _leader(axes: Axes, point: tuple[float, float], box: Bbox):
  nearest = min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)
  (x0, y0), (x1, y1) = axes.transData.inverted().transform([point, nearest])
  axes.plot([x0, x1], [y0, y1], color=INK, alpha=0.5, linewidth=0.7, zorder=1)
