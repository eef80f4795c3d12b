"""Causal attention as pure functions of queries, keys, values and their positions.

Axes beside the usual letters: H query heads, G key-value heads, C width of a head, S positions of
keys. Attention is computed in one piece, with all weights [B, H, T, S] at once, or in tiles of
query positions that are recomputed in the backward pass, so that no array of T·T elements is alive.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import vocab_parallel
from vqjax.ops.tiles import most_scores

__all__ = []


def attend(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B S G C"],
  value: Float[Array, "B S G C"],
  query_position: Int[Array, "*b T"],
  key_position: Int[Array, "*c S"],
  window: Int[Array, ""] | int | None = None,
  seen: Bool[Array, "B T S"] | None = None,
  *,
  scale: float | None = None,
  softcap: float | None = None,
  sink: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H C"]:
  """Attention of each query to the last `window` positions up to its own.

  A cache of keys is attended to in the same way: the position of a slot that holds no key yet is
  larger than that of any query, so that it is never seen.

  Args:
    query: the queries; query head h reads key-value head h // (H / G).
    key: the keys.
    value: the values.
    query_position: the positions of the queries, [T] or [B, T].
    key_position: the positions of the keys, [S] or [B, S].
    window: number of positions that a query sees, its own included; None: all so far.
    seen: False for keys that a query does not see, though their positions are in its window.
    scale: factor of the scores; None: C^-1/2.
    softcap: largest absolute score c: scores are c · tanh(score / c); None: no cap.
    sink: the score of each head's sink, as in `sunk_softmax`; None: there is none.
  """
  positions = (jnp.atleast_2d(position) for position in (query_position, key_position))
  mask_BTS = _causal_mask(*positions, window)
  mask_BHTS = (mask_BTS if seen is None else mask_BTS & seen)[:, None]
  if softcap is None and sink is None:
    return jax.nn.dot_product_attention(query, key, value, mask=mask_BHTS, scale=scale)
  batch, length, heads, width = query.shape
  grouped = query.reshape(batch, length, key.shape[2], -1, width)
  scores = jnp.einsum("btgnc,bsgc->bgnts", grouped, key, preferred_element_type=jnp.float32)
  scores *= width**-0.5 if scale is None else scale
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(mask_BHTS[:, None], scores, jnp.finfo(scores.dtype).min)
  weight = sunk_softmax(scores, sink).astype(value.dtype)
  return jnp.einsum("bgnts,bsgc->btgnc", weight, value).reshape(batch, length, heads, width)


def sunk_softmax(
  scores: Float[Array, "B G N T S"], sink: Float[Array, "H"] | None
) -> Float[Array, "B G N T S"]:
  """Softmax over keys and a sink without a value, which takes a share; H = G · N heads.

  Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023; a learned
  score for each head as in gpt-oss.
  """
  if sink is None:
    return jax.nn.softmax(scores)
  sink_GN11 = sink.astype(scores.dtype).reshape(*scores.shape[1:3], 1, 1)
  log_z = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1, keepdims=True), sink_GN11)
  return jnp.exp(scores - log_z)


def attend_to_itself(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T G C"],
  value: Float[Array, "B T G C"],
  window: Int[Array, ""] | None = None,
  *,
  tiled: bool = False,
  scale: float | None = None,
  softcap: float | None = None,
  sink: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H C"]:
  """Attention of positions 0 to T - 1 among themselves; it equals `attend` up to rounding.

  On a GPU it is cuDNN's, which stores no weights, where that has it: 16-bit vectors, no window, no
  cap and no sink.

  Args:
    query: the queries.
    key: the keys.
    value: the values.
    window: as in `attend`.
    tiled: whether elsewhere tiles of query positions are computed, and once more in the backward
      pass, so that no array of T·T elements is alive.
    scale: as in `attend`.
    softcap: as in `attend`.
    sink: as in `attend`.
  """
  if softcap is None and sink is None and _has_cudnn(query, window):
    return jax.nn.dot_product_attention(
      query, key, value, scale=scale, is_causal=True, implementation="cudnn"
    )
  options = {"scale": scale, "softcap": softcap, "sink": sink}
  if tiled:
    return _attend_in_tiles(query, key, value, window, **options)
  position_T = jnp.arange(query.shape[1])
  return attend(query, key, value, position_T, position_T, window, **options)


def _has_cudnn(query, window):
  is_narrow = query.dtype in (jnp.bfloat16, jnp.float16)
  fits = query.shape[-1] <= 128 and query.shape[-1] % 8 == 0 and query.shape[1] % 2 == 0
  is_gpu = vocab_parallel.platform() == "gpu"
  return is_gpu and is_narrow and fits and window is None


def _attend_in_tiles(query, key, value, window, **options):
  """Attention in tiles of query positions."""
  batch, length, heads, width = query.shape
  size = tile_size(query.shape, most_scores() * vocab_parallel.devices().count)
  tiles = math.ceil(length / size)

  @jax.checkpoint
  def tile(query_BtHC, first):
    # Padding of the last tile attends as the last position does, and is cut off below.
    position_t = jnp.minimum(first + jnp.arange(size), length - 1)
    return attend(query_BtHC, key, value, position_t, jnp.arange(length), window, **options)

  padded = jnp.pad(query, ((0, 0), (0, tiles * size - length), (0, 0), (0, 0)))
  query_NBtHC = jnp.moveaxis(padded.reshape(batch, tiles, size, heads, width), 1, 0)
  mixed_NBtHC = lax.map(lambda given: tile(*given), (query_NBtHC, size * jnp.arange(tiles)))
  return jnp.moveaxis(mixed_NBtHC, 0, 1).reshape(padded.shape)[:, :length]


def tile_size(shape: tuple[int, int, int, int], most: int) -> int:
  """Number of query positions in a tile, for queries [B, T, H, C].

  A tile has at most `most` attention weights, but at least C positions: the weights of C queries
  are as many numbers as the keys, so that smaller tiles would save little memory. The tiles are
  equal parts of the sequence, of which the last is padded.
  """
  batch, length, heads, width = shape
  positions = max(width, most // max(1, batch * heads * length))
  return max(1, math.ceil(length / max(1, math.ceil(length / positions))))


def _causal_mask(
  query_position: Int[Array, "*b T"],
  key_position: Int[Array, "*c S"],
  window: Int[Array, ""] | int | None = None,
) -> Bool[Array, "*d T S"]:
  """True where a query attends: the last `window` positions up to its own; None: all so far."""
  back_TS = query_position[..., :, None] - key_position[..., None, :]
  seen_TS = back_TS >= 0
  return seen_TS if window is None else seen_TS & (back_TS < window)
