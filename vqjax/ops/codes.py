"""What distribution do tokens have that share the score of a code?

Every token v sits on one code c(v); its score is hidden · codebook[c(v)] + b_v. Then

  p(v) = p(code c(v)) · p(v | code),   p(v | code) = exp(b_v) / sum of exp(b_u) over u on the code,

so the normaliser is a softmax over K codes whose bias is the log-mass of each code. It needs no
array of the vocabulary's size for each token, and is exact. Without a bias the mass of a code is
the number of its tokens. Source: VQ-Logits, Eq. 2-5, without the [*B, V] gather of Eq. 3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import ranking, sampling, shards, softmax
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype

NO_CODE = 2**30
"""The code of a place in a table that stands for no token: more than any codebook has."""


def log_mass(
  assignment: Int[Array, "V"],
  codes: int,
  bias: Float[Array, "V"] | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "{codes}"]:
  """Log of each code's mass: log sum of exp(bias) over its tokens; of their number without bias.

  -inf for a code on which no token sits, which removes it from the distribution. Inside of
  `vocab_axis` the tokens of all its devices count.
  """
  axis = shards.inside(vocab_axis)
  in_all = lambda x: lax.psum(x, axis) if axis else x
  if bias is None:
    ones_V = jnp.ones(assignment.shape, jnp.float32)
    return jnp.log(in_all(jax.ops.segment_sum(ones_V, assignment, codes)))
  bias_V = bias.astype(jnp.float32)
  top_K = jax.ops.segment_max(jax.lax.stop_gradient(bias_V), assignment, codes)
  top_K = lax.pmax(top_K, axis) if axis else top_K
  shift_K = jnp.where(jnp.isneginf(top_K), 0.0, top_K)
  sum_K = in_all(jax.ops.segment_sum(jnp.exp(bias_V - shift_K[assignment]), assignment, codes))
  # log 0 is right for an empty code, but its derivative is not finite: keep it out of the gradient.
  empty_K = sum_K == 0
  return jnp.where(empty_K, -jnp.inf, jnp.log(jnp.where(empty_K, 1.0, sum_K)) + shift_K)


class CodeSoftmax(NamedTuple):
  """What a token's distribution is known by, float32, in nats.

  Attributes:
    log_prob: log-probability of the token.
    log_z: log-normaliser, log sum_v exp(score_v).
    mean_log_prob: mean of log p_v over the vocabulary (over the tokens that no bias of -inf
      removes), if asked for: what label smoothing adds.
  """

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]
  mean_log_prob: Float[Array, "*B"] | None


def code_log_prob(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of `tokens`, each scored by the code it sits on.

  `code_softmax(...).log_prob`, where the arguments are explained.
  """
  arguments = hidden, codebook, assignment, tokens, bias
  return code_softmax(*arguments, dtype=dtype, vocab_axis=vocab_axis).log_prob


def code_softmax(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  mean: bool = False,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> CodeSoftmax:
  """softmax over the vocabulary of hidden · codebook[code of the token] + bias, at `tokens`.

  O(N·K·D) time; O(V) once, for the mass of the codes; no array of N·V elements. A token outside
  [0, V) has a log-probability of nan, as does one whose code is not in [0, K).

  Args:
    hidden: one vector for each token.
    codebook: the vector of each code.
    assignment: the code of each word of the vocabulary.
    tokens: indices into the vocabulary.
    bias: a score of each word; -inf removes it.
    mean: whether to compute the mean log-probability: hidden · (mean row) + (mean bias) - log Z,
      the mean row being that of the codes by the number of their words.
    dtype: that of the matrix product's operands, as in `linear_softmax`.
    vocab_axis: mesh axis over which the codes are spread, and the table and the bias over their
      words.
  """
  known, token = in_vocabulary(tokens, assignment.shape[0])

  def body(rows, shared):
    codebook, assignment, bias = rows
    hidden, token = shared
    return _code_softmax(hidden, codebook, assignment, token, bias, mean, dtype, vocab_axis)

  rows = (
    shards.Padded(codebook, 0),
    shards.Padded(assignment, NO_CODE),
    shards.Padded(bias, 0),
  )
  found = shards.over_vocabulary(vocab_axis, body, rows, (hidden, token))
  return found._replace(log_prob=jnp.where(known, found.log_prob, jnp.nan))


def _code_softmax(hidden, codebook, assignment, token, bias, mean, dtype, axis):
  codes = codebook.shape[0]
  mass_K = log_mass(assignment, shards.rows_in_all(axis, codes), bias, axis)
  code = shards.looked_up(assignment, token, axis).astype(jnp.int32)
  found = softmax.linear_softmax(
    hidden, codebook, code, shards.own_part(mass_K, codes, axis), dtype=dtype, vocab_axis=axis
  )
  bias_B = 0.0 if bias is None else shards.looked_up(bias, token, axis).astype(jnp.float32)
  mass_B = shards.taken(mass_K, code)
  # On a code whose tokens all have bias -inf nothing has a probability, and no share of it.
  within = jnp.where(jnp.isneginf(mass_B), 0.0, bias_B - mass_B)
  mean_B = _mean_score(hidden, codebook, assignment, bias, axis) - found.log_z if mean else None
  return CodeSoftmax(found.log_prob + within, found.log_z, mean_B)


def _mean_score(hidden, codebook, assignment, bias, axis):
  """Mean of a token's scores over the words in the distribution."""
  axis = shards.inside(axis)
  in_all = lambda x: lax.psum(shards.varying(x, axis), axis) if axis else x
  codes = codebook.shape[0]
  kept_V = assignment < shards.rows_in_all(axis, codes)
  kept_V = kept_V if bias is None else kept_V & ~jnp.isneginf(bias)
  ones_V = kept_V.astype(jnp.float32)
  count_K = jax.ops.segment_sum(ones_V, assignment, shards.rows_in_all(axis, codes))
  own_K = shards.own_part(in_all(count_K), codes, axis)
  sum_D = in_all(own_K @ codebook.astype(jnp.float32))
  bias_sum = 0.0 if bias is None else jnp.where(kept_V, bias, 0.0).sum(dtype=jnp.float32)
  total = hidden.astype(jnp.float32) @ sum_D + (bias_sum if bias is None else in_all(bias_sum))
  return total / in_all(ones_V.sum())


def all_code_scores(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "k D"],
  codes: int,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B {codes}"]:
  """hidden · codebookᵀ, float32; inside of `vocab_axis` each device computes those of its rows."""
  scores = softmax.linear_scores(hidden, codebook, dtype=dtype)
  axis = shards.inside(vocab_axis)
  if axis is None:
    return scores
  parts = jnp.moveaxis(shards.gathered(scores, axis), 0, -2)
  return parts.reshape(*parts.shape[:-2], -1)[..., :codes]


def code_vectors(
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B D"]:
  """The vector of each token's code, in `dtype`; by default in that of the codebook.

  nan for a token outside [0, V), and for one whose code is not in [0, K). Over `vocab_axis` the
  codes are spread, and the table over its tokens. Source: VQ-Logits, Section 6, c_M(i).
  """
  known, token = in_vocabulary(tokens, assignment.shape[0])
  codes = codebook.shape[0]

  def body(rows, token):
    codebook, assignment = rows
    exists, code = in_vocabulary(shards.looked_up(assignment, token, vocab_axis), codes)
    return exists, shards.looked_up(codebook, code, vocab_axis, jnp.dtype(dtype or codebook.dtype))

  rows = shards.Padded(codebook, 0), shards.Padded(assignment, NO_CODE)
  exists, vectors = shards.over_vocabulary(vocab_axis, body, rows, token)
  return jnp.where((known & exists)[..., None], vectors, jnp.nan)


def draw_within(
  key: PRNGKeyArray,
  code: Int[Array, "*B"],
  assignment: Int[Array, "V"],
  codes: int,
  bias: Float[Array, "V"] | None = None,
  vocab_axis: str | None = None,
) -> Int[Array, "*B"]:
  """A token on the given code with probability proportional to exp(bias), uniform without bias.

  The tokens of each row's code are visited 128 at a time, up to the largest code drawn. Inside of
  `vocab_axis` each device draws among its own tokens, and the device by its mass of the code.
  """
  axis = shards.inside(vocab_axis)
  if axis is None:
    return _draw_here(key, code, assignment, codes, bias)
  key = jax.random.fold_in(shards.varying(key, axis), lax.axis_index(axis))
  device_key, token_key = jax.random.split(key)
  mass = log_mass(assignment, codes, bias)[code]
  token = _draw_here(token_key, code, assignment, codes, bias)
  token = token + shards.first_row(axis, assignment.shape[0])
  return ranking.winner(mass + sampling.gumbel(device_key, code.shape), token, axis)


def _draw_here(key, code, assignment, codes, bias):
  order_V = jnp.argsort(assignment)
  count_K = jax.ops.segment_sum(jnp.ones_like(assignment), assignment, codes)
  first_K = jnp.cumsum(count_K) - count_K
  first, count = first_K[code], count_K[code]
  if bias is None:
    place = jax.random.randint(key, code.shape, 0, jnp.maximum(count, 1))
    return order_V.at[first + place].get(mode="clip").astype(jnp.int32)

  def visit(carry):
    step, best, chosen = carry
    place_W = step * 128 + jnp.arange(128, dtype=jnp.int32)
    token_BW = order_V.at[first[..., None] + place_W].get(mode="clip")
    noise_BW = sampling.gumbel(jax.random.fold_in(key, step), token_BW.shape)
    score_BW = jnp.where(place_W < count[..., None], bias[token_BW] + noise_BW, -jnp.inf)
    winner = jnp.argmax(score_BW, axis=-1)[..., None]
    top = jnp.take_along_axis(score_BW, winner, axis=-1)[..., 0]
    token = jnp.take_along_axis(token_BW, winner, axis=-1)[..., 0].astype(jnp.int32)
    return step + 1, jnp.maximum(best, top), jnp.where(top > best, token, chosen)

  start = (
    jnp.int32(0),
    jnp.full(code.shape, -jnp.inf, jnp.float32),
    jnp.full(code.shape, -1, jnp.int32),
  )
  start, *_ = shards.varying((start, key, first, order_V, bias))
  return lax.while_loop(lambda carry: carry[0] * 128 < count.max(initial=0), visit, start)[2]
