"""What does every quantiser promise?"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import product, quantize
from vqjax.types import Dtype


class Quantized(NamedTuple):
  """What a quantiser makes of vectors.

  Attributes:
    vectors: [*B, D]; zeros where the mask is False.
    codes: int32 [*B, M].
    terms: terms of the training loss, by name.
  """

  vectors: Float[Array, "*B D"]
  codes: Int[Array, "*B M"]
  terms: dict[str, Float[Array, ""]]


class Quantizer(nn.Module):
  """Vectors [*B, D] -> vectors [*B, D] that M codes of K each stand for, differentiable.

  It serves any layer. In training (`train=True`) the responses are normalised by the batch, noise
  is drawn from the rng stream "sample" and the collections `batch_stats` and `centroids` are
  written where the caller has them mutable; otherwise a vector's codes depend on that vector alone.
  On a mesh, batch statistics are those of the whole batch.

  Attributes:
    dim: width of the vectors, D.
    codes: choices of a code, K.
    subspaces: codes of a vector, M.
    shared: all subspaces have one table.
    additive: tables have whole vectors, and the mean of the M chosen ones is the result; else M, a
      divisor of D, parts are side by side.
    normalize: normalise each code's responses over the tokens of a batch and the subspaces; without
      scale and offset. The codes that follow are not always those of the nearest vectors.
    momentum: of the running mean and variance that are used outside training.
    epsilon: is added to the variance.
    gumbel: factor of the Gumbel noise that is added to the responses in training.
    table_init: initialiser of the tables.
    param_dtype: dtype of the parameters. The result has the dtype of the vectors given.
  """

  dim: int
  codes: int
  subspaces: int
  shared: bool = dataclasses.field(default=False, kw_only=True)
  additive: bool = dataclasses.field(default=False, kw_only=True)
  normalize: bool = dataclasses.field(default=True, kw_only=True)
  momentum: float = dataclasses.field(default=0.99, kw_only=True)
  epsilon: float = dataclasses.field(default=1e-3, kw_only=True)
  gumbel: float = dataclasses.field(default=0.0, kw_only=True)
  table_init: nn.initializers.Initializer = dataclasses.field(
    default=nn.initializers.normal(0.1), kw_only=True
  )
  param_dtype: Dtype = dataclasses.field(default=jnp.float32, kw_only=True)

  def setup(self):
    self._check()
    if self.normalize:
      zeros, ones = (lambda: jnp.zeros(self.codes)), (lambda: jnp.ones(self.codes))
      self.mean = self.variable("batch_stats", "mean", zeros)
      self.var = self.variable("batch_stats", "var", ones)

  def _check(self):
    if self.codes < 2:
      raise ValueError(f"codes {self.codes} tell nothing apart; give at least 2, 32 is usual")
    if self.subspaces < 1 or (self.dim % self.subspaces and not self.additive):
      raise ValueError(
        f"subspaces {self.subspaces} do not divide dim {self.dim}; give one of"
        f" {[m for m in range(1, self.dim + 1) if self.dim % m == 0]}, or additive=True"
      )

  @property
  def width(self) -> int:
    """Numbers of a result."""
    return self.dim

  @property
  def value_shape(self) -> tuple[int, int, int]:
    """Shape of `values`: [M, or 1 where shared, K, C]."""
    return self._table_shape(self.width)

  @abc.abstractmethod
  def values(self) -> Float[Array, "Q K C"]:
    """What the result is made of: ships, beside the codes. Q is 1 where it is shared, else M."""

  def __call__(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
  ) -> Float[Array, "*B D"]:
    """The vectors that the codes stand for. Tokens outside the mask count nowhere."""
    return self.quantized(vectors, train, mask).vectors

  def quantized(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
  ) -> Quantized:
    """The same, with the codes and what they add to a training loss."""
    if vectors.shape[-1] != self.dim:
      raise ValueError(f"vectors of width {vectors.shape[-1]} for a quantizer of dim {self.dim}")
    query = self._parts(vectors)
    response = self.responses(query, train, mask)
    row, codes, terms = self._answer(vectors, query, response, train, mask)
    row = row.astype(vectors.dtype)
    return Quantized(row if mask is None else jnp.where(mask[..., None], row, 0), codes, terms)

  def operations(self) -> int:
    """Multiplications and additions of a vector's responses: it is compared with every key."""
    width = self.dim if self.additive else self.dim // self.subspaces
    return 2 * self.subspaces * self.codes * width

  def encode(self, vectors: Float[Array, "*B D"]) -> Int[Array, "*B M"]:
    """The codes of vectors, as outside training."""
    response = self.responses(self._parts(vectors), False, None)
    return jnp.argmax(response, axis=-1).astype(jnp.int32)

  def decode(self, codes: Int[Array, "*B M"]) -> Float[Array, "*B D"]:
    """What codes stand for, in `param_dtype`."""
    return product.compose(codes, self.values(), self.additive)

  def responses(
    self, query: Float[Array, "*B P C"], train: bool, mask: Bool[Array, "*B"] | None
  ) -> Float[Array, "*B M K"]:
    """How near each key is to a query, normalised, with noise in training: the largest wins."""
    response = self._compared(query)
    if self.normalize:
      response = self._normalized(response, train, mask)
    if train and self.gumbel:
      noise = jax.random.gumbel(self.make_rng("sample"), response.shape)
      response = response + self.gumbel * noise
    return response

  @abc.abstractmethod
  def _compared(self, query):
    """The responses as they are."""

  @abc.abstractmethod
  def _answer(self, vectors, query, response, train, mask):
    """(rows, codes, terms) of the responses."""

  def _normalized(self, response, train, mask):
    if not train:
      mean, var = self.mean.value, self.var.value
    else:
      mean, var = quantize.moments(response, mask)
      if self.is_mutable_collection("batch_stats") and not self.is_initializing():
        kept = jnp.float32(self.momentum)
        if mask is not None:
          kept = jnp.where(mask.any(), kept, 1.0)  # no token, no news
        update = lambda old, new: kept * old + (1 - kept) * lax.stop_gradient(new)
        self.mean.value, self.var.value = update(self.mean.value, mean), update(self.var.value, var)
    return (response - mean) * lax.rsqrt(var + self.epsilon)

  def _parts(self, vectors):
    """[*B, M, C], or [*B, 1, D] where vectors are not cut."""
    if self.additive:
      return vectors[..., None, :]
    return vectors.reshape(*vectors.shape[:-1], self.subspaces, self.dim // self.subspaces)

  def _table_shape(self, width: int) -> tuple[int, int, int]:
    own = width if self.additive else width // self.subspaces
    return 1 if self.shared else self.subspaces, self.codes, own

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    tables = dict.fromkeys(self._tables(), TABLE_AXES)
    axes: dict = {"params": tables} if tables else {}
    if self.normalize:
      axes["batch_stats"] = {"mean": ("norm",), "var": ("norm",)}
    return axes

  @abc.abstractmethod
  def _tables(self) -> tuple[str, ...]:
    """Names of the parameters that are tables."""


TABLE_AXES = "subspaces", "sub_codes", "sub_embed"
