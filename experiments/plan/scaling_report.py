"""Tables and figures of the grid of plans."""

import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator

from vqjax.lab import report
from vqjax.lab.report import INK, SERIES, units, write_whole

Rows = Mapping[Any, Mapping[str, Any] | None]
"""Cell -> its row, or None if it has not been planned."""

_INTRODUCTION = """\
# From 16 chips to 1,024

`python -m experiments.plan.scaling` compiles the training step for TPU v5p slices without having
them; no step was run. Each chip has the same work at every size,
{work}.
On every mesh `model` has 8 chips and `fsdp` all others. Parameters are float32, products bfloat16,
blocks are recomputed in the backward pass, and the optimizer is AdamW. The embedding is dense and
untied in all rows: only the heads differ. The codebook has 4,096 codes and a token bias, and the
grouped head has sqrt(V) groups.

{counts}

- Memory is the state, exact from the shardings, and the temporaries by the compiler's account.
- Bytes sent are the lower bound of ring algorithms: 2(n-1)/n of an all-reduced array, (n-1)/n of a
  gathered or scattered one, with loops multiplied out.
- The time is the largest of three lower bounds at published peaks with perfect overlap: c, matrix
  products; m, memory traffic of state and temporaries; n, all links. A real step takes longer.
- A dash is a cell without a plan. "Failed" is one whose plan failed; scaling.jsonl has the error.
"""

_METRICS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
  ("Memory of a chip", lambda plan: _fitting(plan)),
  ("Memory of parameters and optimizer state", lambda plan: units.size(_state(plan))),
  ("Memory of the head's parameters", lambda plan: units.size(plan["bytes"]["head"])),
  ("Bytes sent by a chip in a step", lambda plan: units.size(plan["sent"])),
  (
    "Bytes sent along fsdp: weights, their gradients, and sums over the batch",
    lambda plan: units.size(_sent_along(plan, "fsdp")),
  ),
  ("Lower bound of the step time, milliseconds", lambda plan: _least(plan)),
)


def _fitting(plan: Mapping[str, Any]) -> str:
  size = units.size(plan["bytes"]["total"])
  return size if plan["fits"] else f"{size}, does not fit"


def _state(plan: Mapping[str, Any]) -> int:
  return plan["bytes"]["params"] + plan["bytes"]["opt_state"]


def _sent_along(plan: Mapping[str, Any], axis: str) -> float:
  return sum(row["sent"] for row in plan["collectives"] if axis in row["axes"])


def _least(plan: Mapping[str, Any]) -> str:
  roofline = plan["roofline"]
  return f"{units.milliseconds(roofline['seconds'])} {roofline['limit'][0]}"


def write_table(rows: Rows, work: str, path: pathlib.Path) -> None:
  """The tables in Markdown, one for each model and quantity."""
  parts = [_INTRODUCTION.format(work=work, counts=_counts(rows))]
  for config in dict.fromkeys(cell.config for cell in rows):
    some = {cell: row for cell, row in rows.items() if cell.config == config}
    parts.append(f"\n## {config}\n")
    parts += [f"\n{title}:\n\n{_table(some, value)}" for title, value in _METRICS]
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, "".join(parts))


def _counts(rows: Rows) -> str:
  plans = [row["plan"] for row in rows.values() if row and "plan" in row]
  if not plans:
    return f"None of {len(rows)} cells are planned."
  seconds = sorted(plan["compile_seconds"] for plan in plans)
  versions = {
    f"jax {plan['provenance']['versions']['jax']}, libtpu {plan['provenance']['libtpu']}"
    for plan in plans
  }
  commits = sorted({str(plan["provenance"]["commit"]) for plan in plans})
  return (
    f"{len(plans)} of {len(rows)} cells are planned, by {'; '.join(sorted(versions))},\n"
    f"at commit {', '.join(commits)}. A cell took {seconds[0]:.0f} to {seconds[-1]:.0f} seconds to"
    f" compile on a busy machine of two cores,\nhalf of them at most"
    f" {seconds[len(seconds) // 2]:.0f}."
  )


def _table(rows: Rows, value: Callable[[Mapping[str, Any]], str]) -> str:
  sizes = sorted({cell.chips for cell in rows})
  lines = [
    "| V | head | " + " | ".join(f"{size:,} chips" for size in sizes) + " |",
    "|---:|---|" + "---:|" * len(sizes),
  ]
  for vocab, head in dict.fromkeys((cell.vocab, cell.head) for cell in rows):
    found = {c.chips: row for c, row in rows.items() if (c.vocab, c.head) == (vocab, head)}
    shown = " | ".join(_shown(found.get(size), value) for size in sizes)
    lines.append(f"| {vocab:,} | {head} | {shown} |")
  return "\n".join(lines) + "\n"


def _shown(row: Mapping[str, Any] | None, value: Callable[[Mapping[str, Any]], str]) -> str:
  if row is None:
    return units.MISSING
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


def write_plot(rows: Rows, path: pathlib.Path) -> None:
  """Draws memory, communication and time by number of chips, a column for each V."""
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
  """Sets byte ticks at powers of two, or equal steps from zero."""
  axes.set_yscale(scale, **({"base": 4} if scale == "log" else {}))
  axes.yaxis.set_minor_locator(NullLocator())
  if scale == "linear":
    axes.set_ylim(0, 1.12 * most)
  if scale == "linear" and text is _BYTES:
    axes.yaxis.set_major_locator(MultipleLocator(2 ** math.floor(math.log2(most / 4))))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: re.sub(r"\.0+(?= )", "", text(y))))


def _draw(axes: Axes, rows: Rows, value: Callable[[Mapping[str, Any]], float]) -> None:
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
