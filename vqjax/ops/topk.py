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


class TopK(NamedTuple):
  """The k highest scores, descending, and their tokens; -inf and -1 if empty."""

  scores: Float[Array, "*B k"]
  tokens: Int[Array, "*B k"]


def empty(batch: tuple[int, ...], k: int) -> TopK:
  """A top-k list of empty entries: the start of a loop that calls `merge`."""
  return TopK(jnp.full((*batch, k), -jnp.inf, jnp.float32), jnp.full((*batch, k), -1, jnp.int32))


def merge(top: TopK, scores: Float[Array, "*B W"], tokens: Int[Array, "*#B W"]) -> TopK:
  """The top k of a list and a block of W scores; earlier scores win ties."""
  token_BW = jnp.where(jnp.isneginf(scores), -1, tokens).astype(jnp.int32)
  k = top.scores.shape[-1]
  # The block is cut to k first: `top_k` over k + W scores would be twice as wide where W is near k.
  score_Bk, index_Bk = _highest(scores, min(k, scores.shape[-1]))
  token_Bk = jnp.take_along_axis(token_BW, index_Bk, axis=-1)
  # The list precedes the block, and `lax.top_k` is stable, so earlier scores win ties.
  score_Bk, index_Bk = _highest(jnp.concatenate([top.scores, score_Bk], axis=-1), k)
  token_Bk = jnp.concatenate([top.tokens, token_Bk], axis=-1)
  return TopK(score_Bk, jnp.take_along_axis(token_Bk, index_Bk, axis=-1))


def across_devices(top: TopK, axis: str | None) -> TopK:
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
  score: Float[Array, "*B"], token: Int[Array, "*B"], axis: str | None
) -> Int[Array, "*B"]:
  """The token of the device with the highest score; the token outside of `axis`."""
  return across_devices(TopK(score[..., None], token[..., None]), axis).tokens[..., 0]


def chunk_size(width: int, k: int) -> int:
  """Width of the chunks by whose maxima k of `width` scores are selected; 1 for none."""
  # The maxima and the k·size candidates are together fewest where both are equally many.
  size = math.isqrt(width // max(k, 1))
  return size if size >= 4 else 1


def by_chunk(
  reduce: Callable[[Array], Array], scores: Float[Array, "*B W"], size: int
) -> Float[Array, "*B C"]:
  """`reduce` [..., n] -> [...] of consecutive chunks, of which the last may be shorter."""
  *batch, width = scores.shape
  whole = width // size
  parts = []
  if whole:
    parts.append(reduce(scores[..., : whole * size].reshape(*batch, whole, size)))
  if whole * size < width:
    parts.append(reduce(scores[..., None, whole * size :]))
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def chunk_maxima(scores: Float[Array, "*B W"], size: int) -> Float[Array, "*B C"]:
  """The highest score of each chunk."""
  return by_chunk(lambda chunk: chunk.max(axis=-1), scores, size)


def _highest(scores, k):
  return _each_row(lambda rows: _highest_of_rows(rows, k), scores)


def _highest_of_rows(scores, k):
  """`lax.top_k`, from the chunks with the k highest maxima.

  They hold the k highest scores: k chunks with higher maxima hold k higher scores. Of chunks with
  equal maxima the first come first, so that ties stay in order.
  """
  *batch, width = scores.shape
  size = chunk_size(width, k)
  if size == 1:
    return tuple(lax.top_k(scores, k))
  _, chunk_Bk = lax.top_k(chunk_maxima(scores, size), k)
  # In the order of their numbers, for the second `top_k` orders ties by index.
  chunk_Bk = chunk_Bk if k == 1 else jnp.sort(chunk_Bk, axis=-1)
  index_Bn = chunk_Bk[..., None] * size + jnp.arange(size, dtype=jnp.int32)
  index_Bn = index_Bn.reshape(*batch, k * size)
  score_Bn = jnp.take_along_axis(scores, jnp.minimum(index_Bn, width - 1), axis=-1)
  # Behind a shorter last chunk, after all real candidates.
  score_Bn = jnp.where(index_Bn < width, score_Bn, -jnp.inf)
  score_Bk, place_Bk = lax.top_k(score_Bn, k)
  return score_Bk, jnp.take_along_axis(index_Bn, place_Bk, axis=-1)


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
