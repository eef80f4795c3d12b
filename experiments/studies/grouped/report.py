"""Which rows do the tables of the grouped head have, and how does each compare with the paper's?"""

import pathlib
from collections.abc import Mapping
from typing import Any

from configs.grouped_shapes import dense
from experiments.studies.grouped.paper import (
  COUNTS,
  SIZES,
  TABLE_1,
  TABLE_2,
  TABLE_3,
  WIDTHS,
  Graded,
)
from experiments.studies.grouped.rows import TEACHER, rows
from experiments.studies.grouped.settings import PICTURES, SCALES
from experiments.studies.study import Results
from experiments.studies.tables import Table, column, failure, line
from vqjax.lab.report import Run, units
from vqjax.lab.training.run import read_json

Cost = Mapping[str, Any]
"""What `experiments.bench.grouped` wrote."""

PARTS = {"loss": ["loss"], "steps": ["steps"], "sizes": ["sizes", "least"], "images": ["images"]}
"""Part of the bench -> what it writes."""


def read_cost(docs: pathlib.Path) -> Cost | None:
  """The bench's figures without the parts of tiny sizes; None where it has not run."""
  cost = read_json(docs / "results" / "grouped" / "cost.json")
  if cost is None:
    return None
  origins = cost.get("provenance", {})
  quick = [part for part in origins if origins[part].get("quick")]
  without = {key for part in quick for key in PARTS[part]}
  figures = {key: value for key, value in cost.items() if key not in without}
  return figures | {"provenance": {p: one for p, one in origins.items() if p not in quick}}


_two = units.fixed(2)
_whole = units.fixed(0)
_said = lambda value: value if isinstance(value, str) else _two(value)

LANGUAGE = (
  column("perplexity", "perplexity", _two, "On the test split."),
  column("nats", "nats", units.fixed(3), "The mean of -log p(token) there."),
  column("over GPT-2", "over", lambda x: f"{x:+.3f}", "Nats more than GPT-2 of the same setting."),
  column("parameters", "params", units.count, "Of the whole model."),
  column("of the head", "head", units.count, "Beside a table that it shares with the embedding."),
  *(
    column(name, name, meaning="Measured / the paper's, of the same width.")
    for name in Graded._fields
  ),
)

MEMORY = (
  column("compiled", "plain", _said, "GB at the peak of a step, by the compiler's account."),
  column("recomputing", "peak", _said, "GB where blocks are computed again in the backward pass."),
  column("of GPT-2", "part", _two, "The latter over GPT-2's."),
  column("paper", "paper", meaning="GB that it printed for an L40s."),
)

SPEED = (
  column("tokens/s", "tokens", _whole, "Of training steps, blocks recomputed."),
  column("of GPT-2", "times", lambda x: f"{x:.2f}×", "Over GPT-2's."),
  column("paper", "paper", _whole, "Tokens a second that it printed, on an L40s."),
  column("of its GPT-2", "paper_times", lambda x: f"{x:.2f}×", "Over its GPT-2's."),
  column("GMAC", "macs", _two, "Multiply-accumulates of a forward pass of 512 tokens, weights."),
  column("with attention", "more", _two, "And those of the attention."),
  column('"GFLOPs"', "gflops", _two, "What the paper printed for them."),
)

CLASSES = (
  column("accuracy", "accuracy", units.fixed(1), "Per cent of test pictures."),
  column("of the group", "group", units.fixed(1), "Per cent whose group was right."),
  column("nats", "nats", units.fixed(3), "The mean of -log p(class)."),
  column("parameters", "params", units.count, "Of the whole model."),
  column("paper", "paper", _whole, "Parameters that it printed, of 184,320 classes."),
)


def tables(results: Results, scale: str, cost: Cost | None) -> list[Table]:
  """The paper's tables at a scale; what is not run there has the paper's number alone."""
  made = [language(results, scale), pictures(results, scale)]
  return made if cost is None else [*made, memory(cost), speed(cost)]


def language(results: Results, scale: str) -> Table:
  """Table 1, and below it what begins with a trained GPT-2."""
  lines = []
  for s in SCALES[scale].values():
    for row in rows(s) if s.rows else ():
      printed = TABLE_1.get(row.name, {}).get(s.dim) if TEACHER in s.rows else None
      lines.append(_language(results, f"{s.name}/{row.name}", f"{s.name}: {row.label}", printed))
  if scale == "cpu":
    lines += [
      _language({}, f"paper-{dim}/{name}", f"paper, {NAMES[name]}, {dim}", printed)
      for name, widths in TABLE_1.items()
      for dim, printed in widths.items()
      if f"lm-{dim}" not in SCALES["cpu"]
    ]
  return Table("Table 1: language models on TinyStories", LANGUAGE, lines)


def _language(results: Results, name: str, label: str, printed: Graded | None) -> Run:
  kept = results.get(name, {})
  result = kept.get("result", {})
  if result.get("status") == "failed":
    return failure(label)
  own_nats, control = nats(results, name), nats(results, f"{name.split('/')[0]}/{TEACHER}")
  own = results.get(grades_of(name), {}).get("grades", {})
  grades = {
    key: f"{_shown(own.get(key))} / {f'{getattr(printed, key):g}' if printed else units.MISSING}"
    for key in Graded._fields
    if own or printed
  }
  return line(
    label,
    nats=own_nats,
    perplexity=result.get("test", {}).get("perplexity"),
    over=None if own_nats is None or control is None else own_nats - control,
    params=None if _has_teacher(kept) else result.get("model", {}).get("params"),
    head=result.get("head", {}).get("params"),
    **grades,
  )


def _has_teacher(kept: Mapping[str, Any]) -> bool:
  """Whether the run's parameters are those of two models."""
  return "teacher" in kept.get("config", {}).get("model", {})


def grades_of(name: str) -> str:
  """The work that grades the stories of a row."""
  return f"grades/{name.replace('/', '-')}"


def _shown(grade: float | None) -> str:
  return units.MISSING if grade is None else f"{grade:.2f}"


def nats(results: Results, name: str) -> float | None:
  """The mean of -log p(token) of a row on the test split."""
  return results.get(name, {}).get("result", {}).get("test", {}).get("nats_per_token")


def pictures(results: Results, scale: str) -> Table:
  """The classifiers of pictures."""
  lines, classes = [], PICTURES[scale]("", dense).data.vocab
  for name in ("dense", "grouped"):
    result = results.get(f"pictures/{name}", {}).get("result", {})
    if result.get("status") == "failed":
      lines.append(failure(f"CNN, {name}"))
      continue
    test = result.get("test", {})
    percent = lambda key, test=test: 100 * test[key] if key in test else None
    found = {"accuracy": percent("accuracy"), "group": percent("group_accuracy")}
    sizes = {"params": result.get("model", {}).get("params"), "nats": test.get("nats_per_token")}
    lines.append(line(f"CNN, {name}", **found, **sizes, paper=COUNTS[name]))
  return Table(f"Section 3.2: {classes:,} classes of pictures", CLASSES, lines)


NAMES = {
  "gpt-2": "GPT-2",
  "gpt-neo": "GPT-Neo",
  "tiled": "GPT-2, loss in tiles",
  "grouped": "grouped",
  "codebook": "codebook",
}
"""Contender of the bench -> what tables call it."""


def memory(cost: Cost) -> Table:
  """Table 2."""
  lines = []
  for dim in WIDTHS:
    found = cost.get("steps", {}).get(str(dim), {})
    for name in NAMES:
      own, dense = found.get(name, {}), found.get("gpt-2", {})
      part = _over(own.get("peak_bytes"), dense.get("peak_bytes"))
      lines.append(
        line(
          f"{dim} ({SIZES[dim]}): {NAMES[name]}",
          peak=_peak(own, own),
          plain=_peak(own.get("without_remat", {}), own if "peak_bytes" in own else {}),
          part=part,
          paper=_printed_memory(name, dim),
        )
      )
  return Table("Table 2: peak memory of a training step, B = 32, T = 512", MEMORY, lines)


def _peak(of: Mapping[str, Any], row: Mapping[str, Any]) -> float | str | None:
  """GB, or that the compiler gave up: the row that says so is one without this peak."""
  if "peak_bytes" in of:
    return of["peak_bytes"] / 1e9
  return "failed" if "error" in row else None


def _printed_memory(name: str, dim: int) -> str | None:
  if name not in TABLE_2:
    return None
  printed = TABLE_2[name][dim]
  return "oom" if printed is None else f"{printed:.1f}"


def speed(cost: Cost) -> Table:
  """Table 3."""
  lines = []
  for dim in WIDTHS:
    found = cost.get("steps", {}).get(str(dim), {})
    for name in NAMES:
      own, dense = found.get(name, {}), found.get("gpt-2", {})
      printed = TABLE_3.get(name, {}).get(dim)
      theirs = TABLE_3["gpt-2"].get(dim)
      macs = own.get("macs")
      lines.append(
        line(
          f"{dim} ({SIZES[dim]}): {NAMES[name]}",
          tokens=own.get("tokens_per_s"),
          times=_over(own.get("tokens_per_s"), dense.get("tokens_per_s")),
          paper=printed and printed.tokens,
          paper_times=_over(printed and printed.tokens, theirs and theirs.tokens),
          macs=macs and macs["weights"] / 1e9,
          more=macs and sum(macs.values()) / 1e9,
          gflops=printed and printed.gflops,
        )
      )
  return Table("Table 3: throughput and operations", SPEED, lines)


def _over(one: float | None, other: float | None) -> float | None:
  return one / other if one and other else None
