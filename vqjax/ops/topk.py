"""The k highest scores, merged over blocks of the vocabulary and over devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from vqjax.ops import vocab_parallel
from vqjax.types import MeshAxes, Shape

__all__ = []


class TopK(NamedTuple):
  """The k highest scores, descending, and their tokens; -inf and -1 if empty."""

  scores: Float[Array, "*B k"]
  tokens: Int[Array, "*B k"]


def empty(batch: Shape, k: int) -> TopK:
  """A top-k list of empty entries: the start of a loop that calls `merge`."""
  return TopK(jnp.full((*batch, k), -jnp.inf, jnp.float32), jnp.full((*batch, k), -1, jnp.int32))


def merge(top: TopK, scores: Float[Array, "*B W"], tokens: Int[Array, "*#B W"]) -> TopK:
  """The top k of a list and a block of W scores; earlier scores win ties."""
  token_BW = jnp.where(jnp.isneginf(scores), -1, tokens).astype(jnp.int32)
  # The block is cut to k first: `top_k` over k + W scores would be twice as wide where W is near k.
  score_Bk, index_Bk = _highest(scores, min(top.scores.shape[-1], scores.shape[-1]))
  return _joined(top, TopK(score_Bk, jnp.take_along_axis(token_BW, index_Bk, axis=-1)))


def _joined(first, second):
  """The best of two lists, as many as the first has."""
  # The first precedes the second, and `lax.top_k` is stable, so that earlier scores win ties.
  score_Bn, token_Bn = (jnp.concatenate(pair, axis=-1) for pair in zip(first, second))
  score_Bk, index_Bk = _highest(score_Bn, first.scores.shape[-1])
  return TopK(score_Bk, jnp.take_along_axis(token_Bn, index_Bk, axis=-1))


def across_devices(top: TopK, axis: MeshAxes | None) -> TopK:
  """The top k over all devices of a manual mesh axis, equal on all of them.

  Each device sends its k candidates, not the scores they were selected from. Outside of the axis
  the list is returned as it is.
  """
  if vocab_parallel.inside(axis) is None:
    return top
  score_BAk, token_BAk = (jnp.moveaxis(vocab_parallel.gathered(x, axis), 0, -2) for x in top)
  flat = (*score_BAk.shape[:-2], -1)
  score_Bk, index_Bk = _highest(score_BAk.reshape(flat), top.scores.shape[-1])
  return TopK(score_Bk, jnp.take_along_axis(token_BAk.reshape(flat), index_Bk, axis=-1))


def winner(
  score: Float[Array, "*B"], token: Int[Array, "*B"], axis: MeshAxes | None
) -> Int[Array, "*B"]:
  """The token of the device with the highest score; the token outside of `axis`."""
  return across_devices(TopK(score[..., None], token[..., None]), axis).tokens[..., 0]


def chunk_size(width: int, k: int) -> int:
  """Width of the chunks by whose maxima k of `width` scores are selected; 1 for none."""
  # The maxima and the k·size candidates are together fewest where both are equally many. A power of
  # two divides the width of most blocks.
  size = 2 ** (math.isqrt(max(1, width // max(k, 1))).bit_length() - 1)
  return size if size >= 8 else 1


def _chunk_maxima(scores: Float[Array, "*W"], size: int, axis: int) -> Float[Array, "*C"]:
  """The highest score of each chunk along an axis; the last chunk may be shorter."""
  return _by_chunk(jnp.max, lax.max, -jnp.inf, scores, size, axis)


def chunk_sums(scores: Float[Array, "*W"], size: int, axis: int) -> Float[Array, "*C"]:
  """The sum of each chunk along an axis; the last chunk may be shorter."""
  return _by_chunk(jnp.sum, lax.add, 0.0, scores, size, axis)


def _by_chunk(reduce, combine, start, scores, size, axis):
  width = scores.shape[axis]
  if width % size == 0:
    shape = *scores.shape[:axis], width // size, size, *scores.shape[axis + 1 :]
    return reduce(scores.reshape(shape), axis=axis + 1)
  # A window may reach beyond the end; to cut or pad the scores would copy them.
  window, padding = [1] * scores.ndim, [(0, 0)] * scores.ndim
  window[axis], padding[axis] = size, (0, -width % size)
  start = jnp.asarray(start, scores.dtype)
  return lax.reduce_window(scores, start, combine, window, window, padding)


def merge_rows(top: TopK, scores: Float[Array, "W *B"], tokens: Int[Array, "W"]) -> TopK:
  """`merge` of scores whose first axis is the vocabulary."""
  width, k = scores.shape[0], top.scores.shape[-1]
  size = chunk_size(width, k)
  if size == 1 or vocab_parallel.token_shards(None).count > 1:
    return merge(top, jnp.moveaxis(scores, 0, -1), tokens)
  maxima_CB = _chunk_maxima(scores, size, axis=0)
  score_at = lambda index_Bn: _rows_at(scores, index_Bn)
  best = of_chunks(jnp.moveaxis(maxima_CB, 0, -1), k, size, score_at, width)
  found_Bk = jnp.where(jnp.isneginf(best.scores), -1, tokens[best.tokens]).astype(jnp.int32)
  return _joined(top, TopK(best.scores, found_Bk))


def _rows_at(scores_WB, index_Bn):
  """Each column's own entries: [W, *B] at [*B, n] -> [*B, n]."""
  index_nB = jnp.moveaxis(index_Bn, -1, 0)
  return jnp.moveaxis(jnp.take_along_axis(scores_WB, index_nB, axis=0), 0, -1)


def _highest(scores, k):
  return _each_row(lambda rows: _highest_of_rows(rows, k), scores)


def _highest_of_rows(scores, k):
  """`lax.top_k`, by chunks where rows are wide."""
  axis, width = scores.ndim - 1, scores.shape[-1]
  size = chunk_size(width, k)
  if size == 1:
    return tuple(lax.top_k(scores, k))
  maxima_BC = _chunk_maxima(scores, size, axis)
  score_at = lambda index_Bn: jnp.take_along_axis(scores, index_Bn, axis=-1)
  return tuple(of_chunks(maxima_BC, k, size, score_at, width))


def of_chunks(
  maxima: Float[Array, "*B C"],
  k: int,
  size: int,
  score_at: Callable[[Int[Array, "*B n"]], Float[Array, "*B n"]],
  width: int | None = None,
) -> TopK:
  """The k highest scores and their indices, from the maxima of chunks of `size`.

  The k chunks of the highest maxima hold the k highest scores, since k chunks with higher maxima
  hold k higher scores. Of chunks with equal maxima the first come first, so that ties stay in the
  order of the indices. `score_at` returns the scores at some indices below `width`, behind which
  the last chunk has no scores.
  """
  top_k = lambda scores: _each_row(lambda rows: tuple(lax.top_k(rows, k)), scores)
  _, chunk_Bk = top_k(maxima)
  # In the order of their numbers, for the second `top_k` orders ties by index.
  chunk_Bk = chunk_Bk if k == 1 else jnp.sort(chunk_Bk, axis=-1)
  index_Bks = chunk_Bk[..., None] * size + jnp.arange(size, dtype=jnp.int32)
  index_Bn = index_Bks.reshape(*chunk_Bk.shape[:-1], k * size)
  if width is None:
    score_Bn = score_at(index_Bn)
  else:
    # What is behind a shorter last chunk comes after all real candidates.
    score_Bn = score_at(jnp.minimum(index_Bn, width - 1))
    score_Bn = jnp.where(index_Bn < width, score_Bn, -jnp.inf)
  score_Bk, place_Bk = top_k(score_Bn)
  return TopK(score_Bk, jnp.take_along_axis(index_Bn, place_Bk, axis=-1))


def _each_row(function: Callable[[Array], Any], array: Array) -> Any:
  """`function(array)` of independent rows [*B, W], each device its own rows.

  The partitioner does not split `lax.top_k`: it would send all rows to all devices.
  """
  shards = vocab_parallel.token_shards(None)
  if shards.count == 1:
    return function(array)
  batch = array.shape[:-1]
  rows = math.prod(batch)
  spec = P(shards.axes)
  mapped = jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=set(shards.axes))
  # Outside of jit a shard_map that leaves axes automatic is an error.
  result = jax.jit(mapped)(shards.split(array.reshape(rows, -1)))
  return jax.tree.map(lambda x: shards.join(x, rows).reshape(*batch, x.shape[-1]), result)
