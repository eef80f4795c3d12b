"""Which figures were asked of the grouped head, and what was measured?"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.studies.study import Results
from vqjax.lab.report import units

BENCH, STUDY = "`make bench-grouped`", "`python -m experiments.studies.grouped.run`"


class Asked(NamedTuple):
  """A figure: what of, the bound, what was measured (None: nothing) and by which command."""

  what: str
  bound: str
  measured: str | None
  command: str


def section(results: Results, cost: Mapping[str, Any] | None) -> str:
  """All of them as a table."""
  rows = [*_loss(cost or {}), *_step(cost or {}), *_top(results), *_more(cost or {})]
  body = [f"| {r.what} | {r.bound} | {r.measured or units.MISSING} | {r.command} |" for r in rows]
  head = ["| | asked | measured | by |", "| --- | --- | --- | --- |"]
  return "## Figures that were asked for\n\n" + "\n".join([*head, *body]) + "\n"


def _loss(cost: Mapping[str, Any]) -> Iterator[Asked]:
  rows = cost.get("loss", {}).get("rows", {})
  own = rows.get("grouped", {})
  what = "loss and gradient, N = 4096, D = 256, V = 50,257:"
  times = lambda key: f"{own[key]:.1f}×" if key in own else None
  slow = "faster_than_materialised"
  yield Asked(f"{what} faster than dense materialised", "30×", times(slow), BENCH)
  yield Asked(f"{what} faster than dense in tiles", "15×", times("faster_than_tiled"), BENCH)
  part = f"1/{own['temp_smaller']:.0f}" if "temp_smaller" in own else None
  yield Asked(f"{what} temporaries of dense materialised", "at most 1/40", part, BENCH)
  other = rows.get("unshared", {})
  ratio = f"{other['seconds'] / own['seconds']:.2f}×" if other and own else None
  yield Asked(f"{what} one linear a group, over the shared one's time", "at most 3×", ratio, BENCH)


def _step(cost: Mapping[str, Any]) -> Iterator[Asked]:
  rows = cost.get("steps", {}).get("128", {})
  own, dense = rows.get("grouped", {}), rows.get("gpt-2", {})
  what = "training step of the 8.1 M model, B = 32, T = 512: peak over dense materialised"
  for said, get in (
    ("blocks recomputed", lambda row: row.get("peak_bytes")),
    ("as it is", lambda row: row.get("without_remat", {}).get("peak_bytes")),
  ):
    part = f"1/{get(dense) / get(own):.1f}" if get(own) and get(dense) else None
    yield Asked(f"{what}, {said} (paper: 1/3.4)", "at most 1/5", part, BENCH)


def _top(results: Results) -> Iterator[Asked]:
  for name, vocab, bound in (
    ("wide", "262,144", "at most 0.25"),
    ("lm-128", "50,257", "not asked"),
  ):
    found = results.get(f"top/{name}", {}).get("top")
    said = found and f"{found['ratio']:.3f}"
    what = f"exact top-50 for one token, V = {vocab}: time over computing all groups"
    yield Asked(what, bound, said, STUDY)


def _more(cost: Mapping[str, Any]) -> Iterator[Asked]:
  part = cost.get("images", {}).get("draw_of_step")
  said = None if part is None else f"{100 * part:.1f} %"
  yield Asked("drawing the pictures, of the CNN's training step", "at most 20 %", said, BENCH)
