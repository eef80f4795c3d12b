"""What do losses, accuracies and group sizes of the grouped head look like?"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies.grouped.rows import rows
from experiments.studies.grouped.settings import Setting
from experiments.studies.study import Results
from vqjax.lab.report import INK, SERIES

CAPTIONS = {
  "grouped-pictures.png": "Figures 2, 7 and 8: classes of pictures, dense and grouped",
  "grouped-sizes.png": "Figure 3: memory and validation loss over the number of groups",
  "grouped-losses.png": "Figure 6: training loss on TinyStories",
}
"""File -> what it shows."""


def figures(
  results: Results, settings: Mapping[str, Setting], cost: Mapping[str, Any] | None
) -> dict[str, Figure]:
  """The plots that there are results for, by their files."""
  found = {
    "grouped-pictures.png": pictures(results),
    "grouped-sizes.png": sizes(results, settings["sizes"], cost or {}),
    "grouped-losses.png": losses(results, [s for s in settings.values() if s.rows]),
  }
  return {name: figure for name, figure in found.items() if figure is not None}


def _curve(results: Results, name: str, key: str) -> list[list[float]]:
  return results.get(name, {}).get("curves", {}).get(key, [])


def _frame(axes: Axes, across: str, up: str) -> None:
  axes.set_xlabel(across, fontsize=9, color=INK)
  axes.set_ylabel(up, fontsize=9, color=INK)
  axes.tick_params(labelsize=8)
  axes.spines[["top", "right"]].set_visible(False)


def losses(results: Results, settings: Sequence[Setting]) -> Figure | None:
  """Smoothed training loss of every row that was trained from scratch, a panel a setting."""
  shown = {
    s.name: [
      (at, row.label, curve)
      for at, row in enumerate(rows(s))
      if row.needs is None and (curve := _curve(results, f"{s.name}/{row.name}", "train"))
    ]
    for s in settings
  }
  shown = {name: curves for name, curves in shown.items() if len(curves) > 1}
  if not shown:
    return None
  figure = Figure(figsize=(4.8 * len(shown), 3.6), layout="constrained")
  for axes, (name, curves) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items()):
    for at, label, curve in curves:
      style = {"color": SERIES[at % len(SERIES)], "linestyle": "-" if at < len(SERIES) else "--"}
      axes.plot(*zip(*curve, strict=True), linewidth=1.2, label=label, **style)
    axes.set_title(name, fontsize=9, color=INK)
    _frame(axes, "step", "nats a token")
    axes.legend(fontsize=7, frameon=False, labelcolor=INK)
  return figure


PANELS = (
  ("train", "training loss, nats"),
  ("accuracy", "accuracy of validation"),
  ("group_accuracy", "accuracy of the group"),
)


def pictures(results: Results) -> Figure | None:
  """Training loss, accuracy of the class, and of the group."""
  names = {"dense": SERIES[0], "grouped": SERIES[1]}
  if not any(_curve(results, f"pictures/{name}", "train") for name in names):
    return None
  figure = Figure(figsize=(10.5, 3.2), layout="constrained")
  for axes, (key, said) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
    for name, color in names.items():
      curve = _curve(results, f"pictures/{name}", key)
      if curve:
        axes.plot(*zip(*curve, strict=True), color=color, label=name)
    _frame(axes, "step", said)
    if axes.lines:
      axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure


MEMORY = {
  "peak_bytes": "a training step",
  "head_temp_bytes": "the head alone",
  "untiled_temp_bytes": "the head alone, untiled",
}
"""Field of the bench's rows over sizes -> what its memory is of."""


def sizes(results: Results, s: Setting, cost: Mapping[str, Any]) -> Figure | None:
  """Memory by the compiler, and the validation loss where a model was trained."""
  memory = {
    said: sorted((row["groups"], row[key] / 1e9) for row in cost.get("sizes", []) if key in row)
    for key, said in MEMORY.items()
  }
  loss = sorted(
    (groups, results[f"{s.name}/groups-{groups}"]["result"]["valid"]["nats_per_token"])
    for groups in s.sizes
    if "valid" in results.get(f"{s.name}/groups-{groups}", {}).get("result", {})
  )
  if not loss and not any(memory.values()):
    return None
  figure = Figure(figsize=(9, 3.4), layout="constrained")
  panels = (memory, "GB, by the compiler"), ({"trained here": loss}, "validation loss, nats")
  for axes, (lines, said) in zip(figure.subplots(1, 2), panels, strict=True):
    for color, (label, points) in zip(SERIES, lines.items(), strict=False):
      if points:
        style = {"color": color, "markersize": 3, "linewidth": 1, "label": label}
        axes.plot(*zip(*points, strict=True), "o-", **style)
    axes.axvline(SQRT, color=INK, linewidth=0.8, linestyle=":", label="sqrt(V) groups")
    axes.set_xscale("log")
    _frame(axes, "groups", said)
    axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure


SQRT = 224
"""floor(sqrt V) of GPT-2's vocabulary."""
