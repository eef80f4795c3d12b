"""Blocks' layers that keep a state of earlier tokens in place of their keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from vqjax.lm.models.delta_rule import gated_delta_rule
from vqjax.ngrams import last_entries
from vqjax.ops import narrow
from vqjax.types import Dtype

__all__ = ["GatedDelta"]


@dataclasses.dataclass(frozen=True)
class GatedDelta:
  """The gated delta rule in place of attention.

  Queries, keys and values of each token are mixed with those of a few tokens before it by a causal
  convolution, one filter a channel. Source: Yang et al., Gated Delta Networks, 2024 (arXiv
  2412.06464), Section 3; details as in `qwen4_exp`.

  Attributes:
    key_heads: heads of queries and keys; it divides `value_heads`.
    value_heads: heads of values, H.
    key_dim: width of a query and of a key, C.
    value_dim: width of a value, E.
    kernel: number of taps of the convolution.
    activation: the function after the convolution.
    gate: the function of the gate of the outputs.
    epsilon: added to mean squares of the outputs.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  kernel: int = 4
  activation: Callable[[Array], Array] = nn.silu
  gate: Callable[[Array], Array] = nn.silu
  epsilon: float = 1e-6

  @property
  def channels(self) -> int:
    """Numbers of a token that are convolved: its queries, keys and values."""
    return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

  def check(self) -> None:
    """Raise ValueError for sizes that contradict each other."""
    if self.key_heads < 1 or self.value_heads % self.key_heads:
      raise ValueError(
        f"`delta.key_heads` must divide the {self.value_heads} value heads; got {self.key_heads}."
        " Change one of them."
      )

  def axes(self) -> dict:
    """Logical axes of the parameters of a `DeltaLayer`."""
    heads = {"kernel": ("embed", "heads")}
    return {
      "query_key_value": {"kernel": ("embed", "mlp")},
      "gate": {"kernel": ("embed", "heads", "head_dim")},
      "rate": heads,
      "decay": heads,
      "filters": ("conv", "mlp"),
      "decay_bias": ("heads",),
      "log_decay": ("heads",),
      "scale": ("norm",),
      "out": {"kernel": ("heads", "head_dim", "embed")},
    }


class DeltaCache(NamedTuple):
  """What a layer needs of earlier tokens.

  Attributes:
    inputs: what the last tokens gave to the convolution.
    state: the state of each head.
  """

  inputs: Float[Array, "B L C"]
  state: Float[Array, "B H C E"]


class DeltaLayer(nn.Module):
  """The gated delta rule with its projections, convolution, norm and gate.

  Attributes:
    of: the sizes.
    dim: model width, D.
    out_scale: standard deviation of the initial output projection.
    dtype: dtype of the computation; the state is float32.
  """

  of: GatedDelta
  dim: int
  out_scale: float
  dtype: Dtype

  def setup(self):
    of = self.of
    dense = lambda width, scale=0.02, **more: nn.DenseGeneral(
      width,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=nn.initializers.normal(scale),
      dot_general=narrow.dot_general,
      **more,
    )
    self.query_key_value = dense(of.channels)
    self.gate = dense((of.value_heads, of.value_dim))
    self.rate, self.decay = dense(of.value_heads), dense(of.value_heads)
    self.out = dense(self.dim, self.out_scale, axis=(-2, -1))
    param = lambda name, init, *shape: self.param(name, init, shape, jnp.float32)
    self.filters = param("filters", nn.initializers.lecun_normal(), of.kernel, of.channels)
    self.decay_bias = param("decay_bias", nn.initializers.ones, of.value_heads)
    self.log_decay = param("log_decay", _log_uniform, of.value_heads)
    self.norm_scale = param("scale", nn.initializers.ones, of.value_dim)

  def __call__(
    self,
    x_BTD: Float[Array, "B T D"],
    cache: DeltaCache | None = None,
    count: Int[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B T D"], DeltaCache]:
    """The outputs of the layer, and its cache.

    Args:
      x_BTD: the inputs.
      cache: what the tokens before have left; None: the text begins here.
      count: number of tokens of each row, after which there is padding; None: all.
    """
    of, batch, length = self.of, x_BTD.shape[0], x_BTD.shape[1]
    given = self.query_key_value(x_BTD)
    before = jnp.zeros((batch, of.kernel - 1, of.channels), given.dtype)
    history = jnp.concatenate([before if cache is None else cache.inputs, given], axis=1)
    filters = self.filters.astype(self.dtype)
    taps = [history[:, k : k + length] * filters[k] for k in range(of.kernel)]
    parts = self._heads(of.activation(sum(taps)))
    rate = jax.nn.sigmoid(self.rate(x_BTD).astype(jnp.float32))
    raised = jax.nn.softplus(self.decay(x_BTD).astype(jnp.float32) + self.decay_bias)
    log_decay = -jnp.exp(self.log_decay.astype(jnp.float32)) * raised
    if count is not None:
      is_token = jnp.arange(length)[:, None] < count[:, None, None]
      rate, log_decay = rate * is_token, log_decay * is_token
    state = None if cache is None else cache.state
    out, state = gated_delta_rule(*parts, log_decay, rate, state)
    out = self._gated(out, self.gate(x_BTD))
    return self.out(out), DeltaCache(last_entries(history, of.kernel - 1, count), state)

  def _heads(self, mixed):
    """Queries, keys and values of each value head."""
    of = self.of
    width = of.key_heads * of.key_dim
    *both, value = jnp.split(mixed, [width, 2 * width], axis=-1)
    heads = lambda x, count: x.reshape(*x.shape[:2], count, -1)
    unit = lambda x: x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
    query, key = (unit(heads(x, of.key_heads).astype(jnp.float32)) for x in both)
    repeat = lambda x: jnp.repeat(x, of.value_heads // of.key_heads, axis=2)
    return repeat(query) * of.key_dim**-0.5, repeat(key), heads(value, of.value_heads)

  def _gated(self, out, gate):
    out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + self.of.epsilon)
    out = self.norm_scale * out.astype(self.dtype) * self.of.gate(gate.astype(jnp.float32))
    return out.astype(self.dtype)


def _log_uniform(key, shape, dtype):
  """Logarithms of numbers that are uniform in [0.01, 16)."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))
