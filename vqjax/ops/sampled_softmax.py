"""Estimates of softmax log-probabilities from a sample of the vocabulary.

S tokens are drawn without replacement from a proposal q, by the Gumbel top-k trick, once for all
tokens of the batch. With κ the (S+1)-th best of the noisy log q, a token exceeds κ with probability

  π_v = 1 - exp(-exp(log q_v - κ)),

and the mean of the sum of exp(s_v) / π_v over the sample is the sum of exp(s_v) over all v. So the
estimate of the normaliser is unbiased, and those of its logarithm and of the loss are consistent.
The token itself is counted once and exactly, whether it was drawn (an "accidental hit") or not.
With S = V the estimate is exact.

Sources: Jean et al. (2014), On Using Very Large Target Vocabulary, the log Q correction; there the
tokens of the batch are candidates too, and corrected. Kool et al. (2019), Stochastic Beams and
Where to Find Them, the inclusion probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import sampling, softmax, symbolic, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary, is_count
from vqjax.types import Dtype, MeshAxes

__all__ = []


class Candidates(NamedTuple):
  """Distinct tokens, and the log of each one's probability of inclusion among them."""

  tokens: Int[Array, "S"]
  log_inclusion: Float[Array, "S"]


class SampledEstimate(NamedTuple):
  """Estimates in nats, float32: a token's log-probability, the log-normaliser."""

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]


def log_uniform(vocab: int) -> Float[Array, "{vocab}"]:
  """Log-probabilities of q_v = log((v + 2) / (v + 1)) / log(V + 1).

  This log-uniform distribution follows Zipf's law if token ids are sorted by descending frequency,
  as in word-level tokenizers.
  """
  rank_V = jnp.arange(1, vocab + 1, dtype=jnp.float32)
  return jnp.log(jnp.log1p(1 / rank_V)) - jnp.log(jnp.log(jnp.float32(vocab + 1)))


def check_samples(samples: int, vocab: int) -> None:
  """Raise ValueError unless `samples` is in [1, vocab]."""
  if not is_count(samples) or not 1 <= samples <= vocab:
    raise ValueError(
      f"`samples` must be in [1, {vocab}] for a vocabulary of {vocab}; got {samples}. 64 to 8192 is"
      " usual."
    )


def draw_candidates(key: PRNGKeyArray, log_q: Float[Array, "V"], samples: int) -> Candidates:
  """`samples` distinct tokens, drawn without replacement from softmax(log_q).

  This takes O(V) time. A token of log_q -inf is never drawn. If fewer others than `samples` exist,
  such tokens fill the list with a `log_inclusion` of infinity, which gives them weight 0 in an
  estimate.

  Raises:
    ValueError: `samples` is not in [1, V].
  """
  vocab = log_q.shape[0]
  check_samples(samples, vocab)
  log_q_V = jnp.asarray(log_q, jnp.float32)
  noisy_S, token_S = lax.top_k(log_q_V + sampling.gumbel(key, log_q.shape), min(samples + 1, vocab))
  edge = noisy_S[samples] if samples < vocab else -jnp.inf
  token_S = token_S[:samples].astype(jnp.int32)
  # With S = V the edge is -inf: exp overflows to infinity, and the probability is 1.
  log_q_S = log_q_V[token_S]
  inclusion_S = jnp.log(-jnp.expm1(-jnp.exp(log_q_S - edge)))
  # The weight 1 / π of a token that cannot be drawn is 0.
  return Candidates(token_S, jnp.where(log_q_S == -jnp.inf, jnp.inf, inclusion_S))


@vocab_parallel.for_any_axes("hidden")
@symbolic.for_any_batch("hidden")
def sampled_softmax(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  tokens: Integer[Array, "*B"],
  candidates: Candidates,
  bias: Float[Array, "V"] | None = None,
  *,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> SampledEstimate:
  """Estimates of `tokens` under softmax(hidden · weightᵀ + bias).

  This takes O(N·S·D) time. S + N rows of the weight are gathered once, and only they get a
  gradient. A token outside [0, V) has log-probability nan. `dtype` is the dtype of the products'
  operands, as in `linear_softmax`. Over `vocab_axis` the weight's rows are sharded, and so are the
  candidates after the gather.
  """
  vocab = vocab_parallel.rows_in_all(vocab_axis, weight.shape[0])
  valid, token = in_vocabulary(tokens, vocab)

  def body(rows, *shared):
    return _estimate(*rows, *shared, vocab, dtype, vocab_axis)

  rows = vocab_parallel.Sharded(weight, 0), vocab_parallel.Sharded(bias, 0)
  found = vocab_parallel.over_vocabulary(vocab_axis, body, rows, hidden, token, candidates)
  return found._replace(log_prob=jnp.where(valid, found.log_prob, jnp.nan))


def _estimate(weight, bias, hidden, token, candidates, vocab, dtype, vocab_axis) -> SampledEstimate:
  """The estimates, from the rows that this device holds."""
  count = candidates.tokens.shape[0]
  wanted = jnp.concatenate([candidates.tokens, token.reshape(-1)])
  row = vocab_parallel.sharded_lookup(weight, wanted, vocab_axis)
  if bias is None:
    bias = jnp.zeros(wanted.shape, jnp.float32)
  else:
    bias = vocab_parallel.sharded_lookup(bias, wanted, vocab_axis).astype(jnp.float32)

  # The inverse of `candidates.tokens`, with `count` for tokens that are not candidates.
  index_V = (
    jnp.full((vocab,), count, jnp.int32)
    .at[candidates.tokens]
    .set(jnp.arange(count, dtype=jnp.int32))
  )
  index = index_V[token]
  hit = index < count
  index = jnp.where(hit, index, 0)
  # A candidate that only fills the list has no weight to take back.
  hit &= candidates.log_inclusion[index] < jnp.inf
  # p_S(v) = exp(s_v) / π_v / Z_S over the candidates; an accidental hit has its weight 1 / π too.
  candidate_rows, weight_bias = row[:count], bias[:count] - candidates.log_inclusion
  axis = vocab_parallel.inside(vocab_axis)
  if axis:
    # Every device scores its part of the candidates; -inf removes what pads the last one.
    part = -(-count // vocab_parallel.axis_size(axis))
    missing = part * vocab_parallel.axis_size(axis) - count
    candidate_rows = jnp.pad(candidate_rows, ((0, missing), (0, 0)))
    weight_bias = jnp.pad(weight_bias, (0, missing), constant_values=-jnp.inf)
    candidate_rows = vocab_parallel.own_part(candidate_rows, part, axis)
    weight_bias = vocab_parallel.own_part(weight_bias, part, axis)
  among = softmax.linear_softmax(
    hidden, candidate_rows, index, weight_bias, dtype=dtype, vocab_axis=vocab_axis
  )
  own_row = row[count:].reshape(*token.shape, -1)
  # Rounded as the operands of `linear_softmax` are, so that a hit has the same score there.
  operands = dtype or jnp.promote_types(hidden.dtype, own_row.dtype)
  exact = lambda x: x.astype(operands).astype(jnp.float32)
  own = (exact(hidden) * exact(own_row)).sum(axis=-1) + bias[count:].reshape(token.shape)
  log_pi = candidates.log_inclusion[index]
  # Z = Z_S - exp(s) / π + exp(s) where the token was drawn, and exp(s) = π · p_S · Z_S.
  excess = jnp.log1p(jnp.expm1(log_pi) * jnp.exp(among.log_prob))
  log_prob = jnp.where(hit, among.log_prob + log_pi - excess, -jax.nn.softplus(among.log_z - own))
  log_z = among.log_z + jnp.where(hit, excess, jax.nn.softplus(own - among.log_z))
  return SampledEstimate(log_prob, log_z)
