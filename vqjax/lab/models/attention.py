"""Of which blocks do models that attend to a whole sequence, or to another one, consist?"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Float

from vqjax.types import Dtype

XAVIER = nn.initializers.xavier_uniform()


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "T D"]:
  """Sines, then cosines of positions at wavelengths from 2π to 10,000·2π: Section 3.5."""
  rate = 10_000.0 ** -(np.arange(dim // 2) / max(dim // 2 - 1, 1))
  angle = np.arange(length)[:, None] * rate
  found = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
  return np.pad(found, ((0, 0), (0, dim % 2))).astype(np.float32)


def stacked(block, layers: int, broadcast: int):
  """A block for each layer, its parameters stacked; (carry, per layer, mask, deterministic)."""
  return nn.scan(
    block,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(0, *[nn.broadcast] * broadcast),
    length=layers,
  )


class Attention(nn.Module):
  """A residual branch of attention: to itself, or to keys and values that are given."""

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

  def ready(self, x_BTD):
    """What is attended with: the normalised vectors."""
    return self.norm(x_BTD)

  def mixed(self, x_BTD, ready_BTD, key, value, deterministic, **options):
    """x and the branch."""
    found = jax.nn.dot_product_attention(self.query(ready_BTD), key, value, **options)
    return x_BTD + self.drop(self.out(found), deterministic)


class FeedForward(nn.Module):
  """A residual branch of two layers with an activation between, at every place alone."""

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
  """Attention to the whole source, and a feed-forward layer."""

  dim: int
  heads: int
  hidden: int
  dropout: float
  dtype: Dtype
  activation: Callable = nn.relu

  def setup(self):
    own = self.dim, self.heads, self.dropout, self.dtype
    mlp = self.dim, self.hidden, self.dropout, self.dtype, self.activation
    self.self_attention = Attention(*own)
    self.feed_forward = FeedForward(*mlp)

  def __call__(self, x_BSD, given, mask, deterministic):
    del given
    own = self.self_attention
    ready = own.ready(x_BSD)
    key, value = own.key(ready), own.value(ready)
    x_BSD = own.mixed(x_BSD, ready, key, value, deterministic, mask=mask)
    return self.feed_forward(x_BSD, deterministic), None


class DecoderBlock(nn.Module):
  """Attention to the target so far, then to the source, and a feed-forward layer."""

  dim: int
  heads: int
  hidden: int
  dropout: float
  dtype: Dtype
  activation: Callable = nn.relu

  def setup(self):
    own = self.dim, self.heads, self.dropout, self.dtype
    mlp = self.dim, self.hidden, self.dropout, self.dtype, self.activation
    self.self_attention = Attention(*own)
    self.cross_attention = Attention(*own, crossed=True)
    self.feed_forward = FeedForward(*mlp)

  def __call__(self, x_BTD, given, mask, deterministic):
    memory_key, memory_value, cache = given
    x_BTD, cache = self._to_itself(x_BTD, cache, deterministic)
    cross = self.cross_attention
    ready = cross.ready(x_BTD)
    x_BTD = cross.mixed(x_BTD, ready, memory_key, memory_value, deterministic, mask=mask)
    return self.feed_forward(x_BTD, deterministic), cache

  def _to_itself(self, x_BTD, cache, deterministic):
    own = self.self_attention
    ready = own.ready(x_BTD)
    key, value = own.key(ready), own.value(ready)
    if cache is None:
      return own.mixed(x_BTD, ready, key, value, deterministic, is_causal=True), None
    keys, values, at = cache
    put = lambda all_BTHC, one_B1HC: lax.dynamic_update_slice_in_dim(all_BTHC, one_B1HC, at, axis=1)
    keys, values = put(keys, key), put(values, value)
    past = (jnp.arange(keys.shape[1]) <= at)[None, None, None]
    return own.mixed(x_BTD, ready, keys, values, deterministic, mask=past), (keys, values)


NORM_AXES = {"scale": ("norm",), "bias": ("norm",)}
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


def _stacked(axes: dict) -> dict:
  """Those of all layers."""
  is_leaf = lambda node: isinstance(node, tuple)
  return jax.tree.map(lambda names: ("layers", *names), axes, is_leaf=is_leaf)


_CROSS_AXES = {name: _ATTENTION_AXES[name] for name in ("norm", "query", "out")}
ENCODER_AXES = _stacked({"self_attention": _ATTENTION_AXES, **_MLP_AXES})
DECODER_AXES = ENCODER_AXES | _stacked({"cross_attention": _CROSS_AXES})
