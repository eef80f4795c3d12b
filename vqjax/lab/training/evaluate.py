"""The score of a model on a split, and the cost of a head's loss."""

import collections
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from vqjax.heads import Head
from vqjax.heads.workload import loss_and_gradient
from vqjax.lab.training.step import carried

__all__ = ["Cost", "Score", "evaluate", "loss_cost", "make_scorer"]


class Score(NamedTuple):
  """Quality of the predictions on a split.

  Attributes:
    nats_per_token: mean of -log p(token), natural logarithm.
    perplexity: exp(nats_per_token).
    bits_per_byte: the sum of -log2 p(token), over the bytes of the text. It compares models with
      different tokenizers, unless one replaces words by an unknown one. None without `text_bytes`.
    tokens: number of targets.
    text_bytes: UTF-8 bytes of the text that the targets spell; None where they spell none.
    rates: fractions of the targets that the model's method `hits` counts, such as "accuracy".
  """

  nats_per_token: float
  perplexity: float
  bits_per_byte: float | None
  tokens: int
  text_bytes: int | None
  rates: Mapping[str, float] = MappingProxyType({})

  def numbers(self) -> dict[str, float]:
    """Return the numbers that are not None by name, the rates among them."""
    values = self._asdict()
    rates = values.pop("rates")
    return {name: x for name, x in (values | rates).items() if x is not None}


Sums = dict[str, jax.Array]
"""Sums over the targets of a batch: "nats" (-log p), "targets" (number), HITS + name (hits)."""

HITS = "hits/"

Scorer = Callable[[dict, dict], tuple[Sums, dict]]
"""(variables, batch) -> the sums, and {"carry": ...} for a model with a carry, else {}."""


def summed_scorer(model: nn.Module) -> Scorer:
  """Return a pure scorer for the model."""

  def sums(variables, batch):
    wanted = batch["targets"] >= 0
    tokens = batch["inputs"], batch["targets"]
    mutable = ["carry"] if "carry" in variables else []
    log_prob, carry = model.apply(
      carried(variables, batch), *tokens, method="log_prob", mutable=mutable
    )
    totals = {"nats": -jnp.where(wanted, log_prob, 0.0).sum(), "targets": wanted.sum()}
    if hasattr(model, "hits"):
      hits = model.apply(variables, *tokens, method="hits")
      totals |= {HITS + name: (hit & wanted).sum() for name, hit in hits.items()}
    return totals, dict(carry)

  return sums


def make_scorer(model: nn.Module) -> Scorer:
  """Return `summed_scorer(model)`, jitted."""
  return jax.jit(summed_scorer(model))


def evaluate(
  scorer: Scorer, variables: dict, batches: Iterable[dict], text_bytes: int | None
) -> Score:
  """Return the score over the batches; the sums of batches are added in float64.

  Raises:
    ValueError: `batches` is empty, or no batch has a target.
  """
  total, pending = collections.Counter(), {}

  def add(sums: Sums) -> None:
    for name, x in jax.device_get(sums).items():
      total[name] += x.item()

  for batch in batches:
    sums, carry = scorer(variables, batch)
    variables = variables | carry
    add(pending)  # one batch late: the device works on this one while the host waits
    pending = sums
  if not pending:
    raise ValueError("`batches` must not be empty; got no batch. Give a longer split.")
  add(pending)
  targets = total["targets"]
  if not targets:
    raise ValueError("`batches` must have targets; got none. Give texts that fit the task.")
  mean = total["nats"] / targets
  bits = None if text_bytes is None else total["nats"] / math.log(2) / max(text_bytes, 1)
  hits = [name for name in pending if name.startswith(HITS)]
  rates = {name.removeprefix(HITS): total[name] / targets for name in hits}
  # exp(710) is infinite in float64, and JSON has no infinity.
  return Score(mean, math.exp(min(mean, 700.0)), bits, targets, text_bytes, rates)


class Cost(NamedTuple):
  """Time and memory of a loss.

  Attributes:
    seconds: median time of the loss and its gradient in the parameters and the hidden states.
    temp_bytes: temporary buffers of the compiled program, as the compiler reports them.
    tokens: number of tokens of the batch.
  """

  seconds: float
  temp_bytes: int
  tokens: int


def loss_cost(head: Head, tokens: int, dtype=jnp.float32, repeats: int = 5) -> Cost:
  """Measure the loss of an initialised head on random hidden states and tokens."""
  function, arguments = loss_and_gradient(head, tokens, dtype)
  compiled = jax.jit(function).lower(*arguments).compile()
  memory = compiled.memory_analysis()
  # The first call is a warm-up. Each is waited for: jax returns before the device has finished.
  jax.block_until_ready(compiled(*arguments))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    times.append(time.perf_counter() - start)
  temp_bytes = 0 if memory is None else int(memory.temp_size_in_bytes)
  return Cost(statistics.median(times), temp_bytes, tokens)
