"""How are codes learned through a softmax over the keys (DPQ-SX)?"""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.ops import quantize
from vqjax.quantizers.base import Quantizer


class SoftmaxQuantizer(Quantizer):
  """The value of the key of largest response, with the gradient of the softmax of all responses.

  Exactly the chosen value in the forward pass; the gradient of the values is that of the one-hot
  choice, that of keys and vectors goes through softmax(responses / temperature): DPQ-SX, Eq. 3-5.

  Attributes:
    response: how near a key is: `ops.quantize.dot_response`, `euclidean_response` or
      `cosine_response`.
    tied: the keys are the values.
    value_dim: width of the result; None: that of the vectors. Tied tables have one width.
    temperature: of the softmax in the backward pass.
    forward_temperature: of the forward pass; 0 chooses one value. What ships is the chosen one.
    learned_temperature: that of the backward pass is a parameter, begun at `temperature`.
  """

  response: quantize.Response = dataclasses.field(default=quantize.dot_response, kw_only=True)
  tied: bool = dataclasses.field(default=False, kw_only=True)
  value_dim: int | None = dataclasses.field(default=None, kw_only=True)
  temperature: float = dataclasses.field(default=1.0, kw_only=True)
  forward_temperature: float = dataclasses.field(default=0.0, kw_only=True)
  learned_temperature: bool = dataclasses.field(default=False, kw_only=True)

  def setup(self):
    super().setup()
    shape = self._table_shape(self.dim)
    self.key_table = self.param("keys", self.table_init, shape, self.param_dtype)
    if not self.tied:
      shape = self._table_shape(self.width)
      self.value_table = self.param("values", self.table_init, shape, self.param_dtype)
    if self.learned_temperature:
      start = nn.initializers.constant(jnp.log(self.temperature))
      self.log_temperature = self.param("log_temperature", start, (), jnp.float32)

  def _check(self):
    super()._check()
    if self.tied and self.width != self.dim:
      raise ValueError(f"tied keys of width {self.dim} cannot be values of width {self.value_dim}")
    if self.width % self.subspaces and not self.additive:
      raise ValueError(f"subspaces {self.subspaces} do not divide value_dim {self.width}")
    if self.temperature <= 0 or self.forward_temperature < 0:
      raise ValueError(
        f"temperature {self.temperature} must be above 0 and forward_temperature"
        f" {self.forward_temperature} not below 0; 1 and 0 are usual"
      )

  @property
  def width(self) -> int:
    """Numbers of a result."""
    return self.dim if self.value_dim is None else self.value_dim

  def keys(self) -> Float[Array, "Q K C"]:
    """The keys."""
    return self.key_table

  def values(self) -> Float[Array, "Q K C"]:
    """The values; the keys where they are tied."""
    return self.key_table if self.tied else self.value_table

  def _compared(self, query):
    return self.response(query, self.keys())

  def _answer(self, vectors, query, response, train, mask):
    del vectors, query, mask
    warm = self.forward_temperature if train else 0.0
    own = jnp.exp(self.log_temperature) if self.learned_temperature else self.temperature
    return *quantize.softmax_quantized(response, self.values(), own, warm, self.additive), {}

  def _tables(self):
    return ("keys",) if self.tied else ("keys", "values")

  def logical_axes(self) -> dict:
    """Axes of keys and values."""
    axes = super().logical_axes()
    if self.learned_temperature:
      axes["params"]["log_temperature"] = ()
    return axes
