"""The rejection rule of speculative decoding, from scores a block of the vocabulary at a time.

A draft token d, drawn from q, is accepted with probability min(1, p(d) / q(d)); in place of the
first one that is not, a token is drawn from max(p - q, 0), normalised. Each token is then
distributed as p. Source: Leviathan et al., Fast Inference from Transformers via Speculative
Decoding, 2023, Theorem 3.5.
"""

# Positions of one round of K = 3 draft tokens:
#
#   target p       p_0       p_1       p_2       p_3          of T = 4 positions, in blocks
#   draft  q       q_0       q_1       q_2
#   token          d_0       d_1       d_2                    accepted while u < p(d) / q(d)
#                            reject -> draw from max(p_1 - q_1, 0)
#                 all accepted ------------------> draw from p_3
#
# So `verify` needs one array of the vocabulary a row: that of the position where it draws.

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vqjax.ops import sampling
from vqjax.ops.sampling import Blocks

__all__ = ["FilteredDistribution", "verify"]


class FilteredDistribution(NamedTuple):
  """A distribution whose options of sampling have been applied.

  Attributes:
    blocks: scores, -inf for what cannot be drawn. Their tokens are numbers of candidates.
    log_z: log-normaliser of the scores.
    tokens: token of each candidate of each row; None: the numbers are the tokens.
  """

  blocks: Blocks
  log_z: Float[Array, "*B"]
  tokens: Int[Array, "n *B"] | None

  @staticmethod
  def of(
    blocks: Blocks,
    temperature: float | int,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
  ) -> FilteredDistribution:
    """The distribution of `sampling.sample` with these options; the temperature is not 0.

    Up to `device.Device.stored` the scores are computed once.
    """
    tokens = None
    if top_k is None:
      blocks = sampling.stored(blocks)
    else:
      score_Bk, token_Bk, _ = sampling.best(blocks, top_k, normalizer=False)
      score_kB, tokens = jnp.moveaxis(score_Bk, -1, 0), jnp.moveaxis(token_Bk, -1, 0)
      # The candidates are equal on all devices, whatever axis their scores came from.
      blocks = Blocks(1, lambda _: (score_kB, jnp.arange(top_k)), blocks.batch)
    if min_p is not None:
      blocks = sampling.at_least(blocks, min_p, temperature)
    blocks = blocks.map(lambda score_WB, _: score_WB.astype(jnp.float32) / temperature)
    blocks = sampling.nucleus(blocks, top_p)
    return FilteredDistribution(blocks, sampling.best(blocks, 1)[2], tokens)

  def log_prob(self, token: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Log-probability in nats of a token; -inf if it cannot be drawn."""

    def step(found_B, index):
      score_WB, number_W = self.blocks.block(index)
      all_WB = self._tokens_of(number_W)
      return jnp.maximum(found_B, jnp.where(all_WB == token, score_WB, -jnp.inf).max(axis=0))

    score_B = self.blocks.fold(step, jnp.full(self.blocks.batch, -jnp.inf, jnp.float32))
    if self.blocks.axis:
      score_B = lax.pmax(score_B, self.blocks.axis)
    return score_B - self.log_z

  def entropy(self) -> Float[Array, "*B"]:
    """Entropy in nats."""

    def step(total_B, index):
      log_p_WB = self.blocks.block(index)[0] - self.log_z
      p_WB = jnp.exp(log_p_WB)
      return total_B - jnp.where(p_WB == 0, 0.0, p_WB * log_p_WB).sum(axis=0)

    total_B = self.blocks.fold(step, jnp.zeros(self.blocks.batch, jnp.float32))
    return lax.psum(total_B, self.blocks.axis) if self.blocks.axis else total_B

  def _tokens_of(self, number_W):
    if self.tokens is None:
      return number_W.reshape(-1, *[1] * len(self.blocks.batch))
    return self.tokens[number_W]

  def draw(self, key: PRNGKeyArray) -> Int[Array, "*B"]:
    """A token; -1 where none can be drawn."""
    number_B = sampling.draw(self.blocks, key)
    if self.tokens is None:
      return number_B
    token_1B = jnp.take_along_axis(self.tokens, jnp.maximum(number_B, 0)[None], axis=0)
    return jnp.where(number_B < 0, -1, token_1B[0])

  def of_position(self, position: Int[Array, "B"]) -> FilteredDistribution:
    """The distribution [B] of one position of each row, of distributions [B, T]."""
    pick = lambda x: jnp.take_along_axis(x, position.reshape(*[1] * (x.ndim - 2), -1, 1), axis=-1)[
      ..., 0
    ]
    block = self.blocks.block

    def picked(index):
      score_WBT, number_W = block(index)
      return pick(score_WBT), number_W

    blocks = self.blocks._replace(block=picked, batch=self.blocks.batch[:1])
    return FilteredDistribution(
      blocks, pick(self.log_z), None if self.tokens is None else pick(self.tokens)
    )

  def less(self, other: Float[Array, "V B"]) -> FilteredDistribution:
    """The part of the probabilities that exceeds those of `other`, normalised."""

    def exceeding(score_WB, number_W):
      other_WB = other[number_W]
      if self.tokens is not None:
        other_WB = jnp.take_along_axis(other, jnp.maximum(self.tokens[number_W], 0), axis=0)
      return jnp.log(jnp.maximum(jnp.exp(score_WB - self.log_z) - other_WB, 0))

    return self._replace(blocks=self.blocks.map(exceeding), log_z=jnp.zeros_like(self.log_z))

  def log_probs(self, vocab: int) -> Float[Array, "V B"]:
    """Log-probabilities of all tokens, of scores in a single block."""
    score_WB, number_W = self.blocks.block(jnp.zeros((), jnp.int32))
    if self.tokens is None:
      return score_WB - self.log_z
    token_WB = self.tokens[number_W]
    # An empty candidate has token -1.
    token_WB, column_B = jnp.where(token_WB < 0, vocab, token_WB), jnp.arange(token_WB.shape[1])
    empty_VB = jnp.full((vocab, token_WB.shape[1]), -jnp.inf, jnp.float32)
    return empty_VB.at[token_WB, column_B].set(score_WB - self.log_z, mode="drop")


def verify(
  target: FilteredDistribution,
  number: Int[Array, "B K"],
  draft_log_prob: Float[Array, "K U B"],
  tokens: Int[Array, "U"] | None,
  vocab: int,
  key: PRNGKeyArray,
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
  """Number of draft tokens that are accepted, and the token that follows them.

  Only one position of each row, that of its first rejection, has an array of the target's
  vocabulary.

  Args:
    target: distributions p of T = K + 1 positions, [B, T].
    number: draft tokens, as numbers of the drafter's vocabulary.
    draft_log_prob: log q of the drafter's whole vocabulary at each position.
    tokens: token of the target for each of the drafter; None: they are the same.
    vocab: number of tokens of the target.
    key: source of randomness.
  """
  length, accept_key, draw_key = number.shape[1], *jax.random.split(key)
  drafted_BK = number if tokens is None else tokens[number]
  log_p_BT = target.log_prob(jnp.pad(drafted_BK, ((0, 0), (0, 1)), constant_values=-1))
  log_q_BK = jnp.take_along_axis(draft_log_prob, number.T[:, None], axis=1)[:, 0].T
  # A uniform number below 1 accepts whatever is at least as likely for the target.
  uniform_BK = jax.random.uniform(accept_key, number.shape)
  is_accepted_BK = uniform_BK < jnp.exp(log_p_BT[:, :length] - log_q_BK)
  accepted_B = jnp.cumprod(is_accepted_BK, axis=1).sum(axis=1)
  position_B = jnp.minimum(accepted_B, length - 1)
  q_UB = jnp.exp(jnp.take_along_axis(draft_log_prob, position_B[None, None], axis=0)[0])
  # After the last draft token nothing was rejected, so that nothing is subtracted. Nor is a q of
  # nan, whose draft token is never accepted: what is drawn is the target's all the same.
  q_UB = jnp.where((accepted_B < length) & ~jnp.isnan(q_UB), q_UB, 0)
  q_VB = q_UB if tokens is None else jnp.zeros((vocab, q_UB.shape[1])).at[tokens].set(q_UB)
  token_B = target.of_position(accepted_B).less(q_VB).draw(draw_key)
  # Where p and q are equal but for rounding, a rejection may leave nothing to draw.
  last_B = jnp.take_along_axis(drafted_BK, position_B[:, None], axis=1)[:, 0]
  return accepted_B, jnp.where(token_B < 0, last_B, token_B)
