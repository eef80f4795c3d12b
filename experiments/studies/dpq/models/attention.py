"""Transformer blocks that attend to a whole sequence, or to another sequence."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Float

from vqjax.lm.models.base import NORM_AXES, stacked_axes
from vqjax.types import Dtype

XAVIER = nn.initializers.xavier_uniform()


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "T D"]:
  """Sines, then cosines of positions at wavelengths from 2π to 10,000·2π.

  Source: Vaswani et al., Attention is all you need, 2017, Section 3.5.
  """
  rate = 10_000.0 ** -(np.arange(dim // 2) / max(dim // 2 - 1, 1))
  angle = np.arange(length)[:, None] * rate
  table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
  return np.pad(table, ((0, 0), (0, dim % 2))).astype(np.float32)


def stacked(block: type[nn.Module], layers: int) -> Callable[..., nn.Module]:
  """Blocks with stacked parameters: (carry, per layer, mask, deterministic)."""
  return nn.scan(
    block,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, nn.broadcast, nn.broadcast),
    length=layers,
  )


class AttentionBranch(nn.Module):
  """A residual branch of attention to the sequence itself or to another one."""

  dim: int
  heads: int
  dropout: float
  dtype: Dtype
  crossed: bool = False

  def setup(self):
    width = self.heads, self.dim // self.heads
    dense = lambda shape, **more: nn.DenseGeneral(
      shape, dtype=self.dtype, kernel_init=XAVIER, **more
    )
    self.norm = nn.LayerNorm(dtype=self.dtype)
    self.query = dense(width)
    if not self.crossed:
      self.key, self.value = dense(width), dense(width)
    self.out = dense(self.dim, axis=(-2, -1))
    self.drop = nn.Dropout(self.dropout)

  def __call__(self, x_BTD, normed_BTD, key, value, deterministic, **options):
    """x plus attention from the normalised vectors, `norm(x)`, to the keys and values."""
    mixed = jax.nn.dot_product_attention(self.query(normed_BTD), key, value, **options)
    return x_BTD + self.drop(self.out(mixed), deterministic)


class FeedForward(nn.Module):
  """A residual branch of two dense layers with an activation between them."""

  dim: int
  hidden: int
  dropout: float
  dtype: Dtype
  activation: Callable = nn.relu

  def setup(self):
    dense = lambda width: nn.Dense(width, dtype=self.dtype, kernel_init=XAVIER)
    self.norm = nn.LayerNorm(dtype=self.dtype)
    self.enter, self.leave = dense(self.hidden), dense(self.dim)
    self.drop = nn.Dropout(self.dropout)

  def __call__(self, x_BTD, deterministic):
    inner = self.drop(self.activation(self.enter(self.norm(x_BTD))), deterministic)
    return x_BTD + self.drop(self.leave(inner), deterministic)


class EncoderBlock(nn.Module):
  """Self-attention to the whole sequence, and a feed-forward layer."""

  dim: int
  heads: int
  hidden: int
  dropout: float
  dtype: Dtype
  activation: Callable = nn.relu

  def setup(self):
    self.self_attention = AttentionBranch(self.dim, self.heads, self.dropout, self.dtype)
    self.feed_forward = FeedForward(
      self.dim, self.hidden, self.dropout, self.dtype, self.activation
    )

  def __call__(self, x_BSD, per_layer, mask, deterministic):
    del per_layer
    attention = self.self_attention
    normed = attention.norm(x_BSD)
    key, value = attention.key(normed), attention.value(normed)
    x_BSD = attention(x_BSD, normed, key, value, deterministic, mask=mask)
    return self.feed_forward(x_BSD, deterministic), None


class DecoderBlock(nn.Module):
  """Self-attention, attention to the source, and a feed-forward layer."""

  dim: int
  heads: int
  hidden: int
  dropout: float
  dtype: Dtype
  activation: Callable = nn.relu

  def setup(self):
    attention = functools.partial(AttentionBranch, self.dim, self.heads, self.dropout, self.dtype)
    self.self_attention, self.cross_attention = attention(), attention(crossed=True)
    self.feed_forward = FeedForward(
      self.dim, self.hidden, self.dropout, self.dtype, self.activation
    )

  def __call__(self, x_BTD, per_layer, mask, deterministic):
    memory_key, memory_value, cache = per_layer
    attention = self.self_attention
    normed = attention.norm(x_BTD)
    key, value = attention.key(normed), attention.value(normed)
    if cache is None:
      x_BTD = attention(x_BTD, normed, key, value, deterministic, is_causal=True)
    else:
      # One token: its key and value are written at the position of the decoding.
      keys, values, at = cache
      keys = lax.dynamic_update_slice_in_dim(keys, key, at, axis=1)
      values = lax.dynamic_update_slice_in_dim(values, value, at, axis=1)
      past = (jnp.arange(keys.shape[1]) <= at)[None, None, None]
      x_BTD = attention(x_BTD, normed, keys, values, deterministic, mask=past)
      cache = keys, values
    cross = self.cross_attention
    normed = cross.norm(x_BTD)
    x_BTD = cross(x_BTD, normed, memory_key, memory_value, deterministic, mask=mask)
    return self.feed_forward(x_BTD, deterministic), cache


_HEAD_AXES = {"kernel": ("embed", "heads", "head_dim"), "bias": ("heads", "head_dim")}
_ATTENTION_AXES = {
  "norm": NORM_AXES,
  "query": _HEAD_AXES,
  "key": _HEAD_AXES,
  "value": _HEAD_AXES,
  "out": {"kernel": ("heads", "head_dim", "embed"), "bias": ("norm",)},
}
_MLP_AXES = {
  "feed_forward": {
    "norm": NORM_AXES,
    "enter": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
    "leave": {"kernel": ("mlp", "embed"), "bias": ("norm",)},
  }
}
_CROSS_AXES = {name: _ATTENTION_AXES[name] for name in ("norm", "query", "out")}
ENCODER_AXES = stacked_axes({"self_attention": _ATTENTION_AXES, **_MLP_AXES})
DECODER_AXES = ENCODER_AXES | stacked_axes({"cross_attention": _CROSS_AXES})
