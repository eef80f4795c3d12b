"""Residual streams side by side, of which each branch reads a mixture and to which it writes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.ops import narrow
from vqjax.types import Dtype

__all__ = ["Streams"]


@dataclasses.dataclass(frozen=True)
class Streams:
  """Several residual streams in place of one, in a row of S * D numbers.

  A branch reads the mean of the normalised streams, each number times a weight in [0, 1]. Its
  output is added to each stream times a weight in [0, 2]. The weights depend on all streams, as in
  `qwen4_exp`. Source: Zhu et al., Hyper-Connections, 2024 (arXiv 2409.19606), for the idea.

  Attributes:
    count: number of streams, S.
    rank: rank of the product that gives the weights of reading.
    epsilon: added to the mean square of each stream.
    offset: number that is added to the scales of the norm.
  """

  count: int
  rank: int
  epsilon: float = 1e-6
  offset: float = 1.0

  def axes(self, writes: bool = True) -> dict:
    """Logical axes of the parameters of a `StreamMixer`."""
    own = {"scale": ("norm",), "down": {"kernel": ("embed", "mlp")}}
    own["up"] = {"kernel": ("mlp", "embed")}
    return own | ({"write": {"kernel": ("embed", "streams")}} if writes else {})


class StreamMixer(nn.Module):
  """What a branch reads of the streams, and the weights by which it writes.

  Attributes:
    streams: the streams.
    dim: width of a stream, D.
    dtype: dtype of the computation.
    writes: whether there are weights of writing.
  """

  streams: Streams
  dim: int
  dtype: Dtype
  writes: bool = True

  @nn.compact
  def __call__(
    self, x_BTC: Float[Array, "*B C"]
  ) -> tuple[Float[Array, "*B D"], Float[Array, "*B S"] | None]:
    """What is read, [*B, D], and the weights of writing, [*B, S], of streams [*B, S * D]."""
    of, shape = self.streams, (*x_BTC.shape[:-1], self.streams.count, self.dim)
    init = nn.initializers.constant(1.0 - of.offset)
    scale = self.param("scale", init, (x_BTC.shape[-1],), jnp.float32).astype(jnp.float32)
    wide = x_BTC.astype(jnp.float32).reshape(shape)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + of.epsilon)
    normed = (wide.reshape(x_BTC.shape) * (of.offset + scale)).astype(self.dtype)
    product = lambda width, name, x: nn.DenseGeneral(
      width,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=nn.initializers.normal(0.02),
      dot_general=narrow.dot_general,
      name=name,
    )(x)
    inner = jax.nn.silu(product(of.rank, "down", normed) / of.count)
    weight = jax.nn.sigmoid(product(x_BTC.shape[-1], "up", inner))
    read = (weight * normed).reshape(shape).mean(-2)
    if not self.writes:
      return read, None
    return read, 2 * jax.nn.sigmoid(product(of.count, "write", normed) / of.count)
