"""How fast are the heads at the paper's size, beside its Table 3?"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.vq_paper import LOGITS_MS, PAPER
from experiments.vq_plots import codes_against_speed
from vqjax import report
from vqjax.report import units
from vqjax.training.run import read_json

Speed = Mapping[str, Mapping[str, Any]]
"""Name of a head -> what `experiments.bench_vq` measured of it."""


def read(path: pathlib.Path) -> Speed | None:
  """The rows of a benchmark; None where it was not run.

  Raises:
    ValueError: the file is not JSON.
  """
  found = read_json(path)
  return None if found is None else found["rows"]


def section(speed: Speed | None) -> str:
  """Table 3, measured, and what the paper prints."""
  full, fast, larger = (LOGITS_MS[name] for name in ("full", "vq-1024", "vq-2048"))
  paper = (
    f"The paper, on an A100 with 16-bit weights: {full[0]:g} MB and {full[1]:g} ms for the full"
    f" softmax, {fast[0]:g} MB and {fast[1]:g} ms ({full[1] / fast[1]:.1f}×) at K = 1,024,"
    f" {larger[0]:g} MB and {larger[1]:g} ms ({full[1] / larger[1]:.1f}×) at K = 2,048. Its table"
    " of codes, 267,735 integers of 32 bits, is 1.07 MB more and is not in these figures.\n"
  )
  title = "## Table 3: speed at the paper's size\n"
  if speed is None:
    return f"{title}\n{units.MISSING}: `experiments.bench_vq` has not been run.\n\n{paper}"
  runs = [report.Run(pathlib.Path(name), {}, None, (), _row(speed, name)) for name in speed]
  columns = [
    report.Column("milliseconds", lambda run: run.get("seconds"), units.milliseconds, ""),
    report.Column("times faster than full", lambda run: run.get("faster"), units.ratio, ""),
  ]
  return f"{title}\n{report.markdown_table(columns, runs)}\n{paper}"


def _row(speed: Speed, name: str) -> dict[str, Any]:
  full = next((row for other, row in speed.items() if other.startswith("full")), None)
  seconds = speed[name].get("seconds")
  faster = full["seconds"] / seconds if full and seconds else None
  return {"name": name, "status": "finished", "seconds": seconds, "faster": faster}


def figure(speed: Speed | None) -> Figure | None:
  """Figure 2b; None without measurements."""
  if speed is None:
    return None
  found = {int(k[1]): _row(speed, name)["faster"] for name in speed if (k := _codes(name))}
  measured = {k: faster for k, faster in sorted(found.items()) if faster}
  paper = {
    int(name.removeprefix("vq-")): row.logits
    for name, row in PAPER["Table 1"].items()
    if name.startswith("vq-")
  }
  return codes_against_speed(measured, paper) if measured else None


def _codes(name: str) -> re.Match | None:
  """Of "codebook K=1024", the number."""
  return re.fullmatch(r"codebook\D*(\d+)", name)
