"""Reassignment of tokens to codes by the hidden vectors of their contexts.

With the codebook and the hidden vectors h_n of a sample held fixed, a token v on code k adds
x_v exp(h_n · c_k) to each normaliser Z_n, x_v = exp(b_v) being its weight on the code (1 without
a token bias). Let q_k = sum_n exp(h_n · c_k) / Z_n. As -log(1 + z) >= -z, moving any set of
tokens from codes a to codes b raises the log-likelihood of the sample by at least

  sum over moved v of  (sum of h_n over v's positions) · (c_b - c_a) - x_v (q_b - q_a):

so each token may move to its best code independently, and the likelihood never falls. With a token
bias, b_v changes by log(q_a / q_b), which keeps v's expected probability; the last term is then
f_v log(q_a / q_b) for v's f_v positions, and the bound holds as well. This is the exchange of
Kneser and Ney (1993), for codes whose probabilities come from a network.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.ops import codes as code_ops
from vqjax.ops import softmax
from vqjax.types import Dtype

__all__ = []


class Contexts(NamedTuple):
  """Sums over the positions of a sample.

  Attributes:
    count: number of positions with each target.
    hidden: sum of the hidden vectors of these positions.
    mass: sum over all positions of the probability of each code.
  """

  count: Float[Array, "V"]
  hidden: Float[Array, "V D"]
  mass: Float[Array, "K"]


class Reassigned(NamedTuple):
  """A new assignment of the tokens.

  Attributes:
    assignment: code of each token.
    codebook: the codebook, in which a code without tokens has the row of the code that it splits.
    bias: the token bias that belongs to the assignment, or None.
    moved: number of tokens that moved to a better code.
    split: number of tokens that were given a code without tokens of their own.
    gain: lower bound, in nats, of the moves' gain of log-likelihood over the sample; the splits
      change no probability.
  """

  assignment: Int[Array, "V"]
  codebook: Float[Array, "K D"]
  bias: Float[Array, "V"] | None
  moved: Int[Array, ""]
  split: Int[Array, ""]
  gain: Float[Array, ""]


def contexts(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  mask: Bool[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Contexts:
  """Sums over the positions of the mask, with targets `tokens`, for `reassigned`."""
  vocab, codes = assignment.shape[0], codebook.shape[0]
  hidden, weight = hidden.astype(jnp.float32), mask.astype(jnp.float32)
  by_token = lambda shape, values: jnp.zeros(shape, jnp.float32).at[tokens].add(values)

  def log_z(log_mass_K):
    target = jnp.zeros_like(tokens)
    stats = softmax.linear_softmax(
      hidden, codebook, target, log_mass_K, dtype=dtype, vocab_axis=vocab_axis
    )
    return (weight * stats.log_z).sum()

  # The derivative of log Z in the log-mass of a code is the code's probability.
  mass_K = jax.grad(log_z)(code_ops.log_mass(assignment, codes, bias))
  return Contexts(
    by_token((vocab,), weight),
    by_token((vocab, hidden.shape[-1]), weight[..., None] * hidden),
    mass_K,
  )


def reassigned(
  sums: Contexts,
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  bias: Float[Array, "V"] | None = None,
  chunk: int = 4096,
) -> Reassigned:
  """Move tokens to their best codes, and split codes onto codes without tokens.

  A token moves if the sample gains more than log K nats, the description length of a code: a rare
  token has too few contexts for a smaller gain to be reliable (minimum description length). A code
  without tokens takes the row of another code and one of its tokens: the one whose contexts are
  farthest from those of the code, by count times squared distance of the means. `chunk` tokens are
  scored at once, and [V, K] never exists.
  """
  codes = codebook.shape[0]
  log_q_K = jnp.log(sums.mass) - code_ops.log_mass(assignment, codes, bias)
  codebook_f32 = codebook.astype(jnp.float32)

  def best(of_token):
    hidden, count, code = of_token
    # The last term of the bound: x_v q_k with x_v = 1, or f_v log q_k where b_v follows the move.
    cost_K = jnp.exp(log_q_K) if bias is None else count * log_q_K
    # q is 0 or undefined for codes without tokens, and for codes without probability in the sample.
    gain_K = jnp.where(jnp.isfinite(log_q_K), codebook_f32 @ hidden - cost_K, -jnp.inf)
    to = jnp.argmax(gain_K)
    own = jnp.where(jnp.isfinite(log_q_K[code]), gain_K[code], jnp.inf)
    return to.astype(assignment.dtype), gain_K[to] - own

  rows = sums.hidden, sums.count, assignment
  to_V, gain_V = jax.lax.map(best, rows, batch_size=chunk)
  moves_V = gain_V > jnp.log(codes)
  moved_to_V = jnp.where(moves_V, to_V, assignment)
  shift_V = log_q_K[assignment] - log_q_K[moved_to_V]
  new_bias = None if bias is None else bias + jnp.where(moves_V, shift_V, 0).astype(bias.dtype)
  new, source_K, split = _split_codes(sums, moved_to_V, codes)
  gain = jnp.where(moves_V, gain_V, 0).sum()
  return Reassigned(new, codebook[source_K], new_bias, moves_V.sum(), split, gain)


def _split_codes(sums: Contexts, assignment, codes):
  """The new assignment, the code whose row each code has, and number of splits."""
  by_code = lambda x: jax.ops.segment_sum(x, assignment, codes)
  count_V, token_V = sums.count, jnp.arange(assignment.shape[0])
  mean_VD = sums.hidden / jnp.maximum(count_V, 1)[:, None]
  mean_KD = by_code(sums.hidden) / jnp.maximum(by_code(count_V), 1)[:, None]
  cost_V = count_V * ((mean_VD - mean_KD[assignment]) ** 2).sum(-1)
  # The most frequent token of a code stays (the first of equals), so that no code loses all.
  top_K = jax.ops.segment_max(count_V, assignment, codes)
  stays_V = jnp.where(count_V == top_K[assignment], token_V, token_V.size)
  keeper_K = jax.ops.segment_min(stays_V, assignment, codes)
  cost_V = jnp.where(keeper_K[assignment] == token_V, 0.0, cost_V)

  empty_K = by_code(jnp.ones_like(count_V)) == 0
  # The r-th code without tokens takes the token of r-th highest cost.
  code_of_rank = jnp.argsort(~empty_K, stable=True)
  cost, token_of_rank = jax.lax.top_k(cost_V, codes)
  takes = empty_K[code_of_rank] & (cost > 0)
  source_K = (
    jnp.arange(codes)
    .at[code_of_rank]
    .set(jnp.where(takes, assignment[token_of_rank], code_of_rank))
  )
  given = jnp.where(takes, code_of_rank, assignment[token_of_rank])
  return assignment.at[token_of_rank].set(given.astype(assignment.dtype)), source_K, takes.sum()
