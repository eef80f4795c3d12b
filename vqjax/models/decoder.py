"""A GPT-2-style decoder whose embedding and output head are fields.

Attention is computed in one piece, with all weights [B, H, T, T] at once, or in tiles of query
positions that are recomputed in the backward pass, so that no array of T·T elements is alive.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.models.base import (
  NORM_AXES,
  ROWS,
  LanguageModel,
  check_dropout,
  check_heads,
  stacked_axes,
)
from vqjax.ops import vocab_parallel
from vqjax.ops.tiles import most_scores
from vqjax.sharding import constrain
from vqjax.types import Dtype


def attend(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T H C"],
  value: Float[Array, "B T H C"],
  window: Int[Array, ""] | None,
) -> Float[Array, "B T H C"]:
  """Causal attention to the last `window` positions; None for all."""
  if window is None:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)
  position_T = jnp.arange(query.shape[1])
  mask = causal_mask(position_T, query.shape[1], window)[None, None]
  return jax.nn.dot_product_attention(query, key, value, mask=mask)


def attend_in_tiles(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T H C"],
  value: Float[Array, "B T H C"],
  window: Int[Array, ""] | None,
) -> Float[Array, "B T H C"]:
  """Causal attention in tiles of query positions, equal to `attend` up to rounding."""
  batch, length, heads, width = query.shape
  size = tile_size(query.shape, most_scores() * vocab_parallel.devices())
  tiles = math.ceil(length / size)
  reach = jnp.int32(length) if window is None else window

  @jax.checkpoint
  def tile(query_BtHC, first):
    # Padding of the last tile attends as the last position does, and is cut off below.
    position_t = jnp.minimum(first + jnp.arange(size), length - 1)
    mask = causal_mask(position_t, length, reach)[None, None]
    return jax.nn.dot_product_attention(query_BtHC, key, value, mask=mask)

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


def causal_mask(
  position: Int[Array, "Q"], length: int, window: Int[Array, ""]
) -> Bool[Array, "Q T"]:
  """True where a query attends: the last `window` positions up to its own."""
  back_QT = position[:, None] - jnp.arange(length)
  return (back_QT >= 0) & (back_QT < window)


class Block(nn.Module):
  """Pre-LayerNorm self-attention and a GELU feed-forward layer.

  Attributes:
    dim: model width, D.
    heads: attention heads.
    dropout: probability of zeroing an entry of either branch's output.
    residual_scale: standard deviation of the branches' output projections.
    dtype: dtype of the computation; parameters are float32.
    remat: the block is recomputed in the backward pass; it then attends in tiles, so that the
      activations which recomputation keeps are small.
  """

  dim: int
  heads: int
  dropout: float
  residual_scale: float
  dtype: Dtype
  remat: bool

  def setup(self):
    normal = nn.initializers.normal
    dense = lambda width, scale, **more: nn.DenseGeneral(
      width, dtype=self.dtype, kernel_init=normal(scale), **more
    )
    self.attention_norm = nn.LayerNorm(dtype=self.dtype)
    # An axis of their own lets the heads be sharded.
    self.query_key_value = dense((3, self.heads, self.dim // self.heads), 0.02)
    self.attention_out = dense(self.dim, self.residual_scale, axis=(-2, -1))
    self.mlp_norm = nn.LayerNorm(dtype=self.dtype)
    self.mlp_in = dense(4 * self.dim, 0.02)
    self.mlp_out = dense(self.dim, self.residual_scale)
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, x_BTD: Float[Array, "B T D"], window: Int[Array, ""] | None, deterministic: bool
  ) -> tuple[Float[Array, "B T D"], None]:
    """The output of the block, as the carry of a scan.

    Args:
      x_BTD: the residual stream.
      window: number of positions that each attends to, its own included; None: all so far.
      deterministic: no dropout.
    """
    x_BTD = x_BTD + self.drop(self._attend(self.attention_norm(x_BTD), window), deterministic)
    x_BTD = constrain(x_BTD, ROWS)
    inner_BTF = constrain(self.mlp_in(self.mlp_norm(x_BTD)), ("batch", None, "mlp"))
    # Recomputed from its input, gelu keeps no tanh [B, T, 4·D] for the backward pass.
    gelu = jax.checkpoint(nn.gelu) if self.remat else nn.gelu
    mlp_BTD = self.mlp_out(gelu(inner_BTF))
    return constrain(x_BTD + self.drop(mlp_BTD, deterministic), ROWS), None

  def _attend(self, x_BTD, window):
    by_head = "batch", None, "heads", None
    parts = jnp.moveaxis(self.query_key_value(x_BTD), -3, 0)
    query, key, value = (constrain(part, by_head) for part in parts)
    attention = attend_in_tiles if self.remat else attend
    return self.attention_out(attention(query, key, value, window))


BLOCK_AXES = {
  "attention_norm": NORM_AXES,
  "query_key_value": {
    "kernel": ("embed", "qkv", "heads", "head_dim"),
    "bias": ("qkv", "heads", "head_dim"),
  },
  "attention_out": {"kernel": ("heads", "head_dim", "embed"), "bias": ("norm",)},
  "mlp_norm": NORM_AXES,
  "mlp_in": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
  "mlp_out": {"kernel": ("mlp", "embed"), "bias": ("norm",)},
}
"""Logical axes of the parameters of a block."""


class Transformer(LanguageModel):
  """A GPT-2-style decoder with learned positions, `layers` blocks and a head.

  With a `window`, attention alternates as in GPT-Neo: the first, third, ... block attends to all
  positions so far, the second, fourth, ... to the last `window`. The rest is that of GPT-2: GPT-Neo
  does not divide attention scores by sqrt(head width), and its projections to queries, keys and
  values have no bias.

  The embedding and the head have dtypes of their own: if the head does not get the decoder's dtype
  too, its matrix products are in float32.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D, which the parts share.
    layers: number of blocks.
    heads: number of attention heads of a block, which divides `dim`.
    context: largest number of tokens in a row.
    dropout: probability of zeroing an entry, after the embedding and in every block.
    remat: recompute the activations of each block in the backward pass, and attend in tiles of
      query positions, so that no [B, H, T, T] array is alive.
    dtype: dtype of the decoder's computation, float32 or bfloat16; parameters are float32.
    window: number of positions, its own included, that every second block attends to; None: every
      block attends to all positions so far.
  """

  layers: int
  heads: int
  context: int
  dropout: float = 0.0
  remat: bool = False
  dtype: Dtype = jnp.float32
  window: int | None = None

  def setup(self):
    for name in ("layers", "context"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Raise it.")
    if self.window is not None and self.window < 1:
      raise ValueError(
        f"`window` must be at least 1, the position itself, or None; got {self.window}."
        " 256 is usual."
      )
    check_dropout(self.dropout)
    check_heads(self.dim, self.heads)
    self.check_layers()
    init = nn.initializers.normal(0.02)
    self.position = self.param("position", init, (self.context, self.dim), jnp.float32)
    # Inside a scan no barrier against common-subexpression elimination is needed.
    remat = lambda block: nn.remat(block, static_argnums=(3,), prevent_cse=False)
    # One block is compiled for any depth; its parameters are stacked, [layers, ...].
    stacked = nn.scan(
      remat(Block) if self.remat else Block,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, nn.broadcast),
      length=self.layers,
    )
    # GPT-2 scales the two branches that each block adds to the residual stream by the depth.
    scale = 0.02 / (2 * self.layers) ** 0.5
    self.blocks = stacked(self.dim, self.heads, self.dropout, scale, self.dtype, self.remat)
    self.final_norm = nn.LayerNorm(dtype=self.dtype)
    self.drop = nn.Dropout(self.dropout)

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """Final hidden vectors, after positions, blocks and the final LayerNorm."""
    length = vectors.shape[1]
    if length > self.context:
      raise ValueError(
        f"`tokens` must have at most context {self.context} columns; got {length}. Cut them, or"
        " raise the model's context."
      )
    x_BTD = vectors.astype(self.dtype) + self.position[:length].astype(self.dtype)
    x_BTD = constrain(self.drop(x_BTD, deterministic), ROWS)
    windows_L = None
    if self.window is not None:
      local_L = jnp.arange(self.layers) % 2 == 1
      windows_L = jnp.where(local_L, min(self.window, self.context), self.context)
      windows_L = windows_L.astype(jnp.int32)
    x_BTD, _ = self.blocks(x_BTD, windows_L, deterministic)
    return constrain(self.final_norm(x_BTD), ROWS)

  def own_axes(self) -> dict:
    """Logical axes of positions, blocks and the final LayerNorm."""
    return {
      "params": {
        "position": ("context", "embed"),
        "blocks": stacked_axes(BLOCK_AXES),
        "final_norm": NORM_AXES,
      }
    }
