"""What do the measurements of the grouped head say, one beside the other?"""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.studies.grouped.report import nats
from experiments.studies.grouped.rows import EVERY, TEACHER
from experiments.studies.grouped.settings import SCALES, WIDE, Setting
from experiments.studies.study import Results

LABELS = {row.name: row.label for row in EVERY}

BESIDE = {
  "gpt-neo": TEACHER,
  "grouped": TEACHER,
  "shuffled": "grouped",
  "frequency": "grouped",
  "clusters": "grouped",
  "unshared": "grouped",
  "distilled": "grouped",
  "converted": TEACHER,
  "converted-frequency": TEACHER,
  "tuned": "gpt-2-more",
  "tuned-frequency": "gpt-2-more",
  "tuned-distilled": "gpt-2-more",
}
"""Row -> the row that it is to be compared with: the same text, and as many steps in all."""


def section(results: Results, cost: Mapping[str, Any] | None) -> str:
  """As sentences; what was not measured says nothing."""
  said = [line for s in SCALES["cpu"].values() for line in _language(results, s)]
  said += [*_sizes(results), *_memory(cost or {}), *_pictures(results), *_top(results)]
  return "## What came out\n\n" + "".join(f"- {line}\n" for line in said) + "\n" + _LIMITS


_LIMITS = f"""\
How far this goes: one seed, and a few hundred steps, in which a head that learns faster is ahead of
one that ends better. The differences are of the same test tokens, so that those between heads are
sharper than the perplexities; the seed's share of them is not known. No text here has {WIDE:,}
different tokens: for exact decoding at that size the numbers of GPT-2's tokens are spread evenly
over it, so that every group has its share of them, and four times as many that never occur.
"""


def _language(results: Results, s: Setting) -> Iterator[str]:
  for row, other in BESIDE.items():
    own, control = (nats(results, f"{s.name}/{name}") for name in (row, other))
    if row in s.rows and own is not None and control is not None:
      yield f"{s.name}: {LABELS[row]} has {own - control:+.3f} nats a token over {LABELS[other]}."


def _sizes(results: Results) -> Iterator[str]:
  s = SCALES["cpu"]["sizes"]
  losses = {
    groups: results[f"{s.name}/groups-{groups}"]["result"]["valid"]["nats_per_token"]
    for groups in s.sizes
    if "valid" in results.get(f"{s.name}/groups-{groups}", {}).get("result", {})
  }
  if len(losses) > 1:
    best, worst = min(losses, key=losses.get), max(losses, key=losses.get)
    yield (
      f"Of {len(losses)} numbers of groups, {best:,} have the lowest validation loss,"
      f" {losses[best]:.3f} nats, and {worst:,} the highest, {losses[worst]:.3f}; the paper found"
      " the highest at sqrt(V)."
    )


KINDS = {
  "step": "a training step",
  "head": "the head's loss and gradient alone",
  "untiled": "the same with [N, S] arrays whole, as in the paper",
}
"""Kind of memory of the bench -> what it is of."""


def _memory(cost: Mapping[str, Any]) -> Iterator[str]:
  least = cost.get("least", {})
  for kind, said in KINDS.items():
    if kind in least:
      first, last = least[kind]["near"]
      yield (
        f"Memory of {said} is least with {least[kind]['size']:,} tokens a group, and within 2 % of"
        f" that from {first:,} to {last:,}; sqrt(V) is {least['sqrt']}"
        + (f" and the corrected optimum {least['corrected']}." if "corrected" in least else ".")
      )


def _pictures(results: Results) -> Iterator[str]:
  of = lambda name: results.get(f"pictures/{name}", {}).get("result", {}).get("test", {})
  dense, grouped = of("dense"), of("grouped")
  if "accuracy" in dense and "accuracy" in grouped:
    yield (
      f"Pictures: the grouped head calls {100 * grouped['accuracy']:.1f} % of the classes right and"
      f" {100 * grouped['group_accuracy']:.1f} % of the groups, the dense one"
      f" {100 * dense['accuracy']:.1f} % of the classes."
    )


def _top(results: Results) -> Iterator[str]:
  for name in ("top/lm-128", "top/wide"):
    top = results.get(name, {}).get("top")
    if top:
      agree = "with equal" if top["same"] else "NOT with equal"
      yield (
        f"The {top['k']} best of {top['vocab']:,} tokens take {1e3 * top['seconds']:.2f} ms by"
        f" visiting and {1e3 * top['seconds_all']:.2f} ms by computing all groups, one token at a"
        f" time (median of {top['positions']} places in the text): {top['visited']:g} of"
        f" {top['groups']} groups hold a token that could be among them, at most"
        f" {top['visited_most']}; together the best have {top['mass']:.2f} of the probability. Both"
        f" ways end {agree} log-probabilities."
      )
