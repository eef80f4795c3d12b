"""Plots of runs: loss curves, and the size of heads against perplexity."""

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from vqjax.lab.report import units
from vqjax.lab.report.runs import Run, common_split, labels
from vqjax.lm.pages import INK, SERIES, blank
from vqjax.outputs import atomic_file

__all__ = ["byte_axis", "label_points", "loss_curves", "save_png", "size_against_perplexity"]

DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)))
"""Line styles of the first six runs, the next six, ..."""


def loss_curves(runs: Sequence[Run]) -> Figure | None:
  """Plot training and validation loss over steps; None if no run has a row."""
  figure, axes = blank(height=max(3.6, 0.8 + 0.19 * len(runs)))
  ends = []
  for style, run, label in zip(_styles(), runs, labels(runs)):
    train = _series(run, lambda row: row.get("loss"))
    valid = _series(run, lambda row: (row.get("valid") or {}).get("nats_per_token"))
    if len(train):
      train[:, 1] = smooth(train[:, 1])
      axes.plot(*train.T, linewidth=1.5, **style)
    if len(valid):
      axes.plot(*valid.T, "o", markersize=5, markerfacecolor="none", color=style["color"])
    drawn = train if len(train) else valid
    if len(drawn):
      ends.append((drawn[-1], label, style["color"]))
  if not ends:
    return None
  axes.set_xlabel("optimiser step")
  axes.set_ylabel("nats per token\n(line: training, ring: validation)")
  # The first twentieth may lie outside: there the loss falls from log V.
  last = max(x for (x, _), *_ in ends)
  drawn = np.concatenate([np.column_stack(line.get_data()) for line in axes.lines])
  later = drawn[drawn[:, 0] >= last / 20, 1]
  pad = 0.05 * (later.max() - later.min()) or 0.1
  axes.set(xlim=(0, last * 1.02), ylim=(later.min() - pad, later.max() + pad))
  axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  # The names stand at the right edge, moved apart where they would overlap.
  bottom, top = axes.get_ylim()
  gap = 0.17 / (figure.get_figheight() - 0.7)  # inches, of the axes without their labels
  heights = spread_labels([(y - bottom) / (top - bottom) for (_, y), *_ in ends], gap)
  for (end, label, color), height in zip(ends, heights):
    axes.annotate(
      units.shorten(label),
      end,
      (1.04, height),
      textcoords="axes fraction",
      color=color,
      fontsize=9,
      va="center",
      parse_math=False,  # a name may have dollar signs
      arrowprops={
        "arrowstyle": "-",
        "alpha": 0.5,
        "linewidth": 0.7,
        "relpos": (0, 0.5),
        "color": color,
      },
    )
  return figure


def size_against_perplexity(runs: Sequence[Run]) -> Figure | None:
  """Plot head bytes against perplexity, with labels; None if no run has both."""
  split = common_split(runs)
  points = []
  for style, run, label in zip(_styles(), runs, labels(runs)):
    size, perplexity = run.get("head.state_bytes"), run.get(f"{split}.perplexity")
    if size is not None and perplexity is not None and math.isfinite(perplexity):
      points.append((size, perplexity, label, style["color"]))
  if not points:
    return None
  sizes, perplexities, names, colors = zip(*points)
  figure, axes = blank(height=3.8)
  xs = byte_axis(axes, sizes)
  for x, y, color in zip(xs, perplexities, colors):
    axes.plot(x, y, marker="o", markersize=7, color=color)
  axes.set_xlabel("head bytes")
  axes.set_ylabel(f"{split} perplexity")
  axes.margins(y=0.2)
  if max(perplexities) > 8 * min(perplexities):  # one run would squeeze the others together
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
  label_points(axes, xs, perplexities, names)
  return figure


def save_png(figure: Figure, path: str | os.PathLike) -> None:
  """Write a figure on a white ground, about 1500 pixels wide."""
  with atomic_file(path) as file:
    figure.savefig(file, format="png", dpi=200, facecolor="white", bbox_inches="tight")


def _styles():
  return itertools.cycle({"color": c, "linestyle": d} for d in DASHES for c in SERIES)


def _series(run: Run, get: Callable[[Mapping[str, Any]], float | None]) -> np.ndarray:
  """Return steps and finite values as [points, 2], the last of a repeated step."""
  values = {row["step"]: get(row) for row in run.metrics if get(row) is not None}
  finite = sorted((step, value) for step, value in values.items() if math.isfinite(value))
  return np.array(finite, float).reshape(-1, 2)


def smooth(values: np.ndarray) -> np.ndarray:
  """Return running means over a fiftieth of the curve on either side.

  The window shrinks towards both ends, so that the first and the last value do not change.
  """
  at = np.arange(len(values))
  reach = np.minimum(len(values) // 50, np.minimum(at, at[::-1]))
  total = np.concatenate([[0.0], np.cumsum(values)])
  return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def spread_labels(wanted: Sequence[float], gap: float) -> list[float]:
  """Return positions in [0, 1] that are `gap` apart and nearest to the wanted ones.

  The order does not change. The least-squares solution is an isotonic regression, once positions
  are shifted by their rank. Too many labels for [0, 1] exceed it at the top.
  """
  order = np.argsort(wanted, kind="stable")
  shifts = gap * np.arange(len(wanted))
  shifted = isotonic_regression(np.asarray(wanted)[order] - shifts).x
  placed = np.empty(len(wanted))
  placed[order] = np.clip(shifted, 0, max(0.0, 1 - shifts[-1])) + shifts
  return placed.tolist()


def label_points(axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str]):
  """Write labels at free positions near their points, with lines to distant ones.

  The nearest of the free positions is taken whose line crosses the fewest points and labels.
  """
  # The layout moves the axes, and a line to a label must not move: positions are final from here.
  FigureCanvasAgg(axes.figure).draw()
  axes.autoscale(False)
  to_data = axes.transData.inverted().transform
  points = axes.transData.transform(list(zip(xs, ys, strict=True)))
  occupied = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
  turns = (0, 8, 2, 14, 6, 10, 4, 12, 1, 15, 7, 9, 3, 13, 5, 11)  # sixteenths; sides come first
  for at, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
    look = {"color": INK, "fontsize": 9, "va": "bottom", "ha": "left", "parse_math": False}
    artist = axes.text(0, 0, units.shorten(text), **look)
    extent = artist.get_window_extent()
    width, height = extent.width, extent.height
    free = []
    for distance, turn in itertools.product((9, 20, 34, 50, 68), turns):
      dx, dy = math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)
      left = x + distance * dx + (dx - 1) / 2 * width
      bottom = y + distance * dy + (dy - 1) / 2 * height
      box = Bbox.from_bounds(left, bottom, width, height)
      inside = axes.bbox.count_contains(box.get_points()) == 2
      if inside and box.count_overlaps(occupied) == 0:
        line = Path([(x, y), np.clip((x, y), box.min, box.max)])
        others = occupied[:at] + occupied[at + 1 :]
        # The nearest labels have no line.
        crossed = sum(map(line.intersects_bbox, others)) if distance > 9 else 0
        free.append((crossed, distance, box))
    beside = (0, 0, Bbox.from_bounds(x + 9, y - height / 2, width, height))
    _, distance, box = min(free, key=lambda one: one[:2], default=beside)
    artist.set_position(to_data((box.x0, box.y0)))
    occupied.append(box)
    if distance > 9:
      nearest = np.clip((x, y), box.min, box.max)
      line = to_data([(x, y), nearest])
      axes.plot(*line.T, color=INK, alpha=0.5, linewidth=0.7, zorder=1)


def byte_axis(axes: Axes, sizes: Sequence[float]) -> list[float]:
  """Make the x axis logarithmic in bytes; return the x of each size.

  A size of 0, that of a tied head, stands left of the smallest.
  """
  positive = [size for size in sizes if size > 0] or [1]
  low, high = math.log2(min(positive)), math.log2(max(positive))
  zero = 2 ** (low - max(1.0, (high - low) / 6))
  axes.set_xscale("log", base=2)
  stride = max(1, math.ceil((high - low) / 6))
  ticks = [2.0**exponent for exponent in range(math.floor(low), math.ceil(high) + 1, stride)]
  if min(sizes) <= 0:
    ticks = [zero, *(tick for tick in ticks if tick >= min(positive))]
  names = ["0 (tied)" if tick <= zero else units.size(tick) for tick in ticks]
  axes.set_xticks(ticks, [re.sub(r"\.0+(?= )", "", name) for name in names])
  axes.minorticks_off()
  xs = [size if size > 0 else zero for size in sizes]
  pad = 2 ** max(0.5, (high - low) / 7)
  axes.set_xlim(min(xs) / pad, max(xs) * pad)
  return xs
