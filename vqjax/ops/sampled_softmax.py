"""What is a softmax's log-probability, estimated from a sample of the vocabulary?

S tokens are drawn without replacement from a proposal q, by the Gumbel top-k trick, once for all
tokens of the batch. With κ the (S+1)-th best of the noisy log q, a token exceeds κ with probability

  π_v = 1 - exp(-exp(log q_v - κ)),

and sum of exp(s_v) / π_v over the sample has the mean sum of exp(s_v) over all v: the normaliser is
estimated without bias, its logarithm and the loss consistently. The token itself counts once,
exactly, whether it was drawn (an "accidental hit") or not. With S = V the estimate is exact.

Source: Jean et al. (2014), On Using Very Large Target Vocabulary, the log Q correction; there the
tokens of the batch are candidates as well and are corrected too. Kool et al. (2019), Stochastic
Beams and Where to Find Them, the inclusion probabilities.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype


class Candidates(NamedTuple):
  """Different tokens, and the log of the probability with which each came to be among them."""

  tokens: Int[Array, "S"]
  log_inclusion: Float[Array, "S"]


class Estimate(NamedTuple):
  """Estimates, float32 and in nats, of a token's log-probability and of the log-normaliser."""

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]


def log_uniform(vocab: int) -> Float[Array, "{vocab}"]:
  """Log-probabilities of Zipf's law: q_v = log((v + 2) / (v + 1)) / log(V + 1).

  For token ids in order of falling frequency, as word-level tokenizers number them.
  """
  rank_V = jnp.arange(1, vocab + 1, dtype=jnp.float32)
  return jnp.log(jnp.log1p(1 / rank_V)) - jnp.log(jnp.log(jnp.float32(vocab + 1)))


def check_samples(samples: int, vocab: int) -> None:
  """ValueError for less than one sample, or more than there are tokens."""
  if not 1 <= samples <= vocab:
    raise ValueError(f"samples {samples} of a vocabulary of {vocab}; give 1 to {vocab}")


def draw_candidates(key: PRNGKeyArray, log_q: Float[Array, "V"], samples: int) -> Candidates:
  """`samples` different tokens, drawn one after another from softmax(log_q); O(V).

  A token with a log_q of -inf is never drawn; where fewer are left than samples, others fill the
  places, and the estimates made of them are of no token: their `log_inclusion` is infinite.

  Raises:
    ValueError: less than one sample, or more than there are tokens.
  """
  vocab = log_q.shape[0]
  check_samples(samples, vocab)
  log_q_V = log_q.astype(jnp.float32)
  noisy_S, token_S = lax.top_k(log_q_V + sampling.gumbel(key, log_q.shape), min(samples + 1, vocab))
  edge = noisy_S[samples] if samples < vocab else -jnp.inf
  token_S = token_S[:samples].astype(jnp.int32)
  # Without an edge exp overflows to infinity, and the probability is 1.
  log_q_S = log_q_V[token_S]
  inclusion_S = jnp.log(-jnp.expm1(-jnp.exp(log_q_S - edge)))
  # What cannot be drawn weighs nothing, where it fills a place.
  return Candidates(token_S, jnp.where(log_q_S == -jnp.inf, jnp.inf, inclusion_S))


def sampled_softmax(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  tokens: Integer[Array, "*B"],
  candidates: Candidates,
  bias: Float[Array, "V"] | None = None,
  *,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Estimate:
  """Estimates of softmax(hidden · weightᵀ + bias) at `tokens` from the candidates' scores.

  O(N·S·D) time; S + N rows of the weight are fetched, once, and the gradient is added to those rows
  alone. nan for a token outside [0, V). `dtype` is that of the products' operands, as in
  `linear_softmax`; over `vocab_axis` the weight's rows are spread, and then the candidates.
  """
  vocab, count = weight.shape[0], candidates.tokens.shape[0]
  known, token = in_vocabulary(tokens, vocab)
  wanted = jnp.concatenate([candidates.tokens, token.reshape(-1)])
  fetch = lambda rows, wanted: jax.tree.map(
    lambda x: vocab_parallel.sharded_lookup(x, wanted, vocab_axis), rows
  )
  rows = vocab_parallel.Sharded(weight, 0), vocab_parallel.Sharded(bias, 0)
  row, bias = vocab_parallel.over_vocabulary(vocab_axis, fetch, rows, wanted)
  bias = jnp.zeros(wanted.shape, jnp.float32) if bias is None else bias.astype(jnp.float32)

  place_V = jnp.full((vocab,), count, jnp.int32).at[candidates.tokens].set(jnp.arange(count))
  place = place_V[token]
  hit = place < count
  place = jnp.where(hit, place, 0)
  # p_S(v) = exp(s_v) / π_v / Z_S, where the hit, if there is one, has its weight 1 / π too.
  among = softmax.linear_softmax(
    *(hidden, row[:count], place, bias[:count] - candidates.log_inclusion),
    dtype=dtype,
    vocab_axis=vocab_axis,
  )
  own_row = row[count:].reshape(*token.shape, -1)
  own = _row_scores(hidden, own_row, dtype) + bias[count:].reshape(token.shape)
  log_pi = candidates.log_inclusion[place]
  # Z = Z_S - exp(s) / π + exp(s) where the token was drawn, and exp(s) = π · p_S · Z_S.
  excess = jnp.log1p(jnp.expm1(log_pi) * jnp.exp(among.log_prob))
  log_prob = jnp.where(hit, among.log_prob + log_pi - excess, -jax.nn.softplus(among.log_z - own))
  log_z = among.log_z + jnp.where(hit, excess, jax.nn.softplus(own - among.log_z))
  return Estimate(jnp.where(known, log_prob, jnp.nan), log_z)


def _row_scores(hidden, rows, dtype):
  """hidden · row of each token, its operands in the dtype of the products, summed in float32."""
  dtype = dtype or jnp.promote_types(hidden.dtype, rows.dtype)
  product = hidden.astype(dtype).astype(jnp.float32) * rows.astype(dtype).astype(jnp.float32)
  return product.sum(axis=-1)
