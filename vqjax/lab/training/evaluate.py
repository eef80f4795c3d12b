"""How good is a model on every token of a split, each counted exactly once?"""

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from vqjax.lab.training.state import carried


class Score(NamedTuple):
  """How well a split was predicted.

  Attributes:
    nats_per_token: mean of -log p(token), natural logarithm.
    perplexity: exp(nats_per_token).
    bits_per_byte: all nats, in bits, over the bytes of the text: comparable between tokenizers as
      long as neither replaces words by an unknown one.
    tokens: tokens, or whatever the targets are, that were predicted.
    text_bytes: UTF-8 bytes of the text that the targets spell; None, and no `bits_per_byte`: they
      spell none.
    rates: parts of the targets that the model called right, by the names of its `hits`, such as
      "accuracy"; {}: it has none.
  """

  nats_per_token: float
  perplexity: float
  bits_per_byte: float | None
  tokens: int
  text_bytes: int | None
  rates: Mapping[str, float] = MappingProxyType({})

  def known(self) -> dict[str, float]:
    """By name, the rates among them, without what is None."""
    numbers = self._asdict()
    rates = numbers.pop("rates")
    return {name: x for name, x in (numbers | rates).items() if x is not None}


Sums = dict[str, jax.Array]
"""Over the targets of a batch: "nats", -log p; "targets", how many; HITS + a name, how many hit."""

HITS = "hits/"

Scorer = Callable[[dict, dict], tuple[Sums, dict]]
"""(variables, batch) -> the sums, and {"carry": ...} or {}."""


def summed(model: nn.Module) -> Scorer:
  """A pure scorer; the second is what the model remembers of the rows of a batch, if anything."""

  def sums(variables, batch):
    wanted = batch["targets"] >= 0
    tokens = batch["inputs"], batch["targets"]
    log_prob, carry = model.apply(
      carried(variables, batch), *tokens, method="log_prob", mutable=_carry_of(variables)
    )
    found = {"nats": -jnp.where(wanted, log_prob, 0.0).sum(), "targets": wanted.sum()}
    if hasattr(model, "hits"):
      hits = model.apply(variables, *tokens, method="hits")
      found |= {HITS + name: (hit & wanted).sum() for name, hit in hits.items()}
    return found, dict(carry)

  return sums


def _carry_of(variables: dict) -> list[str]:
  return ["carry"] if "carry" in variables else []


def make_scorer(model: nn.Module) -> Scorer:
  """`summed`, jitted."""
  return jax.jit(summed(model))


def evaluate(
  scorer: Scorer, variables: dict, batches: Iterable[dict], text_bytes: int | None
) -> Score:
  """The score over the batches; sums of batches are added in float64, one batch behind.

  Raises:
    ValueError: there is no batch, or none with a target.
  """
  total, pending = collections.Counter(), {}
  for batch in batches:
    sums, carry = scorer(variables, batch)
    variables = variables | carry
    _add(total, pending)
    pending = sums
  if not pending:
    raise ValueError("no batch to evaluate: the split has no token")
  _add(total, pending)
  if not total["targets"]:
    raise ValueError("no target to evaluate: the split has texts, and none that the task can use")
  mean = total["nats"] / total["targets"]
  bits = None if text_bytes is None else total["nats"] / math.log(2) / max(text_bytes, 1)
  named = {name.removeprefix(HITS): total[name] for name in pending if name.startswith(HITS)}
  rates = {name: right / total["targets"] for name, right in named.items()}
  return Score(mean, math.exp(min(mean, 700.0)), bits, total["targets"], text_bytes, rates)


def _add(total: collections.Counter, sums: Sums) -> None:
  for name, x in jax.device_get(sums).items():
    total[name] += x.item()
