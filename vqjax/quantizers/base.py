"""What does every quantiser promise?"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
  is drawn from the rng stream "sample" and the collections `batch_stats`, `centroids` and `revival`
  are written where the caller has them mutable; otherwise a vector's codes depend on that vector
  alone. On a mesh, batch statistics are those of the whole batch.

  Attributes:
    codes: choices of a code, K.
    subspaces: codes of a vector, M.
    dim: width of the vectors, D; None: an embedding fills in its own.
    shared: all subspaces have one table.
    additive: tables have whole vectors, and the mean of the M chosen ones is the result; else M, a
      divisor of D, parts are side by side. All M tables are asked with the same whole vector, where
      the reference implementation has M vectors of D numbers for that.
    normalize: normalise each code's responses over the tokens of a batch and the subspaces; without
      scale and offset. The codes that follow are not always those of the nearest vectors.
    momentum: of the running mean and variance that are used outside training.
    epsilon: is added to the variance.
    gumbel: factor of the Gumbel noise that is added to the responses in training.
    table_init: initialiser of the tables.
    param_dtype: dtype of the parameters. The result has the dtype of the vectors given.
  """

  codes: int
  subspaces: int
  dim: int | None = None
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

  def of_width(self, width: int) -> "Quantizer":
    """The same quantiser, with results of this width where it has no `dim` yet."""
    return self if self.dim is not None else self.clone(dim=width)

  def _check(self):
    if self.dim is None:
      raise ValueError(
        f"{type(self).__name__} has no dim; give the width of the vectors, such as dim=64"
      )
    if self.dim < 1 or self.subspaces < 1:
      raise ValueError(f"dim {self.dim} and subspaces {self.subspaces} must be at least 1")
    if not 2 <= self.codes <= MOST_CODES:
      raise ValueError(
        f"codes {self.codes} are outside [2, {MOST_CODES}]: one tells nothing apart, and more do"
        " not fit an int32; 32 is usual"
      )
    if self.dim % self.subspaces and not self.additive:
      raise ValueError(
        f"subspaces {self.subspaces} do not divide dim {self.dim}; give one of"
        f" {[m for m in range(1, self.dim + 1) if self.dim % m == 0]}, or additive=True"
      )
    if not 0 <= self.momentum < 1:
      raise ValueError(f"momentum {self.momentum} is outside [0, 1); 0.99 is usual")
    check_amounts(epsilon=self.epsilon, gumbel=self.gumbel)

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
    lead = vectors.shape[:-1]
    if mask is not None and mask.shape != lead:
      raise ValueError(f"a mask of shape {mask.shape} for vectors of {lead}; give one a vector")
    flat = vectors.reshape(math.prod(lead), self.dim)
    weight = None if mask is None else mask.reshape(math.prod(lead))
    # What is masked may be no number: it is to reach neither a sum nor a gradient.
    flat = flat if weight is None else jnp.where(weight[:, None], flat, 0)
    query = self._parts(flat)
    row, codes, terms = self._answer(flat, query, train, weight)
    row = row.astype(vectors.dtype)
    row = row if weight is None else jnp.where(weight[:, None], row, 0)
    if train and not self.is_initializing():
      self._learn(lax.stop_gradient(query), codes, weight)
    shapes = (*lead, self.width), (*lead, self.subspaces)
    return Quantized(row.reshape(shapes[0]), codes.reshape(shapes[1]), terms)

  def _learn(self, query, codes, mask):
    """What a training batch leaves in the collections that are mutable, beside the moments.

    In `metrics`, of each subspace: the part of its codes that the batch uses (`code_usage`), and
    how many codes of equal use that is worth (`code_perplexity`).
    """
    del query
    if not self.is_mutable_collection("metrics"):
      return
    counts = quantize.code_counts(codes, self.codes, mask)
    found = {
      "code_usage": (counts > 0).mean(axis=-1),
      "code_perplexity": quantize.code_perplexity(counts),
    }
    for name, value in found.items():
      self.sow("metrics", name, value, lambda old, new: new, lambda: None)

  def operations(self) -> int:
    """Multiplications and additions of a vector's responses: it is compared with every key."""
    width = self.dim if self.additive else self.dim // self.subspaces
    return 2 * self.subspaces * self.codes * width

  def encode(self, vectors: Float[Array, "*B D"]) -> Int[Array, "*B M"]:
    """The codes of vectors, as outside training."""
    lead = vectors.shape[:-1]
    query = self._parts(vectors.reshape(math.prod(lead), self.dim))
    codes = self._over_responses(largest, query, False, None)
    return codes.reshape(*lead, self.subspaces)

  def decode(self, codes: Int[Array, "*B M"]) -> Float[Array, "*B D"]:
    """What codes stand for, in `param_dtype`."""
    return product.compose(codes, self.values(), self.additive)

  def responses(self, vectors: Float[Array, "*B D"]) -> Float[Array, "*B M K"]:
    """How near each key is to a vector, normalised as outside training: the largest wins."""
    query = self._parts(vectors.reshape(-1, self.dim))
    found = self._normal(query, False, None)(self._comparison()(query))
    return found.reshape(*vectors.shape[:-1], *found.shape[1:])

  @abc.abstractmethod
  def _comparison(self) -> Callable[[Array], Array]:
    """A pure function: queries [N, P, C] -> the responses [N, M, K] as they are, float32."""

  @abc.abstractmethod
  def _answer(self, vectors, query, train, mask):
    """(rows [N, D], codes [N, M], terms) of vectors [N, D], which are queries [N, P, C]."""

  def _over_responses(self, function: Callable, query, train, mask) -> Any:
    """function(responses [n, M, K]) of all tokens, a few at a time: `ops.quantize.in_chunks`.

    The responses are normalised, with noise in training.
    """
    compare, normal = self._comparison(), self._normal(query, train, mask)
    key = self.make_rng("sample") if train and self.gumbel else None

    def some(part):
      index, query = part
      response = normal(compare(query))
      if key is not None:
        response += self.gumbel * quantize.noise(key, index, response.shape[1:])
      return function(response)

    return quantize.in_chunks(some, (jnp.arange(len(query)), query), self._scores)

  @property
  def _scores(self) -> int:
    return self.subspaces * self.codes

  def _normal(self, query, train, mask) -> Callable[[Array], Array]:
    """A pure function that normalises responses; in training by this batch, which is kept."""
    if not self.normalize:
      return lambda response: response
    mean, var = self.mean.value, self.var.value
    if train:
      mean, var = quantize.moments_of(self._comparison(), query, mask, self._scores)
      self._keep(mean, var, mask)
    return lambda response: (response - mean) * lax.rsqrt(var + self.epsilon)

  def _keep(self, mean, var, mask):
    if not self.is_mutable_collection("batch_stats") or self.is_initializing():
      return
    update = lambda old, new: running(old, lax.stop_gradient(new), self.momentum, mask)
    self.mean.value, self.var.value = update(self.mean.value, mean), update(self.var.value, var)

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


def check_amounts(**numbers: float) -> None:
  """ValueError for a number that is negative or not finite."""
  for name, number in numbers.items():
    if not 0 <= number < math.inf:
      raise ValueError(f"{name} {number} is negative or not finite; 0 is none")


def running(old, new, decay, mask):
  """The running mean after a batch. No token, no news."""
  kept = jnp.float32(decay) if mask is None else jnp.where(mask.any(), decay, 1.0)
  return kept * old + (1 - kept) * new


def largest(response):
  """The code of the largest response in each subspace."""
  return jnp.argmax(response, axis=-1).astype(jnp.int32)


MOST_CODES = 2**31 - 1
TABLE_AXES = "subspaces", "sub_codes", "sub_embed"
