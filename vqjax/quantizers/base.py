"""The contract of quantisers, and what a quantiser inherits."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.layer import Layer
from vqjax.ops import product, quantize
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, composed_init

__all__ = ["Quantized", "Quantizer"]


class Quantized(NamedTuple):
  """The result of quantising vectors [*B, D].

  Attributes:
    vectors: the quantised vectors, [*B, D]; zeros where the mask is False.
    codes: int32 [*B, M].
    terms: terms of the training loss, by name.
  """

  vectors: Float[Array, "*B D"]
  codes: Int[Array, "*B M"]
  terms: dict[str, Float[Array, ""]]


class Quantizer(Layer):
  """A differentiable map from vectors [*B, D] to vectors given by M codes below K.

  In training (`train=True`) the responses are normalised by the batch, noise is drawn from the rng
  stream "sample", and the collection `batch_stats` is updated where the caller makes it mutable, as
  `metrics` is with the use of the codes. Outside training a vector's codes depend on that vector
  only. On a mesh, batch statistics are over the whole batch.

  Attributes:
    codes: number of choices of a code, K.
    subspaces: number of codes of a vector, M.
    dim: width of the vectors, D; None: an embedding sets its own.
    shared: use one table for all subspaces.
    additive: tables hold vectors of full width, and the result is the mean of the M chosen vectors;
      otherwise the result concatenates M parts, and M must divide D. All M tables compare the same
      full vector, where the reference implementation has M vectors of D numbers.
    normalize: normalise each code's responses over the tokens of a batch and the subspaces, without
      scale and offset. The chosen code is then not always that of the nearest vector.
    momentum: decay of the running mean and variance that are used outside training.
    epsilon: added to the variance.
    gumbel: factor of the Gumbel noise that is added to the responses in training.
    table_init: initialiser of the tables; None: `composed_init`.
    param_dtype: dtype of the parameters. The result has the dtype of the input vectors.
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
  table_init: Initializer | None = dataclasses.field(default=None, kw_only=True)
  param_dtype: Dtype = dataclasses.field(default=jnp.float32, kw_only=True)

  def declare(self) -> Declaration:
    """The running mean and variance of the responses [K]."""
    if not self.normalize:
      return {}

    def running_moment(start):
      init = lambda key, shape, dtype: jnp.full(shape, start, dtype)
      return Variable((self.codes,), ("norm",), init, collection="batch_stats", random=False)

    return {"mean": running_moment(0), "var": running_moment(1)}

  def of_width(self, width: int) -> "Quantizer":
    """A quantiser with results of this width, unless `dim` is set."""
    return self if self.dim is not None else self.clone(dim=width)

  def check(self) -> None:
    if self.dim is None:
      raise ValueError(
        f"`dim` of {type(self).__name__} must be given; got None. Give the width of the vectors,"
        " such as dim=64."
      )
    if self.dim < 1 or self.subspaces < 1:
      raise ValueError(
        f"`dim` and `subspaces` must be at least 1; got {self.dim} and {self.subspaces}."
        " 25 subspaces of 8 numbers are usual."
      )
    if not 2 <= self.codes < 2**31:
      raise ValueError(f"`codes` must be in [2, 2**31 - 1]; got {self.codes}. 32 is usual.")
    if self.dim % self.subspaces and not self.additive:
      raise ValueError(
        f"`subspaces` must divide dim {self.dim}; got {self.subspaces}. Give one of"
        f" {[m for m in range(1, self.dim + 1) if self.dim % m == 0]}, or additive=True."
      )
    if not 0 <= self.momentum < 1:
      raise ValueError(f"`momentum` must be in [0, 1); got {self.momentum}. 0.99 is usual.")
    check_not_negative(epsilon=self.epsilon, gumbel=self.gumbel)

  @property
  def width(self) -> int:
    """Width of a quantised vector."""
    return self.dim

  @property
  def value_shape(self) -> tuple[int, int, int]:
    """Shape of `values`: [M, or 1 where shared, K, C]."""
    return self._table_shape(self.width)

  @abc.abstractmethod
  def values(self) -> Float[Array, "Q K C"]:
    """The vectors that codes choose from; Q is 1 where `shared`, otherwise M."""

  @final
  def __call__(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
  ) -> Float[Array, "*B D"]:
    """The quantised vectors; what the mask excludes contributes to no statistic."""
    return self.quantized(vectors, train, mask).vectors

  @final
  def quantized(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
  ) -> Quantized:
    """The quantised vectors, their codes and the terms of the training loss."""
    if vectors.shape[-1] != self.dim:
      raise ValueError(
        f"`vectors` must have width dim={self.dim}; got {vectors.shape[-1]}. Give the quantiser"
        f" dim={vectors.shape[-1]}."
      )
    lead = vectors.shape[:-1]
    if mask is not None and mask.shape != lead:
      raise ValueError(
        f"`mask` must have shape {lead}; got {mask.shape}. Give one boolean for each vector."
      )
    compute = lambda vectors, mask: self._quantized(vectors, train, mask)
    return self._computed(compute, vectors, vectors, mask)

  def _quantized(self, vectors, train, mask):
    lead = vectors.shape[:-1]
    flat = vectors.reshape(math.prod(lead), self.dim)
    weight = None if mask is None else mask.reshape(math.prod(lead))
    # Masked vectors may be nan, which must reach neither a sum nor a gradient.
    flat = flat if weight is None else jnp.where(weight[:, None], flat, 0)
    query = self._queries(flat)
    row, codes, terms = self._quantize(flat, query, train, weight)
    row = row.astype(vectors.dtype)
    row = row if weight is None else jnp.where(weight[:, None], row, 0)
    if train and not self.is_initializing() and self.is_mutable_collection("metrics"):
      # For each subspace: the share of its codes that the batch uses, and their perplexity.
      counts = quantize.code_counts(codes, self.codes, weight)
      self.put_variable("metrics", "code_usage", (counts > 0).mean(axis=-1))
      self.put_variable("metrics", "code_perplexity", quantize.code_perplexity(counts))
    return Quantized(
      vectors=row.reshape(*lead, self.width),
      codes=codes.reshape(*lead, self.subspaces),
      terms=terms,
    )

  def flops_per_token(self) -> int:
    """Multiplications and additions of one vector's responses: every key is compared."""
    width = self.dim if self.additive else self.dim // self.subspaces
    return 2 * self.subspaces * self.codes * width

  @final
  def encode(self, vectors: Float[Array, "*B D"]) -> Int[Array, "*B M"]:
    """The codes of vectors, computed as outside training."""

    def codes(vectors):
      lead = vectors.shape[:-1]
      query = self._queries(vectors.reshape(math.prod(lead), self.dim))
      found = self._over_responses(largest, query, False, None)
      return found.reshape(*lead, self.subspaces)

    return self._computed(codes, vectors, vectors)

  @final
  def decode(self, codes: Int[Array, "*B M"]) -> Float[Array, "*B D"]:
    """The vectors of codes, in `param_dtype`."""
    compose = lambda codes: product.compose(codes, self.values(), self.additive)
    # The leading axes of one subspace's codes are those of the vectors.
    return self._computed(compose, codes[..., 0], codes)

  @final
  def responses(self, vectors: Float[Array, "*B D"]) -> Float[Array, "*B M K"]:
    """The score of each code for a vector, normalised as outside training."""

    def scores(vectors):
      query = self._queries(vectors.reshape(-1, self.dim))
      response = self._normalizer(query, False, None)(self._comparison()(query))
      return response.reshape(*vectors.shape[:-1], *response.shape[1:])

    return self._computed(scores, vectors, vectors)

  @abc.abstractmethod
  def _comparison(self) -> Callable[[Array], Array]:
    """A pure function: queries [N, P, C] -> raw responses [N, M, K], float32."""

  @abc.abstractmethod
  def _quantize(self, vectors, query, train, mask):
    """Rows [N, D], codes [N, M] and terms of vectors [N, D], queries [N, P, C]."""

  def _over_responses(self, function: Callable, query, train, mask) -> Any:
    """Call function(responses [n, M, K]) for all tokens, in chunks.

    The responses are normalised, with noise in training. See `ops.quantize.in_chunks`.
    """
    compare, normalize = self._comparison(), self._normalizer(query, train, mask)
    key = self.make_rng("sample") if train and self.gumbel else None

    def some(part):
      index, query = part
      response = normalize(compare(query))
      if key is not None:
        response += self.gumbel * quantize.noise(key, index, response.shape[1:])
      return function(response)

    return quantize.in_chunks(some, (jnp.arange(query.shape[0]), query), self._scores)

  @property
  def _scores(self) -> int:
    return self.subspaces * self.codes

  def _normalizer(self, query, train, mask) -> Callable[[Array], Array]:
    """A pure function that normalises responses; in training by this batch's moments."""
    if not self.normalize:
      return lambda response: response
    mean, var = self.array("mean"), self.array("var")
    if train:
      batch_mean, batch_var = quantize.response_moments(
        self._comparison(), query, mask, self._scores
      )
      if self.is_mutable_collection("batch_stats") and not self.is_initializing():
        # Unchanged by a batch without tokens.
        kept = jnp.float32(self.momentum)
        kept = kept if mask is None else jnp.where(mask.any(), kept, 1.0)
        for name, old, new in (("mean", mean, batch_mean), ("var", var, batch_var)):
          updated = kept * old + (1 - kept) * lax.stop_gradient(new)
          self.put_variable("batch_stats", name, updated)
      mean, var = batch_mean, batch_var
    return lambda response: (response - mean) * lax.rsqrt(var + self.epsilon)

  def _queries(self, vectors):
    """Vectors as [*B, M, C], or [*B, 1, D] where `additive`."""
    if self.additive:
      return vectors[..., None, :]
    return vectors.reshape(*vectors.shape[:-1], self.subspaces, self.dim // self.subspaces)

  def _table_shape(self, width: int) -> tuple[int, int, int]:
    own = width if self.additive else width // self.subspaces
    return 1 if self.shared else self.subspaces, self.codes, own

  def _table(self, width: int) -> Variable:
    """Declare a table [M or 1, K, C] of vectors of this width."""
    axes = "subspaces", "sub_codes", "sub_embed"
    init = self.table_init or composed_init(width, self.subspaces if self.additive else 1)
    return Variable(self._table_shape(width), axes, init, self.param_dtype)

  def _check_keys(self) -> None:
    """Raise ValueError where all subspaces would compare one vector with the same keys."""
    if self.additive and self.shared:
      raise ValueError(
        "`shared` must be False where `additive` is True, since all subspaces would choose the same"
        " code; got True. Give shared=False."
      )


def check_not_negative(**numbers: float) -> None:
  """Raise ValueError for a number that is negative or not finite."""
  for name, number in numbers.items():
    if not 0 <= number < math.inf:
      raise ValueError(f"`{name}` must be finite and not negative; got {number}. 0 is none.")


def largest(response):
  """The code of the largest response in each subspace."""
  return jnp.argmax(response, axis=-1).astype(jnp.int32)
