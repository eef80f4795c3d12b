"""What does the search for a better head on Penn Treebank say, in sentences?"""

from collections.abc import Sequence

from experiments.studies.seeds import Spread
from experiments.studies.vq_logits.measured import CONTROLS
from experiments.studies.vq_logits.rows import MAIN, Line, Table
from vqjax.lab.report import units

SMALL = 1 / 16
"""Part of the full softmax's bytes that a compressed head may have."""

AIM = 1.0
"""Per cent above the full softmax that it is to stay within."""


def as_published(tables: Sequence[Table]) -> str:
  """How far the paper's own heads are from their full softmax, there and here."""
  told = [f"{t.setting.name}: {_beside(t)}" for t in tables if _beside(t)]
  return (
    f"The paper's head against the full softmax beside it: {'; '.join(told) or 'not measured'}."
  )


def _beside(table: Table) -> str:
  """Of a main table, each codebook size: here, and in the paper."""
  if table.name not in MAIN.values():
    return ""
  return ", ".join(
    f"K = {k:,} {_percent(line.measured.over_full)} (the paper: {_printed(line):+.1f} %)"
    for k, line in zip(table.setting.codes, table.lines[-len(table.setting.codes) :], strict=True)
    if line.measured.over_full
  )


def _printed(line: Line) -> float:
  return 100 * (line.paper.perplexity / line.paper_full.perplexity - 1)


def best(lines: Sequence[Line]) -> str:
  """The best head of at most a sixteenth of the bytes, chosen on the validation text."""
  small = [line for line in lines if _compared(line) and _small(line)]
  if not small:
    return "No head of at most 1/16 of the full softmax's bytes is measured beside it yet."
  found = min(small, key=lambda line: line.measured.valid_over_full.mean)
  m = found.measured
  reached = "reached" if m.over_both.mean <= AIM else "not reached"
  return (
    f"The best head of at most 1/16 of the full softmax's bytes, by the validation text among"
    f" {len(small)}, is **{_name(found)}**: {units.size(m.head_bytes)}, 1/{1 / m.of_full:.1f} of"
    f" them, test perplexity {m.perplexity.show(1)} ({_seeds(m.perplexity)}),"
    f" {_percent(m.over_both)} against the full softmax of the same seed"
    f" ({_controls(lines)}; the lower counts). The aim, at most {AIM:g} % above it, is {reached}."
  )


def better(lines: Sequence[Line]) -> str:
  """The heads that beat both full softmaxes."""
  found = [line for line in lines if _compared(line) and line.measured.over_both.mean < 0]
  noise = _controls(lines)
  if not noise:
    return "The full softmax is not measured yet."
  if not found:
    return f"No other head has a lower perplexity than the full softmax ({noise})."
  told = "; ".join(
    f"{_name(line)} {_percent(line.measured.over_both)} ({_seeds(line.measured.over_both)},"
    f" {units.ratio(line.measured.of_full)} the bytes)"
    for line in found
  )
  return f"Lower perplexity than the full softmax ({noise}): {told}."


def _controls(lines: Sequence[Line]) -> str:
  """The full softmaxes that are measured."""
  told = {"full": "fine-tuned", "full-scratch": "from scratch"}
  known = {line.name: line.measured.perplexity for line in lines if line.measured.perplexity}
  return ", ".join(
    f"{how} {known[name].show(1)} over {_seeds(known[name])}"
    for name, how in told.items()
    if name in known
  )


def bias(lines: Sequence[Line]) -> str:
  """What a token bias does to the floor, and to what was measured."""
  by_name = {line.name: line for line in lines}
  pairs = [
    (by_name[plain], line)
    for name, line in by_name.items()
    if (plain := _without_bias(name)) != name and plain in by_name
  ]
  told = "; ".join(
    f"{_name(plain)}: floor {plain.measured.floor:.1f} to {own.measured.floor_bias:.1f}, measured"
    f" {plain.measured.perplexity.mean:.1f} to {own.measured.perplexity.mean:.1f}"
    for plain, own in pairs
    if plain.measured.floor and own.measured.floor_bias
  )
  return (
    "A token bias lowers the floor, it does not remove it: inside a code it is one distribution,"
    " the same in every context, so the least loss of any body is the entropy H(token | code) of"
    " the text and not 0, the perplexity not 1." + (f" {told}." if told else "")
  )


def _without_bias(name: str) -> str:
  """The row that differs by the bias alone; the name itself where it has none."""
  return name.replace("-bias-", "-") if "-bias-" in name else name.replace("bias-", "vq-")


def _compared(line: Line) -> bool:
  """Whether it is another head, with bytes of its own, measured beside a full softmax."""
  m = line.measured
  return m.over_both is not None and not m.tied and line.name not in ("dense", *CONTROLS)


def _small(line: Line) -> bool:
  return line.measured.of_full <= SMALL and line.measured.valid_over_full is not None


def _name(line: Line) -> str:
  return line.label.split(". ", 1)[-1]


def _seeds(spread: Spread) -> str:
  return "1 seed" if spread.seeds == 1 else f"{spread.seeds} seeds"


def _percent(spread: Spread) -> str:
  return f"{spread.show(1, '+')} %"
