"""How are codes learned through a softmax over the choices: of keys (DPQ-SX), or of a network?"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.ops import quantize
from vqjax.quantizers.base import Quantizer, check_amounts
from vqjax.quantizers.revival import KeyedQuantizer


class _ChosenBySoftmax(Quantizer):
  """What quantisers share whose result is the value of the largest of K responses.

  Attributes:
    value_dim: width of the result; None: that of the vectors.
    temperature: of the softmax in the backward pass.
    forward_temperature: of the forward pass; 0 chooses one value. What ships is the chosen one.
    learned_temperature: that of the backward pass is a parameter, begun at `temperature`.
  """

  value_dim: int | None = dataclasses.field(default=None, kw_only=True)
  temperature: float = dataclasses.field(default=1.0, kw_only=True)
  forward_temperature: float = dataclasses.field(default=0.0, kw_only=True)
  learned_temperature: bool = dataclasses.field(default=False, kw_only=True)

  def setup(self):
    super().setup()
    if "values" in self._tables():
      shape = self._table_shape(self.width)
      self.value_table = self.param("values", self.table_init, shape, self.param_dtype)
    if self.learned_temperature:
      start = nn.initializers.constant(jnp.log(self.temperature))
      self.log_temperature = self.param("log_temperature", start, (), jnp.float32)

  def _check(self):
    super()._check()
    if self.width % self.subspaces and not self.additive:
      raise ValueError(f"subspaces {self.subspaces} do not divide value_dim {self.width}")
    if not 0 < self.temperature < math.inf:
      raise ValueError(f"temperature {self.temperature} must be above 0 and finite; 1 is usual")
    check_amounts(forward_temperature=self.forward_temperature)

  @property
  def width(self) -> int:
    """Numbers of a result."""
    return self.dim if self.value_dim is None else self.value_dim

  def values(self) -> Float[Array, "Q K C"]:
    """The values."""
    return jnp.asarray(self.value_table)

  def _answer(self, vectors, query, train, mask):
    del vectors
    values, warm = self.values(), self.forward_temperature if train else 0.0
    own = jnp.exp(self.log_temperature) if self.learned_temperature else self.temperature
    choose = lambda r: quantize.softmax_quantized(r, values, own, warm, self.additive)
    return *self._over_responses(choose, query, train, mask), {}

  def _tables(self):
    return ("values",)

  def logical_axes(self) -> dict:
    """Axes of the tables and of what is learned beside them."""
    axes = super().logical_axes()
    if self.learned_temperature:
      axes["params"]["log_temperature"] = ()
    return axes


class SoftmaxQuantizer(_ChosenBySoftmax, KeyedQuantizer):
  """The value of the key of largest response, with the gradient of the softmax of all responses.

  Exactly the chosen value in the forward pass; the gradient of keys and vectors goes through
  softmax(responses / temperature): DPQ-SX, Eq. 3-5. That of the values is of the one-hot choice,
  which is exact and what the reference implementation has; Eq. 5 as printed would give them that of
  the soft weights.

  Attributes:
    response: how near a key is: `ops.quantize.dot_response`, `euclidean_response` or
      `cosine_response`.
    tied: the keys are the values, of one width then.
  """

  response: quantize.Response = dataclasses.field(default=quantize.dot_response, kw_only=True)
  tied: bool = dataclasses.field(default=False, kw_only=True)

  def setup(self):
    super().setup()
    shape = self._table_shape(self.dim)
    self.key_table = self.param("keys", self.table_init, shape, self.param_dtype)

  def _check(self):
    super()._check()
    if self.tied and self.width != self.dim:
      raise ValueError(f"tied keys of width {self.dim} cannot be values of width {self.value_dim}")

  def _own_keys(self):
    return self.key_table

  def values(self) -> Float[Array, "Q K C"]:
    """The values; the keys where they are tied."""
    return self.keys() if self.tied else super().values()

  def _comparison(self):
    keys = self.keys()
    return lambda query: self.response(query, keys)

  def _tables(self):
    return ("keys",) if self.tied else ("keys", "values")


class EncoderQuantizer(_ChosenBySoftmax):
  """Codes by a network of two layers: log softplus(W2 tanh(W1 x)) are the responses.

  Of a trained table, the codes are those of Shu and Nakayama, Compressing word embeddings via deep
  compositional code learning, 2018: `additive`, Gumbel noise in training, `forward_temperature` 1,
  without normalisation.

  Attributes:
    hidden: width of the hidden layer; None: M·K/2.
  """

  hidden: int | None = dataclasses.field(default=None, kw_only=True)

  def setup(self):
    super().setup()
    choices, hidden = self.subspaces * self.codes, self._hidden
    kernel, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    # No modules: they are used inside of a loop.
    self.inner = new("inner_kernel", kernel, self.dim, hidden), new("inner_bias", zeros, hidden)
    self.outer = new("outer_kernel", kernel, hidden, choices), new("outer_bias", zeros, choices)

  @property
  def _hidden(self) -> int:
    return self.subspaces * self.codes // 2 if self.hidden is None else self.hidden

  def operations(self) -> int:
    """Those of the two layers."""
    return 2 * self._hidden * (self.dim + self.subspaces * self.codes)

  def _parts(self, vectors):
    return vectors

  def _comparison(self):
    (inner, inner_bias), (outer, outer_bias) = self.inner, self.outer

    def compare(query):
      found = jax.nn.softplus(jnp.tanh(query @ inner + inner_bias) @ outer + outer_bias)
      found = jnp.log(found.astype(jnp.float32) + TINY)
      return found.reshape(-1, self.subspaces, self.codes)

    return compare

  def logical_axes(self) -> dict:
    """Axes of the values and of the two layers."""
    axes = super().logical_axes()
    for name, names in (("inner", ("embed", "mlp")), ("outer", ("mlp", "sub_codes"))):
      axes["params"] |= {f"{name}_kernel": names, f"{name}_bias": names[1:]}
    return axes


class FreeQuantizer(_ChosenBySoftmax):
  """Codes that are parameters: a vector [M·K] of a token's own is its responses.

  KD codes learned end to end: Chen, Min and Sun, Learning K-way D-dimensional discrete codes for
  compact embedding representations, 2018; `value_dim` is the width of the result.
  """

  def of_width(self, width: int) -> "FreeQuantizer":
    """The same quantiser, with results of this width where it has no `dim` yet."""
    choices = self.subspaces * self.codes
    return self if self.dim is not None else self.clone(dim=choices, value_dim=width)

  def _check(self):
    super()._check()
    choices = self.subspaces * self.codes
    if self.dim != choices or self.value_dim is None:
      raise ValueError(
        f"dim {self.dim} must be the {choices} responses of {self.subspaces} codes of {self.codes},"
        f" and value_dim ({self.value_dim}) the width of the result"
      )

  def operations(self) -> int:
    """None: the responses are there."""
    return 0

  def _parts(self, vectors):
    return vectors.reshape(*vectors.shape[:-1], self.subspaces, self.codes)

  def _comparison(self):
    return lambda query: query.astype(jnp.float32)


TINY = 1e-8
"""Keeps the logarithm of a response finite."""
