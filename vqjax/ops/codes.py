"""What distribution do tokens have that share the score of a code?

Every token v sits on one code c(v); its score is hidden · codebook[c(v)] + b_v. Then

  p(v) = p(code c(v)) · p(v | code),   p(v | code) = exp(b_v) / sum of exp(b_u) over u on the code,

so the normaliser is a softmax over K codes whose bias is the log-mass of each code. It needs no
array of the vocabulary's size for each token, and is exact. Without a bias the mass of a code is
the number of its tokens. Source: VQ-Logits, Eq. 2-5, without the [*B, V] gather of Eq. 3.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from vqjax.ops import sampling, softmax, topk, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype

NO_CODE = 2**30
"""The code of a place in a table that stands for no token: more than any codebook has."""

BLOCK_MASSES = 2**22
"""Masses, 16 MiB of them, that a draw may keep of codes in blocks of the vocabulary."""


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
  axis = vocab_parallel.inside(vocab_axis)
  in_all = lambda x: lax.psum(x, axis) if axis else x
  if bias is None:
    ones_V = jnp.ones(assignment.shape, jnp.float32)
    return jnp.log(in_all(jax.ops.segment_sum(ones_V, assignment, codes)))
  share_V, shift_K = _shares(assignment, codes, bias, axis)
  sum_K = in_all(jax.ops.segment_sum(share_V, assignment, codes))
  # log 0 is right for an empty code, but its derivative is not finite: keep it out of the gradient.
  empty_K = sum_K == 0
  return jnp.where(empty_K, -jnp.inf, jnp.log(jnp.where(empty_K, 1.0, sum_K)) + shift_K)


def _shares(assignment, codes, bias, axis):
  """exp(bias) over that of its code's best token [V], and the log of the latter [K]."""
  bias_V = bias.astype(jnp.float32)
  top_K = jax.ops.segment_max(jax.lax.stop_gradient(bias_V), assignment, codes)
  top_K = lax.pmax(top_K, axis) if axis else top_K
  shift_K = jnp.where(jnp.isneginf(top_K), 0.0, top_K)
  return jnp.exp(bias_V - shift_K[assignment]), shift_K


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
    vocab_parallel.Sharded(codebook, 0),
    vocab_parallel.Sharded(assignment, NO_CODE),
    vocab_parallel.Sharded(bias, 0),
  )
  found = vocab_parallel.over_vocabulary(vocab_axis, body, rows, (hidden, token))
  return found._replace(log_prob=jnp.where(known, found.log_prob, jnp.nan))


def _code_softmax(hidden, codebook, assignment, token, bias, mean, dtype, axis):
  codes = codebook.shape[0]
  mass_K = log_mass(assignment, vocab_parallel.rows_in_all(axis, codes), bias, axis)
  code = vocab_parallel.sharded_lookup(assignment, token, axis).astype(jnp.int32)
  found = softmax.linear_softmax(
    hidden,
    codebook,
    code,
    vocab_parallel.own_part(mass_K, codes, axis),
    dtype=dtype,
    vocab_axis=axis,
  )
  bias_B = (
    0.0 if bias is None else vocab_parallel.sharded_lookup(bias, token, axis).astype(jnp.float32)
  )
  mass_B = vocab_parallel.gather(mass_K, code)
  # On a code whose tokens all have bias -inf nothing has a probability, and no share of it.
  within = jnp.where(jnp.isneginf(mass_B), 0.0, bias_B - mass_B)
  mean_B = _mean_score(hidden, codebook, assignment, bias, axis) - found.log_z if mean else None
  return CodeSoftmax(found.log_prob + within, found.log_z, mean_B)


def _mean_score(hidden, codebook, assignment, bias, axis):
  """Mean of a token's scores over the words in the distribution."""
  axis = vocab_parallel.inside(axis)
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
  vocab_axis: str | None = None,
) -> Float[Array, "*B {codes}"]:
  """hidden · codebookᵀ, float32; inside of `vocab_axis` each device computes those of its rows."""
  scores = softmax.linear_scores(hidden, codebook, dtype=dtype)
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return scores
  parts = jnp.moveaxis(vocab_parallel.gathered(scores, axis), 0, -2)
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
    exists, code = in_vocabulary(
      vocab_parallel.sharded_lookup(assignment, token, vocab_axis), codes
    )
    return exists, vocab_parallel.sharded_lookup(
      codebook, code, vocab_axis, jnp.dtype(dtype or codebook.dtype)
    )

  rows = vocab_parallel.Sharded(codebook, 0), vocab_parallel.Sharded(assignment, NO_CODE)
  exists, vectors = vocab_parallel.over_vocabulary(vocab_axis, body, rows, token)
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

  A block of consecutive tokens first, by the mass that the code has in it, then a token of the
  block: O(V) time once and O(sqrt V) for each row. -1 on a code without a token, or whose tokens
  all have bias -inf. Inside of `vocab_axis` each device draws among its own tokens, and the device
  by its mass of the code.
  """
  axis = vocab_parallel.inside(vocab_axis)
  if axis is None:
    return _draw_here(key, code, assignment, codes, bias)[1]
  key = jax.random.fold_in(vocab_parallel.varying(key, axis), lax.axis_index(axis))
  device_key, token_key = jax.random.split(key)
  mass, token = _draw_here(token_key, code, assignment, codes, bias)
  token = token + vocab_parallel.first_row(axis, assignment.shape[0])
  return topk.winner(mass + sampling.gumbel(device_key, code.shape), token, axis)


def _draw_here(key, code, assignment, codes, bias):
  """The log-mass of each row's code among the tokens that are here, and one of them."""
  block_key, token_key = jax.random.split(key)
  if bias is None:
    share_V, shift_K = jnp.ones(assignment.shape, jnp.float32), jnp.zeros((codes,), jnp.float32)
  else:
    share_V, shift_K = _shares(assignment, codes, bias, None)
  width = _block_width(assignment.shape[0], codes)
  log_mass_BJ = jnp.log(_block_mass(share_V, assignment, codes, width)[code])
  block_B = _noisy_arg_max(block_key, log_mass_BJ)
  token_BW = block_B[..., None] * width + jnp.arange(width, dtype=jnp.int32)
  code_BW = assignment.at[token_BW].get(mode="fill", fill_value=NO_CODE)
  bias_BW = 0.0 if bias is None else bias.at[token_BW].get(mode="clip").astype(jnp.float32)
  place_B = _noisy_arg_max(token_key, jnp.where(code_BW == code[..., None], bias_BW, -jnp.inf))
  log_mass_B = jax.nn.logsumexp(log_mass_BJ, axis=-1) + shift_K[code]
  token_B = block_B * width + place_B
  return log_mass_B, jnp.where(jnp.isneginf(log_mass_B), -1, token_B)


def _block_width(vocab: int, codes: int) -> int:
  """Tokens of a block: about sqrt V; more where blocks · codes would pass `BLOCK_MASSES`."""
  blocks = max(1, min(math.isqrt(vocab), BLOCK_MASSES // codes))
  return -(-vocab // blocks)


def _block_mass(share_V, assignment, codes, width):
  """[K, J]: the sum of the shares of each code's tokens in each block."""
  vocab = assignment.shape[0]
  block_V = jnp.arange(vocab, dtype=jnp.int32) // width
  none_KJ = jnp.zeros((codes, -(-vocab // width)), jnp.float32)
  return none_KJ.at[assignment, block_V].add(share_V, mode="drop")


def _noisy_arg_max(key, scores):
  return jnp.argmax(scores + sampling.gumbel(key, scores.shape), axis=-1).astype(jnp.int32)
