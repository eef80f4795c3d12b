"""Distribution over a vocabulary whose tokens share the scores of codes.

Every token v has one code c(v); its score is hidden · codebook[c(v)] + b_v. Then

  p(v) = p(code c(v)) · p(v | code),   p(v | code) = exp(b_v) / sum of exp(b_u) over u on the code,

so the normaliser is that of a softmax over K codes, each with its log-mass as bias. It is exact and
needs no array of the vocabulary's size for each token. Without a bias the mass of a code is the
number of its tokens. Source: VQ-Logits, Eq. 2-5, without the [*B, V] gather of Eq. 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import sampling, softmax, symbolic, topk, vocab_parallel
from vqjax.ops.scores import exp_shift
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, MeshAxes

__all__ = ["CodeSoftmax", "code_softmax"]

# Code of the padding of an assignment, above those of any codebook.
NO_CODE = 2**30

# Largest number of masses (16 MiB), of codes in blocks of the vocabulary, that a draw stores.
BLOCK_MASSES = 2**22


def log_mass(
  assignment: Int[Array, "V"],
  codes: int,
  bias: Float[Array, "V"] | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "{codes}"]:
  """Log-mass of each code: log sum of exp(bias) over its tokens.

  Without a bias the mass is the number of tokens. A code without tokens has -inf, which removes it
  from the distribution. Inside of `vocab_axis` the tokens of all devices are summed.
  """
  axis = vocab_parallel.inside(vocab_axis)
  share_V, shift_K = _shares(assignment, codes, bias, axis)
  sum_K = jax.ops.segment_sum(share_V, assignment, codes)
  sum_K = lax.psum(sum_K, axis) if axis else sum_K
  # Two `where`: the derivative of log 0 is infinite, and infinite times 0 is nan.
  empty_K = sum_K == 0
  return jnp.where(empty_K, -jnp.inf, jnp.log(jnp.where(empty_K, 1.0, sum_K)) + shift_K)


def _shares(assignment, codes, bias, axis):
  """exp(bias - the largest of its code) [V], and the largest of each code [K]."""
  if bias is None:
    return jnp.ones(assignment.shape, jnp.float32), jnp.zeros((codes,), jnp.float32)
  bias_V = bias.astype(jnp.float32)
  # The log-mass does not depend on the shift, so that no gradient has to pass through it.
  top_K = jax.ops.segment_max(jax.lax.stop_gradient(bias_V), assignment, codes)
  top_K = lax.pmax(top_K, axis) if axis else top_K
  shift_K = exp_shift(top_K)
  return jnp.exp(bias_V - shift_K[assignment]), shift_K


class CodeSoftmax(NamedTuple):
  """Statistics of each token's distribution over the vocabulary, float32, in nats.

  Attributes:
    log_prob: log-probability of the token.
    log_z: log-normaliser, log sum_v exp(score_v).
    mean_log_prob: mean of log p_v over the vocabulary, without the tokens that a bias of -inf
      removes: the term of label smoothing. Or None.
  """

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]
  mean_log_prob: Float[Array, "*B"] | None


@vocab_parallel.for_any_axes("hidden")
@symbolic.for_any_batch("hidden")
def code_softmax(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  temperature: float | int = 1.0,
  mean: bool = False,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> CodeSoftmax:
  """Statistics of `tokens` under softmax(hidden · codebook[assignment]ᵀ + bias).

  This takes O(N·K·D) time, O(V) once for the mass of the codes, and no array of N·V elements. A
  token outside [0, V), or with a code outside [0, K), has a log-probability of nan.

  Args:
    hidden: one vector for each token.
    codebook: the vector of each code.
    assignment: the code of each token of the vocabulary.
    tokens: indices into the vocabulary.
    bias: a score of each token of the vocabulary; -inf removes it.
    temperature: divides the scores, as in `linear_softmax`.
    mean: whether to compute the mean log-probability, hidden · (mean row) + (mean bias) - log Z,
      where the mean row weights each code by the number of its tokens.
    dtype: dtype of the matrix product's operands, as in `linear_softmax`.
    vocab_axis: mesh axis over which the codebook is sharded by codes, and `assignment` and `bias`
      by tokens of the vocabulary.
  """
  vocab = vocab_parallel.rows_in_all(vocab_axis, assignment.shape[0])
  valid, token = in_vocabulary(tokens, vocab)

  def body(rows, hidden, token):
    codebook, assignment, bias = rows
    codes = codebook.shape[0]
    if bias is not None and temperature != 1:
      bias = bias.astype(jnp.float32) / temperature
    mass_K = log_mass(assignment, vocab_parallel.rows_in_all(vocab_axis, codes), bias, vocab_axis)
    # The assignment may be stored in a narrow integer type, in which row arithmetic would overflow.
    code = vocab_parallel.sharded_lookup(assignment, token, vocab_axis).astype(jnp.int32)
    # With the log-mass m_k as its bias, a softmax over K codes has the normaliser of all V tokens:
    # sum_v exp(score_v) = sum_k exp(hidden · codebook_k + m_k).
    of_code = softmax.linear_softmax(
      hidden,
      codebook,
      code,
      # A temperature divides the scores of the codes, not the masses of the tokens on them.
      vocab_parallel.own_part(mass_K, codes, vocab_axis) * temperature,
      temperature=temperature,
      dtype=dtype,
      vocab_axis=vocab_axis,
    )
    bias_B = 0.0
    if bias is not None:
      bias_B = vocab_parallel.sharded_lookup(bias, token, vocab_axis).astype(jnp.float32)
    mass_B = vocab_parallel.gather(mass_K, code)
    # If all tokens of a code have bias -inf, both are -inf and their difference would be nan.
    within = jnp.where(jnp.isneginf(mass_B), 0.0, bias_B - mass_B)
    mean_B = None
    if mean:
      # Of the scores, whose bias is divided already.
      sharp = hidden.astype(jnp.float32) / temperature
      mean_B = _mean_score(sharp, codebook, assignment, bias, vocab_axis) - of_code.log_z
    return CodeSoftmax(of_code.log_prob + within, of_code.log_z, mean_B)

  rows = (
    vocab_parallel.Sharded(codebook, 0),
    vocab_parallel.Sharded(assignment, NO_CODE),
    vocab_parallel.Sharded(bias, 0),
  )
  stats = vocab_parallel.over_vocabulary(vocab_axis, body, rows, hidden, token)
  return stats._replace(log_prob=jnp.where(valid, stats.log_prob, jnp.nan))


def _mean_score(hidden, codebook, assignment, bias, axis):
  """Mean score of the tokens of the vocabulary that no bias of -inf removes."""
  axis = vocab_parallel.inside(axis)
  # Counts times the codebook, instead of a mean over [V, D] rows.
  in_all = lambda x: lax.psum(vocab_parallel.varying(x, axis), axis) if axis else x
  codes = codebook.shape[0]
  kept_V = assignment < vocab_parallel.rows_in_all(axis, codes)
  kept_V = kept_V if bias is None else kept_V & ~jnp.isneginf(bias)
  ones_V = kept_V.astype(jnp.float32)
  count_K = jax.ops.segment_sum(ones_V, assignment, vocab_parallel.rows_in_all(axis, codes))
  own_K = vocab_parallel.own_part(in_all(count_K), codes, axis)
  sum_D = in_all(own_K @ codebook.astype(jnp.float32))
  bias_sum = 0.0 if bias is None else jnp.where(kept_V, bias, 0.0).sum(dtype=jnp.float32)
  total = hidden.astype(jnp.float32) @ sum_D + (bias_sum if bias is None else in_all(bias_sum))
  return total / in_all(ones_V.sum())


def all_code_scores(
  hidden: Float[Array, "*B D"],
  codebook: Float[Array, "k D"],
  codes: int,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B {codes}"]:
  """Scores hidden · codebookᵀ of all codes, float32, on all devices."""
  scores = softmax.linear_scores(hidden, codebook, dtype=dtype)
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return scores
  score_BAk = jnp.moveaxis(vocab_parallel.gathered(scores, axis), 0, -2)
  # The last device's padding has no code.
  return score_BAk.reshape(*score_BAk.shape[:-2], -1)[..., :codes]


def token_scores(
  code_scores: Float[Array, "K *B"], code: Integer[Array, "W"], bias: Float[Array, "W"] | None
) -> Float[Array, "W *B"]:
  """Scores of tokens from those of their codes, vocabulary first."""
  scores = _with_missing(code_scores)[_known_code(code, code_scores.shape[0])]
  return scores if bias is None else scores + _column(bias, scores.ndim)


def _with_missing(code_scores):
  """The scores of the codes, and a row of nan: the score of a code that does not exist."""
  missing = jnp.full((1, *code_scores.shape[1:]), jnp.nan, code_scores.dtype)
  return jnp.concatenate([code_scores, missing])


def _known_code(code, codes):
  return jnp.where((code >= 0) & (code < codes), code, codes).astype(jnp.int32)


def _column(bias, rank):
  return bias.astype(jnp.float32).reshape(-1, *[1] * (rank - 1))


def best_tokens(
  code_scores: Float[Array, "K *B"],
  assignment: Int[Array, "V"],
  bias: Float[Array, "V"] | None,
  vocab: int,
  k: int,
  vocab_axis: MeshAxes | None = None,
) -> topk.TopK:
  """The k highest of the tokens' scores, which are never all in memory.

  The tokens are divided into chunks. A loop over the places in a chunk keeps the maxima of all
  chunks, and the tokens of the k highest chunks are scored again. Ties come in the order of the
  tokens. Inside of `vocab_axis` assignment and bias are the device's own rows.
  """
  axis, rows = vocab_parallel.inside(vocab_axis), assignment.shape[0]
  first = vocab_parallel.first_row(axis, rows)
  table_KB = _with_missing(code_scores)
  batch = code_scores.shape[1:]
  here = min(k, rows)
  size = topk.chunk_size(rows, here)
  chunks = -(-rows // size)
  # Padding has a bias of -inf, without which it would be a token of code 0.
  padded = lambda x, fill: jnp.pad(x, (0, chunks * size - rows), constant_values=fill)
  row_V = first + jnp.arange(rows, dtype=jnp.int32)
  bias_V = jnp.zeros((rows,), jnp.float32) if bias is None else bias.astype(jnp.float32)
  bias_N = padded(jnp.where(row_V < vocab, bias_V, -jnp.inf), -jnp.inf)
  code = _known_code(assignment, code_scores.shape[0])
  # A row that pads a device's part has no code, and nan is above every score.
  code_N = padded(jnp.where(row_V < vocab, code, 0), 0)

  def step(top_CB, place):
    code_C, bias_C = place
    return jnp.maximum(top_CB, table_KB[code_C] + _column(bias_C, table_KB.ndim)), None

  places = tuple(x.reshape(chunks, size).T for x in (code_N, bias_N))
  lowest = jnp.full((chunks, *batch), -jnp.inf, jnp.float32)
  lowest = vocab_parallel.varying((lowest, table_KB, *places))[0]
  top_CB = lax.scan(step, lowest, places)[0]

  def score_at(row_Bn):
    """Scores of each batch element's own rows."""
    score_BK = jnp.moveaxis(table_KB, 0, -1)
    return jnp.take_along_axis(score_BK, code_N[row_Bn], axis=-1) + bias_N[row_Bn]

  best = topk.of_chunks(jnp.moveaxis(top_CB, 0, -1), here, size, score_at)
  empty = vocab_parallel.varying((topk.empty(batch, k), best))[0]
  return topk.across_devices(topk.merge(empty, best.scores, first + best.tokens), axis)


@vocab_parallel.for_any_axes("tokens")
@symbolic.for_any_batch("tokens")
def code_vectors(
  codebook: Float[Array, "K D"],
  assignment: Int[Array, "V"],
  tokens: Integer[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B D"]:
  """Vector of each token's code, in `dtype` or in the dtype of the codebook.

  The vector is nan for a token outside [0, V), and for one with a code outside [0, K). Over
  `vocab_axis` the codebook is sharded by codes and the assignment by tokens. Source: VQ-Logits,
  Section 6, c_M(i).
  """
  in_all = lambda table: vocab_parallel.rows_in_all(vocab_axis, table.shape[0])
  valid, token = in_vocabulary(tokens, in_all(assignment))
  codes = in_all(codebook)

  def body(rows, token):
    codebook, assignment = rows
    exists, code = in_vocabulary(
      vocab_parallel.sharded_lookup(assignment, token, vocab_axis), codes
    )
    return exists, vocab_parallel.sharded_lookup(
      codebook, code, vocab_axis, jnp.dtype(dtype or codebook.dtype)
    )

  rows = vocab_parallel.Sharded(codebook, 0), vocab_parallel.Sharded(assignment, NO_CODE)
  exists, vectors = vocab_parallel.over_vocabulary(vocab_axis, body, rows, token)
  return jnp.where((valid & exists)[..., None], vectors, jnp.nan)


def draw_within(
  key: PRNGKeyArray,
  code: Int[Array, "*B"],
  assignment: Int[Array, "V"],
  codes: int,
  bias: Float[Array, "V"] | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Int[Array, "*B"]:
  """A token of the given code, drawn in proportion to exp(bias).

  A block of consecutive tokens is drawn first, by the mass of the code in it, then a token of the
  block: O(V) time once and O(sqrt V) for each row. Without a bias the draw is uniform. The token is
  -1 for a code without tokens, or whose tokens all have bias -inf. Inside of `vocab_axis` each
  device draws among its own tokens, and a device is drawn by its mass of the code.
  """
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return _draw_locally(key, code, assignment, codes, bias)[1]
  # Each device needs noise of its own.
  key = jax.random.fold_in(vocab_parallel.varying(key, axis), lax.axis_index(axis))
  device_key, token_key = jax.random.split(key)
  mass, token = _draw_locally(token_key, code, assignment, codes, bias)
  token = token + vocab_parallel.first_row(axis, assignment.shape[0])
  return topk.winner(mass + sampling.gumbel(device_key, code.shape), token, axis)


def _draw_locally(key, code, assignment, codes, bias):
  """Log-mass of each row's code on this device, and a token drawn from it."""
  block_key, token_key = jax.random.split(key)
  share_V, shift_K = _shares(assignment, codes, bias, None)
  vocab = assignment.shape[0]
  # sqrt V blocks of sqrt V tokens make the two draws equally long; of many codes they are fewer.
  width = -(-vocab // max(1, min(math.isqrt(vocab), BLOCK_MASSES // codes)))
  block_V = jnp.arange(vocab, dtype=jnp.int32) // width
  zero_KJ = jnp.zeros((codes, -(-vocab // width)), jnp.float32)
  # `drop` leaves out the padding, whose code is `NO_CODE`.
  mass_KJ = zero_KJ.at[assignment, block_V].add(share_V, mode="drop")
  log_mass_BJ = jnp.log(mass_KJ[code])
  # log p + Gumbel noise has its maximum at a draw from p.
  block_B = _noisy_arg_max(block_key, log_mass_BJ)
  token_BW = block_B[..., None] * width + jnp.arange(width, dtype=jnp.int32)
  code_BW = assignment.at[token_BW].get(mode="fill", fill_value=NO_CODE)
  bias_BW = 0.0 if bias is None else bias.at[token_BW].get(mode="clip").astype(jnp.float32)
  index_B = _noisy_arg_max(token_key, jnp.where(code_BW == code[..., None], bias_BW, -jnp.inf))
  log_mass_B = jax.nn.logsumexp(log_mass_BJ, axis=-1) + shift_K[code]
  token_B = block_B * width + index_B
  return log_mass_B, jnp.where(jnp.isneginf(log_mass_B), -1, token_B)


def _noisy_arg_max(key, scores):
  return jnp.argmax(scores + sampling.gumbel(key, scores.shape), axis=-1).astype(jnp.int32)
