"""What do the kept results of a row say, over its seeds and beside the full softmax?"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.seeds import Spread, finished, seeds
from experiments.studies.study import Results
from vqjax import CodebookHead, ProductHead


@dataclasses.dataclass(frozen=True)
class Measured:
  """A row, measured. Whatever no finished run says is None.

  Attributes:
    status: "finished" where any seed is, else "failed" where any is, else "unfinished".
    failed: number of seeds that failed.
    perplexity: on the test text.
    over_full: per cent above its control, the full softmax that began as it did, of the same seed.
    over_other: likewise above the other full softmax.
    valid_over_full: likewise above the fine-tuned one, on the validation text.
    head_bytes: of all that the head owns; of one that learns its codes, when they are fixed.
    of_full: those bytes as a part of the full softmax's.
    head: its class.
    tied: whether it shares the embedding's table, which is not counted.
    codes: number of codes, K, of a head whose tokens share them.
    token_bias: whether that head has a token bias.
    floor: least test perplexity of any body with these codes, tokens uniform in each.
    floor_bias: likewise with the best token bias.
    largest: tokens on the largest code.
  """

  status: str
  failed: int
  perplexity: Spread | None
  over_full: Spread | None
  over_other: Spread | None
  valid_over_full: Spread | None
  head_bytes: int | None
  of_full: float | None
  head: str | None
  tied: bool
  codes: int | None
  token_bias: bool
  floor: float | None
  floor_bias: float | None
  largest: int | None

  @property
  def over_both(self) -> Spread | None:
    """Above the lower of the two full softmaxes, as far as there are two."""
    known = [spread for spread in (self.over_full, self.over_other) if spread]
    return max(known, key=lambda spread: spread.mean, default=None)

  @property
  def code_perplexity(self) -> float | None:
    """Perplexity of the codes alone, times which the uniform floor is the whole."""
    if self.perplexity is None or self.floor is None or self.token_bias:
      return None
    return self.perplexity.mean / self.floor


CONTROLS = "full", "full-scratch"
"""Rows of full softmaxes: fine-tuned from the dense model, and trained from scratch."""


def measured(results: Results, name: str, scratch: bool = False) -> Measured:
  """A row "ptb/product" beside the full softmaxes of its setting.

  Args:
    results: what is kept.
    name: of the setting and the row.
    scratch: whether it is trained from scratch, so that this is how its control is trained.
  """
  every, done = seeds(results, name), finished(results, name)
  fine_tuned, fresh = (finished(results, f"{name.split('/')[0]}/{row}") for row in CONTROLS)
  full, other = (fresh, fine_tuned) if scratch else (fine_tuned, fresh)
  head = next((done[seed]["head"] for seed in sorted(done)), {})
  full_bytes = next((row["head"]["state_bytes"] for row in (full | other).values()), None)
  config = next((_head_config(kept["config"]["model"]) for kept in every.values()), {})
  head_bytes = _shipped_bytes(head, config)
  floors = [kept["floors"] for kept in every.values() if kept.get("floors")]
  failed = sum(kept["result"]["status"] == "failed" for kept in every.values())
  return Measured(
    status="finished" if done else "failed" if failed else "unfinished",
    failed=failed,
    perplexity=Spread.of([_perplexity(row, "test") for row in done.values()]),
    over_full=_over(done, full, "test"),
    over_other=_over(done, other, "test"),
    valid_over_full=_over(done, fine_tuned, "valid"),
    head_bytes=head_bytes,
    of_full=head_bytes / full_bytes if head_bytes and full_bytes else None,
    head=head.get("class"),
    tied=bool(head.get("tied")),
    codes=config.get("codes") if floors else None,
    token_bias=bool(config.get("token_bias")),
    floor=_mean([found["uniform"] for found in floors]),
    floor_bias=_mean([found["bias"] for found in floors]),
    largest=max((found["largest_code"] for found in floors), default=None),
  )


def _over(done: Mapping[int, Any], full: Mapping[int, Any], split: str) -> Spread | None:
  """Per cent of perplexity above the full softmax of the same seed."""
  both = sorted(done.keys() & full.keys())
  ratio = lambda seed: _perplexity(done[seed], split) / _perplexity(full[seed], split)
  return Spread.of([100 * (ratio(seed) - 1) for seed in both])


def vocab(results: Results, setting: str) -> int | None:
  """V, from the size of a full softmax without bias."""
  for name in ("full", "dense"):
    for kept in seeds(results, f"{setting}/{name}").values():
      if kept["result"]["status"] == "finished":
        return kept["result"]["head"]["params"] // kept["config"]["model"]["dim"]
  return None


def _head_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
  """That of the student where there is a teacher."""
  return model.get("student", model)["head"]


def _mean(values: Sequence[float]) -> float | None:
  return statistics.fmean(values) if values else None


def _perplexity(result: Mapping[str, Any], split: str) -> float:
  return result[split]["perplexity"]


def _shipped_bytes(head: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
  """Bytes of all that a head owns; of one that learns its codes, when they are fixed."""
  name = head.get("class")
  if name not in ("LearnedCodebookHead", "LearnedProductHead"):
    return head.get("state_bytes")
  dim, codes, bias = (config[key] for key in ("dim", "codes", "token_bias"))
  # Beside K·D shared numbers and a bias, a token has its scores of the candidates or its latent.
  own = config["candidates"] if name == "LearnedCodebookHead" else dim
  vocab = (head["params"] - codes * dim) // (own + bias)
  if name == "LearnedCodebookHead":
    return CodebookHead(vocab, dim, codes, token_bias=bias).size().state_bytes
  return ProductHead(vocab, dim, codes, config["subspaces"], token_bias=bias).size().state_bytes
