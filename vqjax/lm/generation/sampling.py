"""Options of sampling, and the choice of a token by any head."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.heads import Head
from vqjax.ops import sampling as ops

__all__ = ["GREEDY", "UNFILTERED", "Sampling"]


@dataclasses.dataclass(frozen=True)
class Sampling(ops.SamplingOptions):
  """The distribution from which tokens are drawn.

  The options apply in the order repetition penalty, temperature, min-p, top-k, top-p.

  Attributes:
    temperature: divides the logits; 0 takes the best token.
    top_k: only the k best tokens; None: all.
    top_p: only the smallest set of best tokens with this mass; None: all.
    min_p: only tokens at least this fraction as likely as the best; None: all. Source: Nguyen et
      al., Min-p Sampling, 2024.
    repetition_penalty: divides the positive logits of tokens that the prompt or the text so far
      contains, and multiplies the negative ones. Source: Keskar et al., CTRL, 2019.
  """

  min_p: float | int | None = None
  repetition_penalty: float | int = 1.0

  def __post_init__(self):
    super().__post_init__()
    if self.min_p is not None and not 0 < self.min_p <= 1:
      raise ValueError(f"`min_p` must be in (0, 1]; got {self.min_p}. Use None for no limit.")
    if not 0 < self.repetition_penalty < math.inf:
      raise ValueError(
        f"`repetition_penalty` must be finite and above 0; got {self.repetition_penalty}. 1 leaves"
        " the logits as they are; 1.1 is usual."
      )

  @property
  def penalizes(self) -> bool:
    """Whether the tokens so far matter."""
    return self.repetition_penalty != 1


UNFILTERED = Sampling()
"""The distribution of the model."""

GREEDY = Sampling(temperature=0.0)
"""The most likely token, always."""


def choose(
  head: Head,
  hidden: Float[Array, "*B D"],
  key: PRNGKeyArray,
  options: Sampling,
  allowed: Bool[ArrayLike, "..."] | None = None,
  seen: Bool[Array, "*B V"] | None = None,
) -> Int[Array, "*B"]:
  """A token for each hidden vector; -1 where none is allowed, and any where the scores are nan.

  A head with factors samples by them. The repetition penalty and min-p read the logits of all
  tokens, a block of the vocabulary at a time.

  Args:
    head: a bound head.
    hidden: the hidden vectors.
    key: source of randomness.
    options: the distribution.
    allowed: marks the tokens that may be drawn, [V] or [*B, V].
    seen: marks the tokens that the repetition penalty applies to.
  """
  if not options.penalizes and (options.min_p is None or options.is_greedy):
    return head.sample(hidden, key, options.temperature, options.top_k, options.top_p, allowed)

  def body(blocks, key, allowed, seen):
    blocks = ops.allow(blocks, allowed, head.vocab)
    if options.penalizes:
      blocks = blocks.map(lambda score_WB, token_W: _penalized(score_WB, seen[:, token_W].T))
    if options.min_p is not None and not options.is_greedy:
      blocks = ops.at_least(blocks, options.min_p, options.temperature)
    return ops.sample(blocks, key, options)

  def _penalized(score_WB, seen_WB):
    penalty = options.repetition_penalty
    lower_WB = jnp.where(score_WB > 0, score_WB / penalty, score_WB * penalty)
    return jnp.where(seen_WB, lower_WB, score_WB)

  return head.over_blocks(body, hidden, key, allowed, seen)
