"""How good is a model on every token of a split, each counted exactly once?"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from vqjax.training.state import carried


class Score(NamedTuple):
  """How well a split was predicted.

  Attributes:
    nats_per_token: mean of -log p(token), natural logarithm.
    perplexity: exp(nats_per_token).
    bits_per_byte: all nats, in bits, over the bytes of the text: comparable between tokenizers as
      long as neither replaces words by an unknown one.
    tokens: tokens that were predicted.
    text_bytes: UTF-8 bytes of the split's text.
  """

  nats_per_token: float
  perplexity: float
  bits_per_byte: float
  tokens: int
  text_bytes: int


Scorer = Callable[[dict, dict], tuple[jax.Array, dict]]
"""(variables, batch with "mask") -> sum of -log p over the masked tokens, {"carry": ...} or {}."""


def summed_nats(model: nn.Module) -> Scorer:
  """A pure scorer; the second is what the model remembers of the rows of a batch, if anything."""

  def nats(variables, batch):
    tokens = batch["inputs"], batch["targets"]
    log_prob, carry = model.apply(
      carried(variables, batch), *tokens, method="log_prob", mutable=_carry_of(variables)
    )
    return -jnp.where(batch["mask"], log_prob, 0.0).sum(), dict(carry)

  return nats


def _carry_of(variables: dict) -> list[str]:
  return ["carry"] if "carry" in variables else []


def make_scorer(model: nn.Module) -> Scorer:
  """`summed_nats`, jitted."""
  return jax.jit(summed_nats(model))


def evaluate(scorer: Scorer, variables: dict, batches: Iterable[dict], text_bytes: int) -> Score:
  """The score over the batches; sums of batches are added in float64, one batch behind."""
  total, tokens, pending = 0.0, 0, None
  for batch in batches:
    nats, carry = scorer(variables, batch)
    variables = variables | carry
    tokens += int(batch["mask"].sum())
    total += 0.0 if pending is None else float(pending)
    pending = nats
  if pending is None:
    raise ValueError("no batch to evaluate: the split has no token")
  mean = (total + float(pending)) / tokens
  bits = mean * tokens / math.log(2) / max(text_bytes, 1)
  return Score(mean, math.exp(min(mean, 700.0)), bits, tokens, text_bytes)
