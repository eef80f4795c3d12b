"""Quantisers trained through a softmax over codes, such as DPQ-SX."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.ops import quantize
from vqjax.quantizers.base import Quantizer, check_not_negative
from vqjax.variables import Declaration, Variable

__all__ = ["EncoderQuantizer", "FreeQuantizer", "SoftmaxQuantizer"]


class _ChosenBySoftmax(Quantizer):
  """Base class of quantisers that choose the value of the largest response.

  Attributes:
    value_dim: width of the result; None: the width of the vectors.
    temperature: temperature of the softmax in the backward pass.
    forward_temperature: temperature of the forward pass in training; 0 chooses one value, as
      inference does.
  """

  value_dim: int | None = dataclasses.field(default=None, kw_only=True)
  temperature: float = dataclasses.field(default=1.0, kw_only=True)
  forward_temperature: float = dataclasses.field(default=0.0, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and the values [M or 1, K, C]."""
    return super().declare() | {"values": self._table(self.width)}

  def check(self) -> None:
    super().check()
    if self.width % self.subspaces and not self.additive:
      raise ValueError(
        f"`value_dim` must be a multiple of subspaces {self.subspaces}; got {self.width}."
        " Give a multiple, or additive=True."
      )
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f"`temperature` must be positive and finite; got {self.temperature}. 1 is usual."
      )
    check_not_negative(forward_temperature=self.forward_temperature)

  @property
  def width(self) -> int:
    """Width of a quantised vector."""
    return self.dim if self.value_dim is None else self.value_dim

  def values(self) -> Float[Array, "Q K C"]:
    """The values."""
    return self.array("values")

  def _quantize(self, vectors, query, train, mask):
    del vectors
    values, forward = self.values(), self.forward_temperature if train else 0.0
    choose = lambda response: quantize.softmax_quantized(
      response, values, self.temperature, forward, self.additive
    )
    row, codes = self._over_responses(choose, query, train, mask)
    return row, codes, {}


class SoftmaxQuantizer(_ChosenBySoftmax):
  """The value of the key of the largest product, trained through a softmax.

  The forward pass gives the chosen value exactly. The gradient of keys and vectors goes through
  softmax(products / temperature): DPQ-SX, Eq. 3-5. The gradient of the values is that of the
  one-hot choice, which is exact and agrees with the reference implementation; Eq. 5 as printed
  would use the soft weights.

  Attributes:
    tied: use the keys as values; both have one width then.
  """

  tied: bool = dataclasses.field(default=False, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and the keys [M or 1, K, C]; no values where `tied`."""
    declared = super().declare() | {"keys": self._table(self.dim)}
    if self.tied:
      del declared["values"]
    return declared

  def check(self) -> None:
    super().check()
    self._check_keys()
    if self.tied and self.width != self.dim:
      raise ValueError(
        f"`value_dim` must be dim {self.dim} where `tied` is True; got {self.value_dim}."
        " Leave it out, or give tied=False."
      )

  def values(self) -> Float[Array, "Q K C"]:
    """The values; the keys where they are tied."""
    return self.array("keys") if self.tied else super().values()

  def _comparison(self):
    keys = self.array("keys")
    return lambda query: quantize.dot_response(query, keys)


class EncoderQuantizer(_ChosenBySoftmax):
  """Codes from a network of two layers.

  The responses are log softplus(W2 tanh(W1 x)). With `additive`, Gumbel noise in training,
  `forward_temperature` 1, no normalisation and a trained table as input, the codes are those of Shu
  and Nakayama, Compressing word embeddings via deep compositional code learning, 2018.

  Attributes:
    hidden: width of the hidden layer; None: M·K/2.
  """

  hidden: int | None = dataclasses.field(default=None, kw_only=True)

  def declare(self) -> Declaration:
    """The base's variables, and the kernels and biases of the two layers."""
    choices, hidden = self.subspaces * self.codes, self._hidden
    kernel, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
    new = lambda shape, axes, init: Variable(shape, axes, init, self.param_dtype)
    # Parameters instead of submodules, because they are used inside of a loop.
    return super().declare() | {
      "inner_kernel": new((self.dim, hidden), ("embed", "mlp"), kernel),
      "inner_bias": new((hidden,), ("mlp",), zeros),
      "outer_kernel": new((hidden, choices), ("mlp", "sub_codes"), kernel),
      "outer_bias": new((choices,), ("sub_codes",), zeros),
    }

  @property
  def _hidden(self) -> int:
    return self.subspaces * self.codes // 2 if self.hidden is None else self.hidden

  def flops_per_token(self) -> int:
    """The operations of the two layers."""
    return 2 * self._hidden * (self.dim + self.subspaces * self.codes)

  def _queries(self, vectors):
    return vectors

  def _comparison(self):
    inner, inner_bias = self.array("inner_kernel"), self.array("inner_bias")
    outer, outer_bias = self.array("outer_kernel"), self.array("outer_bias")

    def compare(query):
      response = jax.nn.softplus(jnp.tanh(query @ inner + inner_bias) @ outer + outer_bias)
      # 1e-8 keeps the logarithm finite.
      response = jnp.log(response.astype(jnp.float32) + 1e-8)
      return response.reshape(-1, self.subspaces, self.codes)

    return compare


class FreeQuantizer(_ChosenBySoftmax):
  """Codes that are parameters: a token's vector [M·K] holds its responses.

  Source: KD codes learned end to end, Chen, Min and Sun, Learning K-way D-dimensional discrete
  codes for compact embedding representations, 2018. `value_dim` is the width of the result.
  """

  def of_width(self, width: int) -> "FreeQuantizer":
    """A quantiser with results of this width, unless `dim` is set."""
    choices = self.subspaces * self.codes
    return self if self.dim is not None else self.clone(dim=choices, value_dim=width)

  def check(self) -> None:
    super().check()
    choices = self.subspaces * self.codes
    if self.dim != choices or self.value_dim is None:
      raise ValueError(
        f"`dim` must be subspaces · codes = {choices}, and `value_dim` the width of the result; got"
        f" {self.dim} and {self.value_dim}. Leave dim out: an embedding sets both."
      )

  def flops_per_token(self) -> int:
    """Zero: the vector holds the responses."""
    return 0

  def _queries(self, vectors):
    return vectors.reshape(*vectors.shape[:-1], self.subspaces, self.codes)

  def _comparison(self):
    return lambda query: query.astype(jnp.float32)
