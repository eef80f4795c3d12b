"""Terminal report of a plan."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from vqjax.lab.report import units

__all__ = []


def show_plan(found: dict[str, Any], console: Console) -> None:
  """Print a plan as tables."""
  mesh = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
  console.print(
    f"[bold]{found['name']}[/], V = {found['vocab']:,}, on {found['chips']:,} x"
    f" {found['chip']['name']}; train.mesh {mesh}; a batch of {found['batch']:,} windows,"
    f" {found['tokens']:,} tokens; compiled in {found['compile_seconds']:.0f} s"
  )
  console.print(_memory_table(found))
  console.print(_collective_table(found))
  console.print(_time_table(found))
  if found["refused"]:
    console.print(f"The compiler gave up: {found['refused']}", highlight=False)
  if found["loops_counted_once"]:
    print("warning: loops of unknown length are counted once", file=sys.stderr)


def _memory_table(found: dict[str, Any]) -> Table:
  table = Table("on each chip", "bytes", title="Memory", title_justify="left")
  table.columns[1].justify = "right"
  names = {
    "params": "parameters",
    "opt_state": "optimiser state",
    "tables": "integer tables",
    "batch": "batch",
    "temporaries": "temporaries",
    "code": "program",
    "total": "together",
  }
  for key, name in names.items():
    value = found["bytes"][key]
    table.add_row(name, units.MISSING if value is None else units.size(value))
  table.add_row("memory of the chip", units.size(found["chip"]["memory"]))
  verdict = {True: "yes", False: "no", None: "only its own compiler can tell"}[found["fits"]]
  table.add_row("fits", verdict)
  for layer in ("embedding", "head"):
    table.add_row(f"of the first three: {layer}", units.size(found["bytes"][layer]))
  return table


def _collective_table(found: dict[str, Any]) -> Table:
  columns = ("collective", "axes", "devices", "times", "bytes", "sent")
  table = Table(*columns, title="Communication of each chip in a step", title_justify="left")
  for column in table.columns[2:]:
    column.justify = "right"
  for row in found["collectives"]:
    axes = ", ".join(row["axes"])
    sizes = units.size(row["bytes"]), units.size(row["sent"])
    table.add_row(row["kind"], axes, f"{row['group']:,}", f"{row['count']:,}", *sizes)
  table.add_row("all", "", "", "", "", units.size(found["sent"]))
  return table


def _time_table(found: dict[str, Any]) -> Table:
  times = found["roofline"]
  table = Table("limit", "milliseconds", title="Least time of a step", title_justify="left")
  table.columns[1].justify = "right"
  table.add_row(f"{units.count(found['flops'])} FLOPs at the peak", _ms(times["compute"]))
  table.add_row("memory: state and temporaries, once each", _ms(times["memory"]))
  table.add_row("network: all links at once", _ms(times["network"]))
  table.add_row(f"the longest: {times['limit']}", _ms(times["seconds"]))
  table.caption = "Perfect overlap at published peaks; a real step takes longer."
  return table


def _ms(seconds: float) -> str:
  return units.milliseconds(seconds)
