"""Exact arg max, top-k and draws from a first pass over 8-bit rows, with a proof.

A row w, less a mean row m, and a hidden vector h are rotated by the same orthogonal matrix R, which
leaves their product as it is and spreads out their largest entries. Both are then rounded to 8-bit
integers: R(w - m) is about s q, and Rh about t c. So

  |w · h - m · h - s t (q · c)| <= |R(w - m) - s q| |h| + |s q| |Rh - t c|.

The first pass computes q · c in integers, without any rounding, from a quarter of the bytes of
float32, and adds this bound. The rows of the highest bounds are scored again, exactly. Where the
k-th of their scores lies above all other bounds, no other row can be among the k best; where it
does not, all rows are scored.

R is a Hadamard matrix on each block of dimensions, H with entries 1 and -1, over the root of their
number b. It is left out of the arrays: they are of H, and 1 / b, a power of two, is exact.
"""

# A call of `best`, for one hidden vector:
#
#   bounds      integer products of all rows, each with its margin: score <= bound         [V]
#   _highest    the `budget` + 1 highest bounds
#   score_of    exact scores of `budget` of them, and lower bounds, which detect foreign rows
#   certain?    the k-th exact score is above the next bound: no other row can be among the k best
#   else        all rows are scored, in the branch of a `cond` that runs where needed
#
# Errors of float32 are part of the margin, with factors for their number and 1.0001 for its own.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from vqjax.ops import device, narrow, sampling, topk, vocab_parallel
from vqjax.types import MeshAxes

__all__ = ["Best", "best"]

# Largest 8-bit integer of a row and of a hidden vector.
_LEVELS = 127

# Largest number of dimensions that are rotated together.
_BLOCK = 128

# Relative error of a float32 operation.
_ROUNDING = 2.0**-24


class Int8Rows(NamedTuple):
  """A weight [V, D] in 8-bit integers: `mean`, and `scale[v] * codes[v]` rotated back.

  Attributes:
    codes: the integers.
    scale: the step of each row.
    error: an upper bound of each row's distance from the weight, roundings of scores included; inf
      where nothing is known of the row.
    length: an upper bound of each row's own length.
    mean: the mean row.
  """

  codes: Int8[Array, "V D"]
  scale: Float[Array, "V"]
  error: Float[Array, "V"]
  length: Float[Array, "V"]
  mean: Float[Array, "D"]


def int8_rows(weight: Float[Array, "V D"]) -> Int8Rows:
  """The nearest 8-bit rows of a weight, and how far they are from it.

  The mean row is taken out first: it changes the scores of all rows alike, and a smaller rest has a
  smaller error.
  """
  dim = weight.shape[1]
  mean_D = weight.astype(jnp.float32).mean(axis=0)

  def part(row_D):
    rest_D = row_D.astype(jnp.float32) - mean_D
    turned_D = _rotated(rest_D)
    # A row that holds nan has error nan, of which no comparison is true: it is never certain.
    scale = jnp.abs(turned_D).max() / _LEVELS
    code_D = jnp.round(turned_D / jnp.where(scale > 0, scale, 1.0))
    rest = jnp.linalg.norm(rest_D)
    # The norm of what is rotated by H is larger by the root of a block.
    off, length = (
      jnp.linalg.norm(x) / _block(dim) ** 0.5
      for x in (
        turned_D - scale * code_D,
        scale * code_D,
      )
    )
    # Sums of D products round D times, here and where rows are scored exactly; so does the norm.
    size = rest + 2 * jnp.linalg.norm(mean_D)
    error = off + _turning(dim) * rest + 2 * (dim + 8) * _ROUNDING * size
    return code_D.astype(jnp.int8), scale, error * 1.0001, length * 1.0001

  return Int8Rows(*lax.map(part, weight, batch_size=min(weight.shape[0], 4096)), mean_D)


def _block(dim):
  """Number of dimensions of a block: the largest power of two that divides `dim`, or `_BLOCK`."""
  return min(dim & -dim, _BLOCK)


def _rotated(x):
  """Vectors [*B, D] times the Hadamard matrix of each block."""
  size = _block(x.shape[-1])
  # The entry of rows i and j is the parity of the bits that they share.
  sign = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
  # The default of a TPU would round the vectors to bfloat16.
  turned = jnp.matmul(blocks, sign.astype(np.float32), precision=lax.Precision.HIGHEST)
  return turned.reshape(x.shape)


def _turning(dim):
  """Relative error of a rotated vector's length: each entry is a sum over a block."""
  return 2 * _block(dim) ** 1.5 * _ROUNDING


def bounds(
  hidden: Float[Array, "*B D"],
  rows: Int8Rows,
  vocab: int,
  finish: Callable[[Float[Array, "W *B"], Callable], Float[Array, "W *B"]],
  vocab_axis: MeshAxes | None = None,
) -> sampling.Blocks:
  """Upper bounds of the scores weight · hidden, finished, a block of the vocabulary at a time.

  Args:
    hidden: the vectors, in the dtype in which they meet the weight.
    rows: the 8-bit rows; inside of a `shard_map` over `vocab_axis` the device's own ones.
    vocab: number of tokens on all devices.
    finish: (products of a block, `cut`) -> scores, not decreasing in the products, such as the
      addition of `cut(bias)` and a cap.
    vocab_axis: mesh axis over which the rows are sharded, or a tuple of several.
  """
  batch, dim = hidden.shape[:-1], hidden.shape[-1]
  own = _rounded(hidden, rows)
  spread = lambda row_W: row_W.reshape(-1, *[1] * len(batch))

  def above(cut):
    code_WD, *of_rows = cut((rows.codes, rows.scale, rows.error, rows.length))
    scale_W1, error_W1, length_W1 = map(spread, of_rows)
    score_WB = narrow.int8_product(code_WD, own.code).astype(jnp.float32) * (own.step / _block(dim))
    margin_WB = _margin(error_W1, length_W1, own.length, own.rest)
    bound_WB = finish(score_WB * scale_W1 + own.common + margin_WB, cut)
    # A nan is a bound that is not known.
    return jnp.where(jnp.isnan(bound_WB), jnp.inf, bound_WB)

  # Whole where it can be stored: a loop would read its part of the rows once more to copy it.
  count = rows.codes.shape[0]
  whole = count if count * math.prod(batch) <= device.current().stored else None
  return sampling.row_blocks(batch, count, vocab, above, vocab_axis, whole)


def lower(
  hidden: Float[Array, "*B D"], rows: Int8Rows, own: Int[Array, "*B n"]
) -> Float[Array, "*B n"]:
  """Lower bounds of the products of hidden vectors and some of the device's own rows."""
  of = _rounded(hidden, rows)
  code_BnD = rows.codes[own].astype(jnp.int32)
  product_Bn = (code_BnD * of.code[..., None, :].astype(jnp.int32)).sum(axis=-1)
  step_B1, common_B1, length_B1, rest_B1 = (
    x[..., None] for x in (of.step, of.common, of.length, of.rest)
  )
  score_Bn = product_Bn.astype(jnp.float32) * (step_B1 / _block(hidden.shape[-1]))
  margin_Bn = _margin(rows.error[own], rows.length[own], length_B1, rest_B1)
  return score_Bn * rows.scale[own] + common_B1 - margin_Bn


class _Rounded(NamedTuple):
  """Hidden vectors as 8-bit integers.

  Attributes:
    code: the integers.
    step: their step.
    length: the length of the vectors.
    rest: an upper bound of their distance from the integers, roundings of products included.
    common: their products with the mean row.
  """

  code: Int8[Array, "*B D"]
  step: Float[Array, "*B"]
  length: Float[Array, "*B"]
  rest: Float[Array, "*B"]
  common: Float[Array, "*B"]


def _rounded(hidden, rows):
  hidden = hidden.astype(jnp.float32)
  dim = hidden.shape[-1]
  length_B = jnp.linalg.norm(hidden, axis=-1)
  turned_BD = _rotated(hidden)
  step_B = jnp.abs(turned_BD).max(axis=-1) / _LEVELS
  step_B1 = step_B[..., None]
  code_BD = jnp.round(turned_BD / jnp.where(step_B1 > 0, step_B1, 1.0))
  rest_B = jnp.linalg.norm(turned_BD - step_B1 * code_BD, axis=-1) / _block(dim) ** 0.5
  # Besides, the products of steps and integers round a few times.
  rest_B = (rest_B + (_turning(dim) + (dim + 16) * _ROUNDING) * length_B) * 1.0001
  common_B = (hidden * rows.mean).sum(axis=-1)
  return _Rounded(code_BD.astype(jnp.int8), step_B, length_B, rest_B, common_B)


def _margin(error, length, hidden_length, hidden_rest):
  """How far a product may be from that of the integers."""
  # 0 · inf is nan, of which no comparison is true.
  return jnp.where(error == jnp.inf, jnp.inf, error * hidden_length + length * hidden_rest)


def pays(vectors: int) -> bool:
  """Whether a first pass for so many vectors takes less time than the scores of all rows."""
  return vectors <= narrow.FEW or vocab_parallel.platform() != "cpu"


class Best(NamedTuple):
  """The k best rows, and what it took to be certain of them.

  Attributes:
    scores: their exact scores, best first; -inf where fewer have one.
    tokens: their tokens; -1 where fewer have a score.
    survivors: rows whose bound is not below the k-th best score: those that the first pass left in
      doubt, the k best included. At most `budget` + 1 are counted on each device.
    certain: whether the survivors were at most the budget, and the scores of the rows of the
      highest bounds within their bounds; where not, all rows were scored.
  """

  scores: Float[Array, "*B k"]
  tokens: Int[Array, "*B k"]
  survivors: Int[Array, "*B"]
  certain: Array


def best(
  upper: sampling.Blocks,
  exact: Callable[[], sampling.Blocks],
  score_of: Callable[[Int[Array, "*B n"]], tuple[Float[Array, "*B n"], Float[Array, "*B n"]]],
  k: int,
  budget: int,
) -> Best:
  """The k highest exact scores.

  Rows that are scored again tell of 8-bit rows that are not those of the weight: their scores lie
  outside of their bounds.

  Args:
    upper: a bound of each score.
    exact: returns the scores. It is called in a branch that runs where the bounds decide nothing
      for a row of the batch: blocks may begin with a product of all rows.
    score_of: the exact scores of tokens of the device's own rows, and lower bounds of these by the
      first pass.
    k: number of rows.
    budget: number of rows on each device that are scored again, at least k.
  """
  axis = upper.axis
  # One more than are scored again: its bound is above those of all rows that are not.
  bound = _highest(upper, budget + 1)
  candidate_Bn = bound.tokens[..., :budget]
  score_Bn, lower_Bn = score_of(jnp.maximum(candidate_Bn, 0))
  is_within_Bn = (lower_Bn <= score_Bn) & (score_Bn <= bound.scores[..., :budget])
  wrong_B = ((candidate_Bn >= 0) & ~is_within_Bn).any(axis=-1)
  score_Bn = jnp.where(candidate_Bn < 0, -jnp.inf, score_Bn)
  own = _in_order(score_Bn, candidate_Bn, k)
  found = topk.across_devices(own, axis)
  least_B, rest_B = found.scores[..., -1], bound.scores[..., budget]
  survivors_B = (bound.scores >= least_B[..., None]).sum(axis=-1, dtype=jnp.int32)
  if axis:
    rest_B, survivors_B = lax.pmax(rest_B, axis), lax.psum(survivors_B, axis)
    wrong_B = lax.psum(wrong_B.astype(jnp.int32), axis) > 0
  # Strictly, so that rows of equal scores come in the order of their numbers. -inf has no rival.
  certain_B = ((least_B > rest_B) | jnp.isneginf(rest_B)) & ~wrong_B

  def all_rows(_):
    return topk.TopK(*sampling.best(exact(), k, normalizer=False)[:2])

  found = lax.cond(certain_B.all(), lambda found: found, all_rows, found)
  return Best(found.scores, found.tokens, survivors_B, certain_B)


def _highest(blocks, k):
  """The k highest of a device's own bounds."""
  top = topk.empty(blocks.batch, k)

  def step(top, index):
    bound_WB, token_W = blocks.block(index)
    return topk.merge_rows(top, bound_WB, token_W)

  if blocks.count == 1:
    # The barrier keeps what reads the bounds from computing them again.
    bound_VB, token_V = blocks.block(jnp.zeros((), jnp.int32))
    bound_VB = lax.optimization_barrier(bound_VB)
    blocks = sampling.Blocks(1, lambda _: (bound_VB, token_V), blocks.batch)
    size = topk.chunk_size(len(token_V), k)
    if len(token_V) % size == 0 and size > 1 and vocab_parallel.token_shards(None).count == 1:
      return _highest_of_strides(bound_VB, token_V, k, size)
  return blocks.fold(step, top)


def _highest_of_strides(bound_VB, token_V, k, size):
  """The k highest, from the k chunks of the highest maxima, each of every C-th bound.

  Chunks of consecutive bounds would be reduced across the lanes of a TPU, in more time than the
  product takes. Equal bounds may come in any order.
  """
  count = len(token_V) // size
  maxima_CB = bound_VB.reshape(size, count, *bound_VB.shape[1:]).max(axis=0)
  _, chunk_Bk = lax.top_k(jnp.moveaxis(maxima_CB, 0, -1), k)
  index_Bks = chunk_Bk[..., None] + count * jnp.arange(size, dtype=jnp.int32)
  index_nB = jnp.moveaxis(index_Bks.reshape(*chunk_Bk.shape[:-1], k * size), -1, 0)
  bound_nB = jnp.take_along_axis(bound_VB, index_nB, axis=0)
  bound_Bk, at_Bk = lax.top_k(jnp.moveaxis(bound_nB, 0, -1), k)
  token_Bk = token_V[jnp.take_along_axis(jnp.moveaxis(index_nB, 0, -1), at_Bk, axis=-1)]
  return topk.TopK(bound_Bk, jnp.where(jnp.isneginf(bound_Bk), -1, token_Bk).astype(jnp.int32))


def _in_order(scores, tokens, k):
  """The k highest scores; of equal ones those of lower tokens first."""
  order = jnp.argsort(tokens, axis=-1)
  score_Bn, token_Bn = (jnp.take_along_axis(x, order, axis=-1) for x in (scores, tokens))
  return topk.merge(topk.empty(scores.shape[:-1], k), score_Bn, token_Bn)
