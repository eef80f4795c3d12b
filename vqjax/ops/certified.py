"""Exact arg max, top-k and draws from a first pass over 8-bit rows, with a proof.

A row w is stored a second time as 8-bit integers q, so that |w · h - (m + s q) · h| is at most
|w - m - s q| |h|. The first pass computes every row's score from the integers, a quarter of the
bytes of float32, and adds this bound. The rows of the highest bounds are scored again, exactly.
Where the k-th of their scores lies above all other bounds, no other row can be among the k best;
where it does not, all rows are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from vqjax.ops import sampling, topk

LEVELS = 127
"""Largest 8-bit integer of a row."""

ROUNDING = 2.0**-24
"""Relative error of a float32 operation."""


class Int8Rows(NamedTuple):
  """A weight [V, D] in 8-bit integers: row v is about `mean + scale[v] * codes[v]`.

  Attributes:
    codes: the integers.
    scale: the step of each row.
    error: an upper bound of each row's distance from the weight, roundings of scores included; inf
      where nothing is known of the row.
    mean: the mean row.
  """

  codes: Int8[Array, "V D"]
  scale: Float[Array, "V"]
  error: Float[Array, "V"]
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
    # A row that holds nan has error nan, of which no comparison is true: it is never certain.
    scale = jnp.abs(rest_D).max() / LEVELS
    code_D = jnp.round(rest_D / jnp.where(scale > 0, scale, 1.0))
    off = jnp.linalg.norm(rest_D - scale * code_D)
    # Sums of D products round D times, here and where rows are scored exactly; so does the norm.
    size = jnp.linalg.norm(rest_D) + 2 * jnp.linalg.norm(mean_D)
    return code_D.astype(jnp.int8), scale, (off + 2 * (dim + 8) * ROUNDING * size) * 1.0001

  codes, scale, error = lax.map(part, weight, batch_size=min(weight.shape[0], 4096))
  return Int8Rows(codes, scale, error, mean_D)


def bounds(
  hidden: Float[Array, "*B D"],
  rows: Int8Rows,
  vocab: int,
  finish: Callable[[Float[Array, "W *B"], Callable], Float[Array, "W *B"]],
  vocab_axis: str | None = None,
) -> sampling.Blocks:
  """Upper bounds of the scores weight · hidden, finished, a block of the vocabulary at a time.

  Args:
    hidden: the vectors, in the dtype in which they meet the weight.
    rows: the 8-bit rows; inside of a `shard_map` over `vocab_axis` the device's own ones.
    vocab: number of tokens on all devices.
    finish: (products of a block, `cut`) -> scores, not decreasing in the products, such as the
      addition of `cut(bias)` and a cap.
    vocab_axis: mesh axis over which the rows are sharded.
  """
  hidden = hidden.astype(jnp.float32)
  batch = hidden.shape[:-1]
  length_B = jnp.linalg.norm(hidden, axis=-1)
  common_B = (hidden * rows.mean).sum(axis=-1)
  spread = lambda row_W: row_W.reshape(-1, *[1] * len(batch))

  def above(cut):
    code_WD, scale_W, error_W = cut((rows.codes, rows.scale, rows.error))
    axes = ((1,), (hidden.ndim - 1,)), ((), ())
    product_WB = lax.dot_general(code_WD.astype(jnp.float32), hidden, axes)
    # 0 · inf is nan, of which no comparison is true.
    margin_WB = jnp.where(spread(error_W) == jnp.inf, jnp.inf, spread(error_W) * length_B)
    return finish(product_WB * spread(scale_W) + common_B + margin_WB, cut)

  return sampling.row_blocks(batch, rows.codes.shape[0], vocab, above, vocab_axis)


class Best(NamedTuple):
  """The k best rows, and what it took to be certain of them.

  Attributes:
    scores: their exact scores, best first; -inf where fewer have one.
    tokens: their tokens; -1 where fewer have a score.
    survivors: rows whose bound is not below the k-th best score: those that the first pass left in
      doubt, the k best included. At most `budget` + 1 are counted.
    certain: whether the survivors were at most the budget; where not, all rows were scored.
  """

  scores: Float[Array, "*B k"]
  tokens: Int[Array, "*B k"]
  survivors: Int[Array, "*B"]
  certain: Array


def best(
  upper: sampling.Blocks,
  exact: sampling.Blocks,
  score_of: Callable[[Int[Array, "*B n"]], Float[Array, "*B n"]],
  k: int,
  budget: int,
) -> Best:
  """The k highest exact scores.

  Args:
    upper: a bound of each score.
    exact: the scores, which are computed only where the bounds decide nothing for a row of the
      batch.
    score_of: the exact scores of tokens of the device's own rows.
    k: number of rows.
    budget: number of rows on each device that are scored again, at least k.
  """
  axis = upper.axis
  # One more than are scored again: its bound is above those of all rows that are not.
  bound = _highest(upper, budget + 1)
  candidate_Bn = bound.tokens[..., :budget]
  score_Bn = jnp.where(candidate_Bn < 0, -jnp.inf, score_of(jnp.maximum(candidate_Bn, 0)))
  own = _in_order(score_Bn, candidate_Bn, k)
  found = topk.across_devices(own, axis)
  least_B, rest_B = found.scores[..., -1], bound.scores[..., budget]
  survivors_B = (bound.scores >= least_B[..., None]).sum(axis=-1, dtype=jnp.int32)
  if axis:
    rest_B, survivors_B = lax.pmax(rest_B, axis), lax.psum(survivors_B, axis)
  # Strictly, so that rows of equal scores come in the order of their numbers. -inf has no rival.
  certain_B = (least_B > rest_B) | jnp.isneginf(rest_B)

  def all_rows(_):
    return topk.TopK(*sampling.best(exact, k, normalizer=False)[:2])

  found = lax.cond(certain_B.all(), lambda found: found, all_rows, found)
  return Best(found.scores, found.tokens, survivors_B, certain_B)


def _highest(blocks, k):
  """The k highest of a device's own bounds."""
  top = topk.empty(blocks.batch, k)

  def step(top, index):
    bound_WB, token_W = blocks.block(index)
    # A nan is a bound that is not known.
    return topk.merge_rows(top, jnp.where(jnp.isnan(bound_WB), jnp.inf, bound_WB), token_W)

  if blocks.count * blocks.width * math.prod(blocks.batch) <= sampling.STORED_SCORES:
    bound_NWB, token_NW = lax.map(blocks.block, blocks.indices)
    bound_VB = bound_NWB.reshape(blocks.count * blocks.width, *blocks.batch)
    blocks = sampling.Blocks(1, lambda _: (bound_VB, token_NW.reshape(-1)), blocks.batch)
  return blocks.fold(step, top)


def _in_order(scores, tokens, k):
  """The k highest scores; of equal ones those of lower tokens first."""
  order = jnp.argsort(tokens, axis=-1)
  score_Bn, token_Bn = (jnp.take_along_axis(x, order, axis=-1) for x in (scores, tokens))
  return topk.merge(topk.empty(scores.shape[:-1], k), score_Bn, token_Bn)
