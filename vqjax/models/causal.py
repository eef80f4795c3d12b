"""How does each position of a sequence attend to itself and to those before it?

Whole: all weights [B, H, T, T] at once. Tiled: those of some query positions at a time, again in
the backward pass, so that no array of T·T is alive; keys and values are whole.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import vocab_parallel
from vqjax.ops.tiles import most_scores


def attend(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T H C"],
  value: Float[Array, "B T H C"],
  window: Int[Array, ""] | None,
) -> Float[Array, "B T H C"]:
  """The values that each position sees, mixed; None: it sees all up to itself."""
  if window is None:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)
  position_T = jnp.arange(query.shape[1])
  mask = seen(position_T, query.shape[1], window)[None, None]
  return jax.nn.dot_product_attention(query, key, value, mask=mask)


def attend_in_tiles(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T H C"],
  value: Float[Array, "B T H C"],
  window: Int[Array, ""] | None,
) -> Float[Array, "B T H C"]:
  """`attend`, to rounding, a tile of query positions after another."""
  batch, length, heads, width = query.shape
  size = tile_size(query.shape, most_scores() * vocab_parallel.devices())
  tiles = math.ceil(length / size)
  reach = jnp.int32(length) if window is None else window

  @jax.checkpoint
  def tile(query_BtHC, first):
    # A query that fills up the last tile stands at the last position, and is dropped.
    position_t = jnp.minimum(first + jnp.arange(size), length - 1)
    mask = seen(position_t, length, reach)[None, None]
    return jax.nn.dot_product_attention(query_BtHC, key, value, mask=mask)

  filled = jnp.pad(query, ((0, 0), (0, tiles * size - length), (0, 0), (0, 0)))
  query_NBtHC = jnp.moveaxis(filled.reshape(batch, tiles, size, heads, width), 1, 0)
  mixed_NBtHC = lax.map(lambda given: tile(*given), (query_NBtHC, size * jnp.arange(tiles)))
  return jnp.moveaxis(mixed_NBtHC, 0, 1).reshape(filled.shape)[:, :length]


def tile_size(shape: tuple[int, int, int, int], most: int) -> int:
  """Query positions of a tile, for queries [B, T, H, C]: of at most `most` weights, and at least C.

  The weights of C queries are as many numbers as the keys, so that less would save little. Tiles
  are equal parts of the sequence, the last one filled up.
  """
  batch, length, heads, width = shape
  wanted = max(width, most // max(1, batch * heads * length))
  return max(1, math.ceil(length / max(1, math.ceil(length / wanted))))


def seen(position: Int[Array, "Q"], length: int, window: Int[Array, ""]) -> Bool[Array, "Q T"]:
  """Which of T positions a query sees: the last `window` up to its own, which is one of them."""
  back_QT = position[:, None] - jnp.arange(length)
  return (back_QT >= 0) & (back_QT < window)
