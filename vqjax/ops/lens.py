"""How distributions from several layers of a model differ from that of the last one."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.ops.sampling import Blocks, best


class Readings(NamedTuple):
  """Distributions of S layers at positions *B, and their distances from that of the last layer.

  Attributes:
    tokens: the k most likely tokens, best first.
    log_probs: their log-probabilities, in nats.
    entropy: of each distribution, in nats.
    target_log_prob: log-probability of the token that follows, in nats; -inf for a target outside
      the vocabulary.
    kl: KL(last, layer) = sum_v q_v (log q_v - log p_v) of the last layer's q, in nats.
    total_variation: sum_v |q_v - p_v| / 2.
    rank: 1 + the number of tokens that are more likely than the last layer's best one.
  """

  tokens: Int[Array, "S *B k"]
  log_probs: Float[Array, "S *B k"]
  entropy: Float[Array, "S *B"]
  target_log_prob: Float[Array, "S *B"]
  kl: Float[Array, "S *B"]
  total_variation: Float[Array, "S *B"]
  rank: Int[Array, "S *B"]


def readings(blocks: Blocks, targets: Int[Array, "*B"], k: int) -> Readings:
  """What the layers predict, without an array [S, *B, V].

  The blocks are computed three times: for the normalisers and the best tokens, for the scores of
  single tokens, and for the sums of the normalised distributions.

  Args:
    blocks: scores with leading axes [S, *B], the last layer's last.
    targets: the token that follows each position.
    k: number of best tokens, in [1, V].
  """
  score_SBk, token_SBk, log_z_SB = best(blocks, k)
  wanted_2B = jnp.stack((targets, token_SBk[-1, ..., 0]))

  def find(found_2SB, index):
    score_WSB, token_W = blocks.block(index)
    is_wanted_W2B = token_W.reshape(-1, *[1] * wanted_2B.ndim) == wanted_2B
    # Padding names some token that another block holds, and scores -inf.
    score_W2SB = jnp.where(is_wanted_W2B[:, :, None], score_WSB[:, None], -jnp.inf)
    return jnp.maximum(found_2SB, score_W2SB.max(axis=0).astype(jnp.float32))

  least_2SB = jnp.full((2, *blocks.batch), -jnp.inf, jnp.float32)
  found_2SB = blocks.fold(find, least_2SB)
  if blocks.axis is not None:
    found_2SB = lax.pmax(found_2SB, blocks.axis)
  target_SB, best_SB = found_2SB

  def add(sums, index):
    score_WSB = blocks.block(index)[0].astype(jnp.float32)
    log_p_WSB = score_WSB - log_z_SB
    p_WSB, log_q_W1B = jnp.exp(log_p_WSB), log_p_WSB[:, -1:]
    q_W1B = jnp.exp(log_q_W1B)
    expected = lambda mass, value: jnp.where(mass == 0, 0.0, mass * value).sum(axis=0)
    terms = (
      -expected(p_WSB, log_p_WSB),
      expected(q_W1B, log_q_W1B - log_p_WSB),
      jnp.abs(q_W1B - p_WSB).sum(axis=0) / 2,
      (score_WSB > best_SB).sum(axis=0),
    )
    return tuple(total + term for total, term in zip(sums, terms))

  zero_SB = jnp.zeros(blocks.batch, jnp.float32)
  sums = blocks.fold(add, (zero_SB, zero_SB, zero_SB, jnp.zeros(blocks.batch, jnp.int32)))
  if blocks.axis is not None:
    sums = lax.psum(sums, blocks.axis)
  entropy_SB, kl_SB, variation_SB, above_SB = sums
  return Readings(
    tokens=token_SBk,
    log_probs=score_SBk - log_z_SB[..., None],
    entropy=entropy_SB,
    target_log_prob=target_SB - log_z_SB,
    kl=kl_SB,
    total_variation=variation_SB,
    rank=1 + above_SB,
  )
