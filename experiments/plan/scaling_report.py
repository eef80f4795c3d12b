"""Tables and figures of the grid of plans."""

import math
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

from experiments.studies import study_page
from vqjax.lab import report
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lm.pages import INK, SERIES

PlanRows = Mapping[Any, Mapping[str, Any] | None]
"""Cell of the grid -> its row, or None if it has not been planned."""

_METRICS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
  "memory": lambda plan: _fitting(plan),
  "head's parameters": lambda plan: units.size(plan["bytes"]["head"]),
  "bytes sent": lambda plan: units.size(plan["sent"]),
  "time, ms": lambda plan: _least(plan),
}
"""Quantities of a plan, as the page shows them; the page's prose explains each."""


def _fitting(plan: Mapping[str, Any]) -> str:
  size = units.size(plan["bytes"]["total"])
  return size if plan["fits"] else f"{size}, does not fit"


def _sent_along(plan: Mapping[str, Any], axis: str) -> float:
  return sum(row["sent"] for row in plan["collectives"] if axis in row["axes"])


def _least(plan: Mapping[str, Any]) -> str:
  roofline = plan["roofline"]
  return f"{units.milliseconds(roofline['seconds'])} {roofline['limit'][0]}"


def update(rows: PlanRows, path: pathlib.Path) -> None:
  """Rewrite the page's table of plans and one of each model, and a CSV file of each model."""
  configs = dict.fromkeys(cell.config for cell in rows)
  blocks = {"plans": markdown(_plans(rows))}
  for config in configs:
    some = {cell: row for cell, row in rows.items() if cell.config == config}
    if any(some.values()):
      every = pd.concat([_table(some, value).assign(of=name) for name, value in _METRICS.items()])
      whole = every[["of", *every.columns.drop("of")]].rename(columns={"of": "quantity"})
      study_page.save_table(path.with_name(f"{path.stem}-{config}.csv"), whole)
      shown = whole[whole["V"] == whole["V"].iloc[-1]].drop(columns="V")
      blocks[config] = markdown(shown, left=2)
  study_page.update_page(path, blocks)


def _plans(rows: PlanRows) -> pd.DataFrame:
  """The number of plans for each kind of device, and what made them."""
  return pd.DataFrame(
    [
      _plans_of(device, [row for cell, row in rows.items() if cell.device == device])
      for device in dict.fromkeys(cell.device for cell in rows)
    ]
  )


def _plans_of(device: str, rows: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
  plans = [row["plan"] for row in rows if row and "plan" in row]
  distinct = lambda values: ", ".join(sorted({str(value) for value in values if value}))
  seconds = sorted(plan["compile_seconds"] for plan in plans)
  made = {"device": device, "planned": len(plans), "cells": len(rows)}
  if plans:
    made |= {
      "jax": distinct(plan["provenance"]["versions"]["jax"] for plan in plans),
      "libtpu": distinct(plan["provenance"]["libtpu"] for plan in plans) or None,
      "commit": distinct(plan["provenance"]["commit"] for plan in plans),
      "seconds of compilation, median": f"{statistics.median_high(seconds):.0f}",
      "least": f"{seconds[0]:.0f}",
      "most": f"{seconds[-1]:.0f}",
    }
  return made


def _table(rows: PlanRows, value: Callable[[Mapping[str, Any]], str]) -> pd.DataFrame:
  """A quantity by vocabulary and head, with a column for each device and number of them."""
  sizes = dict.fromkeys((cell.device, cell.chips) for cell in rows)
  shown = []
  for vocab, head in dict.fromkeys((cell.vocab, cell.head) for cell in rows):
    found = {
      (c.device, c.chips): row for c, row in rows.items() if (c.vocab, c.head) == (vocab, head)
    }
    cells = {f"{at[1]:,} {at[0]}": _shown(found.get(at), value) for at in sizes}
    shown.append({"V": f"{vocab:,}", "head": head} | cells)
  return pd.DataFrame(shown)


def _shown(row: Mapping[str, Any] | None, value: Callable[[Mapping[str, Any]], str]) -> str | None:
  if row is None:
    return None
  return value(row["plan"]) if "plan" in row else "failed"


_BYTES, _MILLISECONDS = units.size, lambda value: f"{value:g} ms"
_PANELS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float], Callable], ...] = (
  ("memory of a chip", "linear", lambda plan: plan["bytes"]["total"], _BYTES),
  ("of it the head's state", "log", lambda plan: plan["bytes"]["head"], _BYTES),
  ("sent by a chip in a step", "linear", lambda plan: plan["sent"], _BYTES),
  ("of it along fsdp", "linear", lambda plan: _sent_along(plan, "fsdp"), _BYTES),
  (
    "least time of a step",
    "linear",
    lambda plan: 1000 * plan["roofline"]["seconds"],
    _MILLISECONDS,
  ),
)


def write_plot(rows: PlanRows, path: pathlib.Path) -> None:
  """Draw memory, communication and time by number of chips, a column for each V."""
  vocabularies = sorted({cell.vocab for cell in rows})
  figure = Figure(figsize=(2.9 * len(vocabularies), 10), layout="constrained")
  panels = figure.subplots(len(_PANELS), len(vocabularies), sharex=True, sharey="row")
  for line, (title, scale, value, text) in zip(panels, _PANELS, strict=True):
    for axes, vocab in zip(line, vocabularies, strict=True):
      _draw(axes, {cell: row for cell, row in rows.items() if cell.vocab == vocab}, value)
    line[0].set_ylabel(title, color=INK)
    drawn = [value(row["plan"]) for row in rows.values() if row and "plan" in row]
    _value_axis(line[0], scale, max(drawn), text)
  for axes, vocab in zip(panels[0], vocabularies, strict=True):
    axes.set_title(f"V = {vocab:,}", fontsize=10, color=INK)
  for axes in panels[-1]:
    axes.set_xlabel("chips", color=INK)
  panels[0, 0].legend(fontsize=8, frameon=False, labelcolor=INK, loc="lower left")
  path.parent.mkdir(parents=True, exist_ok=True)
  report.save_png(figure, path)


def _value_axis(axes: Axes, scale: str, most: float, text: Callable[[float], str]) -> None:
  """Set byte ticks at powers of two, or equal steps from zero."""
  axes.set_yscale(scale, **({"base": 4} if scale == "log" else {}))
  axes.yaxis.set_minor_locator(NullLocator())
  if scale == "linear":
    axes.set_ylim(0, 1.12 * most)
  if scale == "linear" and text is _BYTES:
    axes.yaxis.set_major_locator(MultipleLocator(2 ** math.floor(math.log2(most / 4))))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: re.sub(r"\.0+(?= )", "", text(y))))


def _draw(axes: Axes, rows: PlanRows, value: Callable[[Mapping[str, Any]], float]) -> None:
  markers = ("o", "s", "^")
  for head, color, marker in zip(dict.fromkeys(c.head for c in rows), SERIES, markers):
    some = {cell.chips: row for cell, row in rows.items() if cell.head == head}
    points = sorted((n, value(row["plan"])) for n, row in some.items() if row and "plan" in row)
    x, y = zip(*points) if points else ((), ())
    axes.plot(x, y, marker=marker, markersize=5, color=color, label=head)
  sizes = sorted({cell.chips for cell in rows})
  axes.set_xscale("log", base=2)
  axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
  axes.minorticks_off()
  axes.spines[["top", "right"]].set_visible(False)
  axes.spines[:].set_color(INK)
  axes.tick_params(colors=INK, labelsize=8)
  axes.grid(color=INK, alpha=0.15, linewidth=0.6)
