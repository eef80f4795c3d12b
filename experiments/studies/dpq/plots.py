"""What do scores, ratios and codes of DPQ look like?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies.dpq.measured import measured
from experiments.studies.dpq.setting import Codes, Setting
from experiments.studies.study import Results
from vqjax.lab.report import units
from vqjax.lab.report.svg import INK, SERIES

CAPTIONS = {
  "dpq-heat.png": "Figures 3 and 7: score and compression ratio over K and M, AG News",
  "dpq-trade.png": "Figure 8: score against compression ratio, AG News",
  "dpq-codes.png": "Figure 5: how many words of the vocabulary are on each code, Penn Treebank",
  "dpq-changes.png": "Figure 6: codes that changed since the checkpoint 50 steps before, AG News",
  "dpq-cost.png": "Figure 4: a training step beside that of the full embedding, LSTM of width 650",
}
"""File -> what it shows."""

KINDS = {"sx": "DPQ-SX", "vq": "DPQ-VQ"}


def figures(
  results: Results, settings: Mapping[str, Setting], cost: Mapping[str, Any] | None
) -> dict[str, Figure]:
  """The plots that there are results for, by their files."""
  found: dict[str, Figure | None] = {
    "dpq-cost.png": None if cost is None else training_cost(cost["training"]),
    "dpq-heat.png": heat(results, settings["ag-news-grid"]),
    "dpq-trade.png": trade(results, settings["ag-news-grid"]),
    "dpq-codes.png": usage(results, "ptb-small"),
    "dpq-changes.png": changes(results, settings["ag-news-changes"]),
  }
  return {name: figure for name, figure in found.items() if figure is not None}


def _grid(results: Results, s: Setting, kind: str, shared: bool) -> np.ndarray:
  """[K, M, (score, ratio)]; nan where nothing is measured."""
  found = np.full((len(s.grid[0]), len(s.grid[1]), 2), np.nan)
  for i, k in enumerate(s.grid[0]):
    for j, m in enumerate(s.grid[1]):
      row = measured(results, f"{s.name}/{kind}-{Codes(k, m, shared)}")
      if row.score and row.ratio:
        found[i, j] = row.score.mean, row.ratio
  return found


def heat(results: Results, s: Setting) -> Figure | None:
  """Score and ratio of both quantisers over K and M, subspaces with tables of their own."""
  grids = {kind: _grid(results, s, kind, False) for kind in KINDS}
  if all(np.isnan(grid).all() for grid in grids.values()):
    return None
  figure = Figure(figsize=(9.6, 3.2), layout="constrained")
  panels = [(kind, 0, f"{KINDS[kind]}: score") for kind in KINDS] + [("sx", 1, "ratio")]
  for axes, (kind, which, title) in zip(figure.subplots(1, 3), panels, strict=True):
    _heat(axes, grids[kind][..., which], s, title)
  return figure


def _heat(axes: Axes, values: np.ndarray, s: Setting, title: str) -> None:
  axes.imshow(values, cmap="Blues", aspect="auto")
  axes.set_title(title, fontsize=9, color=INK)
  axes.set_xticks(range(len(s.grid[1])), [str(m) for m in s.grid[1]], fontsize=8)
  axes.set_yticks(range(len(s.grid[0])), [str(k) for k in s.grid[0]], fontsize=8)
  axes.set_xlabel("subspaces, M", fontsize=8, color=INK)
  axes.set_ylabel("codes, K", fontsize=8, color=INK)
  middle = (np.nanmin(values) + np.nanmax(values)) / 2
  for (i, j), value in np.ndenumerate(values):
    color = "white" if value > middle else INK
    said = units.MISSING if np.isnan(value) else f"{value:.1f}"
    axes.text(j, i, said, ha="center", va="center", fontsize=8, color=color)


def trade(results: Results, s: Setting) -> Figure | None:
  """Score against ratio: both quantisers, shared or not, the best of each ratio joined."""
  figure = Figure(figsize=(7.2, 4.2), layout="constrained")
  axes = figure.add_subplot()
  drawn = False
  for at, kind in enumerate(KINDS):
    for shared in (False, True):
      points = _grid(results, s, kind, shared).reshape(-1, 2)
      points = points[~np.isnan(points).any(axis=1)]
      if len(points):
        drawn = True
        _points(axes, points, SERIES[at], shared, f"{KINDS[kind]}{', shared' if shared else ''}")
  full = measured(results, f"{s.name}/full").score
  if full:
    axes.axhline(full.mean, color=INK, linewidth=0.8, label="full")
  axes.set_xscale("log")
  axes.set_xlabel("compression ratio of the embedding, bytes", fontsize=9, color=INK)
  axes.set_ylabel("accuracy, %", fontsize=9, color=INK)
  axes.spines[["top", "right"]].set_visible(False)
  if not drawn:
    return None
  axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure


def _points(axes: Axes, points: np.ndarray, color: str, shared: bool, said: str) -> None:
  style = {"markerfacecolor": "white"} if shared else {}
  axes.plot(points[:, 1], points[:, 0], "o", color=color, markersize=5, label=said, **style)
  best = _frontier(points[:, ::-1].tolist())
  axes.plot(*zip(*best, strict=True), "--" if shared else "-", color=color, linewidth=1)


def _frontier(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
  """(ratio, score): those that no other point of a higher ratio beats, by falling ratio."""
  kept: list[Sequence[float]] = []
  for x, y in sorted(points, reverse=True):
    if not kept or y > kept[-1][1]:
      kept.append((x, y))
  return kept


def usage(results: Results, setting: str) -> Figure | None:
  """Words on each code of each subspace."""
  found = {
    kind: np.array(results[f"{setting}/{kind}"]["codes"]["counts"])
    for kind in KINDS
    if "codes" in results.get(f"{setting}/{kind}", {})
  }
  if not found:
    return None
  figure = Figure(figsize=(3.6 * len(found), 3.6), layout="constrained")
  for axes, (kind, counts) in zip(np.ravel(figure.subplots(1, len(found))), found.items()):
    image = axes.imshow(counts, cmap="Blues", aspect="auto")
    axes.set_title(KINDS[kind], fontsize=9, color=INK)
    axes.set_xlabel("code", fontsize=8, color=INK)
    axes.set_ylabel("subspace", fontsize=8, color=INK)
    figure.colorbar(image, ax=axes)
  return figure


def changes(results: Results, s: Setting) -> Figure | None:
  """Per cent of codes that changed from checkpoint to checkpoint, for each K."""
  figure = Figure(figsize=(8, 3.2), layout="constrained")
  drawn = False
  for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), KINDS.items(), strict=True):
    for color, k in zip(SERIES, s.grid[0], strict=False):
      rows = results.get(f"{s.name}/{kind}-{Codes(k, s.grid[1][0])}", {}).get("changes")
      if rows:
        drawn = True
        axes.plot(*zip(*rows, strict=True), color=color, label=f"K = {k}")
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlabel("step", fontsize=8, color=INK)
    axes.set_ylabel("codes that changed, %", fontsize=8, color=INK)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if drawn:
      axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure if drawn else None


def training_cost(rows: Mapping[str, Mapping[str, float]]) -> Figure:
  """Time and temporaries of a step relative to the full embedding's, over K for each M."""
  figure = Figure(figsize=(8, 3.2), layout="constrained")
  sizes = sorted({(int(m), int(k)) for name in rows for k, m in [name.split()[1].split("x")]})
  panels = zip(figure.subplots(1, 2), ("time", "temp"), ("time", "temporaries"), strict=True)
  for axes, key, said in panels:
    for color, m in zip(SERIES, sorted({m for m, _ in sizes}), strict=False):
      for kind, dash in (("SX", "-"), ("VQ", "--")):
        found = [(k, rows[f"{kind} {k}x{m}"][key]) for other, k in sizes if other == m]
        label = f"{kind}, M = {m}"
        axes.plot(*zip(*found, strict=True), f"o{dash}", color=color, markersize=4, label=label)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    codes = sorted({k for _, k in sizes})
    axes.set_xticks(codes, [str(k) for k in codes])
    axes.set_xlabel("codes, K", fontsize=8, color=INK)
    axes.set_ylabel(f"{said}, times the full embedding's", fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
  lines, labels = axes.get_legend_handles_labels()
  figure.legend(
    *(lines, labels),
    loc="outside right upper",
    fontsize=7,
    handlelength=3,
    frameon=False,
    labelcolor=INK,
  )
  return figure
