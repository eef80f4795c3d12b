"""What do the loss curves look like, and what does a smaller head cost in perplexity?"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vqjax.lab.report import units
from vqjax.lab.report.columns import common_split
from vqjax.lab.report.placing import label_points, spread
from vqjax.lab.report.rows import Run, labels
from vqjax.lab.report.svg import INK, SERIES

_LEADER = {"arrowstyle": "-", "alpha": 0.5, "linewidth": 0.7, "relpos": (0, 0.5)}
_DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)))


def loss_curves(runs: Sequence[Run]) -> Figure | None:
  """Training loss, lightly smoothed, and validation points over steps; None without any row."""
  figure, axes = blank(height=max(3.6, 0.8 + 0.19 * len(runs)))
  ends = []
  for style, run, label in zip(_styles(), runs, labels(runs), strict=False):
    end = _draw_curve(axes, run, style)
    ends += [(*end, label, style["color"])] if end else []
  if not ends:
    return None
  axes.set_xlabel("optimiser step")
  axes.set_ylabel("nats per token\n(line: training, ring: validation)")
  _frame(axes, last=max(x for x, *_ in ends))
  axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  _label_ends(axes, ends)
  return figure


def size_against_perplexity(runs: Sequence[Run]) -> Figure | None:
  """Head bytes against perplexity, one labelled point for each run; None without any point."""
  split = common_split(runs)
  points = []
  for style, run, label in zip(_styles(), runs, labels(runs), strict=False):
    size, perplexity = run.get("head.state_bytes"), run.get(f"{split}.perplexity")
    if size is not None and perplexity is not None and math.isfinite(perplexity):
      points.append((size, perplexity, label, style["color"]))
  if not points:
    return None
  figure, axes = blank(height=3.8)
  drawn_x = byte_axis(axes, [point[0] for point in points])
  for x, (_, y, _, color) in zip(drawn_x, points, strict=True):
    axes.plot(x, y, marker="o", markersize=7, color=color)
  axes.set_xlabel("head bytes")
  axes.set_ylabel(f"{split} perplexity")
  axes.margins(y=0.2)
  _perplexity_axis(axes, [point[1] for point in points])
  label_points(axes, drawn_x, [p[1] for p in points], [p[2] for p in points])
  return figure


def save_png(figure: Figure, path: str | os.PathLike) -> None:
  """Writes the figure on a white ground, at a width of about 1500 pixels."""
  figure.savefig(path, format="png", dpi=200, facecolor="white", bbox_inches="tight")


def _styles():
  return itertools.cycle({"color": c, "linestyle": d} for d in _DASHES for c in SERIES)


def blank(height: float) -> tuple[Figure, Axes]:
  """A figure of the page's width and its axes, on the page's ground."""
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


def _frame(axes: Axes, last: float):
  """All steps, and the losses after the first twentieth: before, they fall from log V."""
  axes.set_xlim(0, last * 1.02)
  drawn = np.concatenate([np.column_stack(line.get_data()) for line in axes.lines])
  later = drawn[drawn[:, 0] >= last / 20, 1]
  pad = 0.05 * (later.max() - later.min()) or 0.1
  axes.set_ylim(later.min() - pad, later.max() + pad)


def _draw_curve(axes: Axes, run: Run, style: dict) -> tuple[float, float] | None:
  """Draws a run and returns its last point; None where it has none."""
  train, valid = _series(run, lambda row: row.get("loss")), _series(run, _valid_loss)
  if len(train):
    train[:, 1] = smooth(train[:, 1])
    axes.plot(*train.T, linewidth=1.5, **style)
  if len(valid):
    axes.plot(*valid.T, "o", markersize=5, markerfacecolor="none", color=style["color"])
  drawn = train if len(train) else valid
  return tuple(drawn[-1]) if len(drawn) else None


def _valid_loss(row: Mapping[str, Any]) -> float | None:
  return (row.get("valid") or {}).get("nats_per_token")


def _series(run: Run, get: Callable[[Mapping[str, Any]], float | None]) -> np.ndarray:
  """[points, 2]: steps and finite values; of a step that a resumed run repeats, the last."""
  found = {row["step"]: get(row) for row in run.metrics if get(row) is not None}
  finite = sorted((step, value) for step, value in found.items() if math.isfinite(value))
  return np.array(finite, float).reshape(-1, 2)


def smooth(values: np.ndarray) -> np.ndarray:
  """Each value's mean with its neighbours, over a fiftieth of the curve on either side.

  The window shrinks towards both ends, so the first and the last value stay what they are.
  """
  half = len(values) // 50
  reach = np.minimum(half, np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]))
  total = np.concatenate([[0.0], np.cumsum(values)])
  at = np.arange(len(values))
  return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]):
  """Names the curves at the right edge, moved apart where they would overlap."""
  bottom, top = axes.get_ylim()
  wanted = [(y - bottom) / (top - bottom) for _, y, _, _ in ends]
  gap = 0.17 / (axes.figure.get_figheight() - 0.7)  # inches, of the axes without their labels
  for (x, y, label, color), place in zip(ends, spread(wanted, gap), strict=True):
    axes.annotate(
      units.shorten(label),
      (x, y),
      (1.04, place),
      textcoords="axes fraction",
      color=color,
      fontsize=9,
      va="center",
      arrowprops=_LEADER | {"color": color},
    )


def byte_axis(axes: Axes, sizes: Sequence[float]) -> list[float]:
  """A logarithmic axis of bytes; 0, the size of a tied head, stands left of the smallest."""
  positive = [size for size in sizes if size > 0] or [1]
  low, high = math.log2(min(positive)), math.log2(max(positive))
  zero = low - max(1.0, (high - low) / 6)
  axes.set_xscale("log", base=2)
  stride = max(1, math.ceil((high - low) / 6))
  exponents = range(math.floor(low), math.ceil(high) + 1, stride)
  ticks = [2.0**exponent for exponent in exponents]
  if min(sizes) <= 0:
    ticks = [2**zero, *(tick for tick in ticks if tick >= min(positive))]
  names = ["0 (tied)" if tick <= 2**zero else units.size(tick) for tick in ticks]
  axes.set_xticks(ticks, [name.replace(".00", "") for name in names])
  axes.minorticks_off()
  drawn = [size if size > 0 else 2**zero for size in sizes]
  pad = 2 ** max(0.5, (high - low) / 8)
  axes.set_xlim(min(drawn) / pad, max(drawn) * pad)
  return drawn


def _perplexity_axis(axes: Axes, values: Sequence[float]):
  """Logarithmic where one run would squeeze the others together."""
  if max(values) > 8 * min(values):
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
