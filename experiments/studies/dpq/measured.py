"""What do the kept results of an embedding say, over its seeds and beside the full one?"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.studies.seeds import Spread, finished, seeds
from experiments.studies.study import Results


@dataclasses.dataclass(frozen=True)
class Measured:
  """A row, measured. Whatever no finished run says is None.

  Attributes:
    score: on the test split: perplexity, accuracy in per cent, or BLEU.
    over_full: the score minus that of the full embedding of the same seed.
    lost: squared distance from the trained table that it was made of, over that table's squares.
    shipped_bytes: of codes and values, or of whatever the embedding needs after training.
    ratio: bytes of the full float32 table over those.
    formula: the same by the paper's formula, in bits, of an embedding with codes.
    file_bytes: of the saved file, with its header.
    failed: number of seeds that failed.
  """

  score: Spread | None
  over_full: Spread | None
  lost: float | None
  shipped_bytes: int | None
  ratio: float | None
  formula: float | None
  file_bytes: int | None
  failed: int


def measured(results: Results, name: str) -> Measured:
  """A row "ptb-small/sx" beside "ptb-small/full"."""
  every, done = seeds(results, name), finished(results, name)
  control = f"{name.split('/')[0]}/full"
  full, fulls = finished(results, control), seeds(results, control)
  size = next((row["embedding"]["shipped_bytes"] for row in done.values()), None)
  whole = next((row["embedding"]["shipped_bytes"] for row in full.values()), None)
  compact = next((kept["compact"] for kept in every.values() if "compact" in kept), {})
  both = sorted(done.keys() & full.keys())
  return Measured(
    score=Spread.of([score(every[seed]) for seed in done]),
    over_full=Spread.of([score(every[seed]) - score(fulls[seed]) for seed in both]),
    lost=next((row["embedding"].get("lost") for row in done.values()), None),
    shipped_bytes=size,
    ratio=whole / size if whole and size else None,
    formula=compact.get("formula"),
    file_bytes=compact.get("file_bytes"),
    failed=sum(kept["result"]["status"] == "failed" for kept in every.values()),
  )


def score(kept: Mapping[str, Any]) -> float:
  """What the paper's table has: BLEU of a translator, accuracy in per cent, else perplexity."""
  if "bleu" in kept:
    return kept["bleu"]["score"]
  test = kept["result"]["test"]
  return 100 * test["accuracy"] if "accuracy" in test else test["perplexity"]
