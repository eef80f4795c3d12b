"""Which rows do the tables of the grouped head have, and how does each compare with the paper's?"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from experiments.grouped_paper import SIZES, TABLE_1, TABLE_2, TABLE_3, WIDTHS, Graded
from experiments.grouped_rows import TEACHER, rows
from experiments.grouped_settings import SCALES
from experiments.study import Results
from vqjax import report
from vqjax.report import Column, Run, units

Cost = Mapping[str, Any]
"""What `experiments.bench_grouped` wrote."""


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows side by side.

  Attributes:
    title: "Table 1: ...".
    columns: of all rows; those that no row fills are left out, but for the first two.
    lines: what `columns` read.
  """

  title: str
  columns: Sequence[Column]
  lines: Sequence[Run]

  def rich(self) -> Group:
    """For a console of 80 columns."""
    shown = report.console_table(self.used(), list(self.lines))
    return Group(Text(f"\n{self.title}", style="bold"), shown)

  def markdown(self) -> str:
    """For the page, without its title."""
    return report.markdown_table(self.used(), list(self.lines))

  def used(self) -> list[Column]:
    """The columns that are shown."""
    filled = lambda column: any(column.get(line) is not None for line in self.lines)
    return [c for at, c in enumerate(self.columns) if at < 2 or filled(c)]


def line(name: str, **fields: Any) -> Run:
  """A row as the tables of `vqjax.report` read it."""
  return Run(pathlib.Path(), {}, None, (), {"name": name, "status": "finished", **fields})


def column(title: str, key: str, show=str, meaning: str = "") -> Column:
  """Shows the field `key` of a row."""
  return Column(title, lambda run: run.get(key), show, meaning)


_two = units.fixed(2)
_whole = units.fixed(0)

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
  column("compiled", "plain", _two, "GB at the peak of a step, by the compiler's account."),
  column("recomputing", "peak", _two, "GB where blocks are computed again in the backward pass."),
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

PICTURES = (
  column("accuracy", "accuracy", units.fixed(1), "Per cent of test pictures."),
  column("of the group", "group", units.fixed(1), "Per cent whose group was right."),
  column("nats", "nats", units.fixed(3), "The mean of -log p(class)."),
  column("parameters", "params", units.count, "Of the whole model."),
)


def tables(results: Results, scale: str, cost: Cost | None) -> list[Table]:
  """The paper's tables at a scale; what is not run there has the paper's number alone."""
  made = [language(results, scale), pictures(results)]
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
      _language({}, f"paper-{dim}/{name}", f"paper, {name}, {dim}", printed)
      for name, widths in TABLE_1.items()
      for dim, printed in widths.items()
      if f"lm-{dim}" not in SCALES["cpu"]
    ]
  return Table("Table 1: language models on TinyStories", LANGUAGE, lines)


def _language(results: Results, name: str, label: str, printed: Graded | None) -> Run:
  kept = results.get(name, {})
  result = kept.get("result", {})
  if result.get("status") == "failed":
    return dataclasses.replace(line(label), result={"name": label, "status": "failed"})
  own_nats, control = nats(results, name), nats(results, f"{name.split('/')[0]}/{TEACHER}")
  own = results.get(grades_of(name), {}).get("grades", {})
  grades = {
    key: f"{_shown(own.get(key))} / {_shown(getattr(printed, key, None))}"
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


def pictures(results: Results) -> Table:
  """The classifiers of pictures."""
  lines = []
  for name in ("dense", "grouped"):
    result = results.get(f"pictures/{name}", {}).get("result", {})
    test = result.get("test", {})
    percent = lambda key, test=test: 100 * test[key] if key in test else None
    found = {"accuracy": percent("accuracy"), "group": percent("group_accuracy")}
    sizes = {"params": result.get("model", {}).get("params"), "nats": test.get("nats_per_token")}
    lines.append(line(f"CNN, {name}", **found, **sizes))
  return Table("Section 3.2: classes of pictures", PICTURES, lines)


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
      plain = own.get("without_remat", {})
      part = _over(own.get("peak_bytes"), dense.get("peak_bytes"))
      lines.append(
        line(
          f"{dim} ({SIZES[dim]}): {NAMES[name]}",
          peak=_giga(own.get("peak_bytes")),
          plain=_giga(plain.get("peak_bytes")),
          part=part,
          paper=_printed_memory(name, dim),
        )
      )
  return Table("Table 2: peak memory of a training step, B = 32, T = 512", MEMORY, lines)


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


def _giga(size: float | None) -> float | None:
  return None if size is None else size / 1e9


def _over(one: float | None, other: float | None) -> float | None:
  return one / other if one and other else None
