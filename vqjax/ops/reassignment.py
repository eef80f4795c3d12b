"""On which code does each token fit best, by the hidden vectors of the contexts that it came in?

With the codebook and the hidden vectors h_n of a sample held fixed, a token v on code k adds
x_v exp(h_n · c_k) to each normaliser Z_n, x_v = exp(b_v) being its weight on the code (1 without
a token bias). Let q_k = sum_n exp(h_n · c_k) / Z_n. Since -log(1 + z) >= -z, moving any set of
tokens from codes a to codes b raises the log-likelihood of the sample by at least

  sum over moved v of  (sum of h_n over v's own places) · (c_b - c_a) - x_v (q_b - q_a):

each token may take its best code by itself, and together they never lose. With a token bias, b_v
changes by log(q_a / q_b), which keeps v's expected probability; the last term is then
f_v log(q_a / q_b) for v's f_v places, and the bound is as exact. An exchange as in Kneser and Ney
(1993), for codes whose probabilities come from a network.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.ops import codes as code_ops
from vqjax.ops import softmax
from vqjax.types import Dtype


class Contexts(NamedTuple):
  """Sums over the places of a sample.

  Attributes:
    count: places whose target is each token.
    hidden: sum of the hidden vectors there.
    mass: sum over all places of the probability of each code.
  """

  count: Float[Array, "V"]
  hidden: Float[Array, "V D"]
  mass: Float[Array, "K"]


class Reassigned(NamedTuple):
  """A new place for each token.

  Attributes:
    assignment: the code of each token.
    codebook: the old one, where a code on which no token sat has the row of the code it splits.
    bias: the token bias that goes with it; None without one.
    moved: tokens that went to a better code.
    split: tokens that got a code of their own, on which no token was left.
    gain: nats that the sample gains at least by the moves; the splits change no probability.
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
  """What `reassigned` needs of places with target `tokens`, those that `mask` marks."""
  vocab, codes = assignment.shape[0], codebook.shape[0]
  hidden, weight = hidden.astype(jnp.float32), mask.astype(jnp.float32)
  by_token = lambda shape, values: jnp.zeros(shape, jnp.float32).at[tokens].add(values)

  def log_z(log_mass_K):
    operands = hidden, codebook, jnp.zeros_like(tokens), log_mass_K
    found = softmax.linear_softmax(*operands, dtype=dtype, vocab_axis=vocab_axis)
    return (weight * found.log_z).sum()

  # The derivative of log Z in the log-mass of a code is the code's probability.
  mass_K = jax.grad(log_z)(code_ops.log_mass(assignment, codes, bias))
  return Contexts(
    by_token((vocab,), weight),
    by_token((vocab, hidden.shape[-1]), weight[..., None] * hidden),
    mass_K,
  )


def reassigned(
  found: Contexts,
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  bias: Float[Array, "V"] | None = None,
  chunk: int = 4096,
) -> Reassigned:
  """Moves each token to its best code, and gives codes that no token sits on to split others.

  A token moves where the sample gains more than log K nats by it, which is what naming a code
  costs: a rare token's few contexts say little (minimum description length). A code without
  tokens takes over the row of a code and one of its tokens: the one whose contexts lie farthest
  from those of the code, by count times squared distance of the means. `chunk` tokens are scored
  at once: [V, K] never exists.
  """
  codes = codebook.shape[0]
  log_q_K = jnp.log(found.mass) - code_ops.log_mass(assignment, codes, bias)
  codebook_f32 = codebook.astype(jnp.float32)

  def best(of_token):
    hidden, count, code = of_token
    cost_K = jnp.exp(log_q_K) if bias is None else count * log_q_K
    # A code that no token sits on has no q; nor does one of no probability in the sample.
    gain_K = jnp.where(jnp.isfinite(log_q_K), codebook_f32 @ hidden - cost_K, -jnp.inf)
    to = jnp.argmax(gain_K)
    own = jnp.where(jnp.isfinite(log_q_K[code]), gain_K[code], jnp.inf)
    return to.astype(assignment.dtype), gain_K[to] - own

  rows = found.hidden, found.count, assignment
  to_V, gain_V = jax.lax.map(best, rows, batch_size=chunk)
  moves_V = gain_V > jnp.log(codes)
  moved_to_V = jnp.where(moves_V, to_V, assignment)
  shift_V = log_q_K[assignment] - log_q_K[moved_to_V]
  new_bias = None if bias is None else bias + jnp.where(moves_V, shift_V, 0).astype(bias.dtype)
  new, source_K, split = _filled(found, moved_to_V, codes)
  gain = jnp.where(moves_V, gain_V, 0).sum()
  return Reassigned(new, codebook[source_K], new_bias, moves_V.sum(), split, gain)


def _filled(found: Contexts, assignment, codes):
  """The assignment with codes that had no token, the code whose row each one has, and how many."""
  by_code = lambda x: jax.ops.segment_sum(x, assignment, codes)
  count_V, token_V = found.count, jnp.arange(assignment.shape[0])
  mean_VD = found.hidden / jnp.maximum(count_V, 1)[:, None]
  mean_KD = by_code(found.hidden) / jnp.maximum(by_code(count_V), 1)[:, None]
  cost_V = count_V * ((mean_VD - mean_KD[assignment]) ** 2).sum(-1)
  # The most frequent token of a code stays, so that no code loses all.
  top_K = jax.ops.segment_max(count_V, assignment, codes)
  stays_V = jnp.where(count_V == top_K[assignment], token_V, token_V.size)
  keeper_K = jax.ops.segment_min(stays_V, assignment, codes)
  cost_V = jnp.where(keeper_K[assignment] == token_V, 0.0, cost_V)

  empty_K = by_code(jnp.ones_like(count_V)) == 0
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
