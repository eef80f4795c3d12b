"""How fast are the heads at the paper's size, beside its Table 3?"""

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.studies.vq_logits.paper import LOGITS_MS, PAPER
from experiments.studies.vq_logits.plots import codes_against_speed
from vqjax.lab import report
from vqjax.lab.report import units
from vqjax.lab.training.run import read_json

Speed = Mapping[str, Any]
"""What `experiments.bench.codebook` wrote."""

_COLUMNS = (
  report.Column("milliseconds", lambda run: run.get("seconds"), units.milliseconds, ""),
  report.Column("calls", lambda run: run.get("calls"), str, ""),
  report.Column("times faster", lambda run: run.get("times_faster"), units.ratio, ""),
  report.Column("temporaries", lambda run: run.get("temp_bytes"), units.size, ""),
  report.Column("weights, 16 bits", lambda run: run.get("weight_bytes_16_bit"), units.size, ""),
  report.Column("codes", lambda run: run.get("table_bytes"), units.size, ""),
)


def read(path: pathlib.Path) -> Speed | None:
  """The figures of a benchmark; None where it was not run.

  Raises:
    ValueError: the file is not JSON.
  """
  return read_json(path)


def section(speed: Speed | None) -> str:
  """Table 3, training and decoding, measured, and what the paper prints."""
  full, fast, larger = (LOGITS_MS[name] for name in ("full", "vq-1024", "vq-2048"))
  paper = (
    f"The paper, on an A100 with 16-bit weights: {full[0]:g} MB and {full[1]:g} ms for the full"
    f" softmax, {fast[0]:g} MB and {fast[1]:g} ms ({full[1] / fast[1]:.1f}×) at K = 1,024,"
    f" {larger[0]:g} MB and {larger[1]:g} ms ({full[1] / larger[1]:.1f}×) at K = 2,048. Its table"
    " of codes, 267,735 integers of 32 bits, is 1.07 MB more and is not in these figures.\n"
  )
  title = "## Table 3: speed at the paper's size\n"
  if speed is None:
    return f"{title}\n{units.MISSING}: `experiments.bench.codebook` has not been run.\n\n{paper}"
  return f"{title}\n{paper}\n{_work(speed)}" + "".join(_tables(speed))


def _work(speed: Speed) -> str:
  shape, origin = speed["sizes"]["shape"], speed["provenance"]
  return (
    f"Here: {origin['device']}, float32, {shape['tokens']:,} tokens, D = {shape['dim']:,}, V ="
    f" {shape['vocab']:,}, commit {origin['commit']}. The full softmax and the paper's gather take"
    f" {speed['slice']:,} tokens at a time: the logits of all are too large for this machine. Times"
    " are medians of as many calls as the tables say; a ratio of single calls is a rough one.\n"
  )


def _tables(speed: Speed) -> Iterator[str]:
  for title, key in (("Log-probabilities", "forward"), ("Loss and gradient", "training")):
    runs = [_run(name, row) for name, row in speed[key].items()]
    yield f"\n{title}:\n\n{report.markdown_table(_COLUMNS, runs)}"
  for batch, heads in speed["decoding"].items():
    runs = [_run(name, steps) for name, steps in heads.items()]
    steps = dict.fromkeys(step for row in heads.values() for step in row)
    columns = [report.Column(step, _decoded(step), str, "") for step in steps]
    yield f"\nOne step of decoding, {batch}, milliseconds and times faster:\n\n"
    yield report.markdown_table(columns, runs)


def _decoded(step: str):
  def get(run: report.Run) -> str | None:
    row = run.result.get(step)
    faster = lambda: units.ratio(row["times_faster"])
    return row and f"{units.milliseconds(row['seconds'])} ({faster()})"

  return get


def _run(name: str, row: Mapping[str, Any]) -> report.Run:
  return report.Run(pathlib.Path(name), {}, None, (), {"name": name, **row})


def figure(speed: Speed | None) -> Figure | None:
  """Figure 2b; None without measurements."""
  if speed is None:
    return None
  rows = speed["forward"]
  found = ((re.fullmatch(r"codebook K=(\d+)", name), row) for name, row in rows.items())
  measured = {int(match[1]): row["times_faster"] for match, row in found if match}
  paper = {
    int(name.removeprefix("vq-")): row.logits
    for name, row in PAPER["Table 1"].items()
    if name.startswith("vq-")
  }
  return codes_against_speed(measured, paper) if measured else None
