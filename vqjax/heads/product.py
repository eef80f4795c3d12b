"""Product-quantised heads, whose rows are composed of M sub-vectors each."""

# A row is composed of M sub-vectors, one of each table; with M = 3:
#
#   codes [V, M]         tables [M, K, D/M]
#   v:  7  2  5    -->   | tables[0, 7] | tables[1, 2] | tables[2, 5] |     row of v, [D]
#
#   loss, many vectors   tiles of rows are composed, then multiplied        (`LinearHead`)
#   few vectors          hidden · every sub-vector, [M, K, *B], and for each token the sum of the M
#                        numbers that its codes name: no row exists         (`ProductHead._scores`)
#
# With `rotated` rows are composed vectors times `basis`, by which a hidden vector is multiplied
# once instead: no row is.
#
# `LearnedProductHead` has latent rows [V, D] instead of codes: the codes of a row are its nearest
# sub-vectors, found once a call for all tiles, and it gets the gradient of the row they compose.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.assign.multiple import checked_codes, code_dtype, mixed_radix
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops import device, product, quantize, sampling, softmax, tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocabulary import mean_over
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["LearnedProductHead", "ProductHead"]


def sub_vector_init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
  """Normal sub-vectors [M, K, D/M] of variance 1/D."""
  subspaces, _, width = shape
  return jax.random.normal(key, shape, dtype) * (subspaces * width) ** -0.5


class _ProductTables(LinearHead):
  """Base class of heads whose rows are composed of tables [M, K, D/M].

  Attributes:
    codes: number of sub-vectors of each table, K.
    subspaces: number of codes of a token, M; divides dim.
    token_bias: add a score for each token.
    table_init: initialiser of the [M, K, D/M] tables.
    bias_init: initialiser of the [V] token bias.
  """

  codes: int
  subspaces: int
  token_bias: bool = False
  table_init: Initializer = sub_vector_init
  bias_init: Initializer = nn.initializers.zeros_init()

  rotated = False  # a field of `ProductHead`

  def declare(self) -> Declaration:
    """The tables [M, K, D/M] and the bias [V]."""
    shape = self.subspaces, self.codes, product.part_width(self.dim, self.subspaces)
    axes = "subspaces", "sub_codes", "sub_embed"
    declared = {"tables": Variable(shape, axes, self.table_init, self.param_dtype)}
    if self.token_bias:
      declared["token_bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The tables of product codes of contexts, and each token's frequency."""
    if self.rotated:
      return super()._of_text(text)
    tables, _ = text.products(self.codes, self.subspaces, self.dim)
    return super()._of_text(text) | {"table_init": tables}

  def check(self) -> None:
    super().check()
    if self.codes < 1:
      raise ValueError(f"`codes` must be at least 1; got {self.codes}. 256 is usual.")
    if self.rotated and not 1 <= self.subspaces <= self.dim:
      raise ValueError(
        f"`subspaces` must be in [1, dim {self.dim}]; got {self.subspaces}. Give dim / 8."
      )
    if self.subspaces < 1 or (not self.rotated and self.dim % self.subspaces):
      raise ValueError(
        f"`subspaces` must divide dim {self.dim}; got {self.subspaces}. Give one of"
        f" {[m for m in range(1, self.dim + 1) if self.dim % m == 0]}."
      )


def _rotated(codes_WM, shared):
  tables_MKC, basis_PD = shared
  return product.compose(codes_WM, tables_MKC, basis=basis_PD)


class ProductHead(_ProductTables):
  """softmax(hidden · rowᵀ + bias), each row composed of M sub-vectors.

  K·D parameters (and V for a bias) and V·M codes represent V·D numbers. The loss is exact, in tiles
  of rows that are composed where they are used; decoding a few rows sums M gathered numbers for
  each token and composes no row. The codes are the variable `codes` of the collection `codes`: they
  come from `codes_init` or from a conversion (`vqjax.convert`) and are never trained;
  `LearnedProductHead` learns them. Source: the future work of VQ-Logits; Jégou et al., Product
  quantization for nearest neighbor search, 2011.

  Attributes:
    codes_init: (vocab, codes, subspaces) -> int [V, M], or the array.
    rotated: multiply the composed vectors by a trainable matrix `basis`; M need not divide D.
  """

  codes_init: Callable[[int, int, int], np.ndarray] | np.ndarray | Array = mixed_radix
  rotated: bool = dataclasses.field(default=False, kw_only=True)

  def declare(self) -> Declaration:
    """The tables [M, K, D/M], the bias [V], the codes [V, M] and the basis [M C, D]."""
    v, k, m = self.vocab, self.codes, self.subspaces
    make = lambda: checked_codes(np.asarray(self.codes_init(v, k, m)), v, k, m)
    declared = super().declare() | {
      "codes": integer_variable((v, m), ("vocab", "subspaces"), make, code_dtype(k), pad_value=0)
    }
    if self.rotated:
      shape = m * product.part_width(self.dim, m), self.dim
      declared["basis"] = Variable(shape, ("rank", "embed"), row_init, self.param_dtype)
    return declared

  def flops_per_token(self) -> int:
    """One product of composed width for each token, and that with the basis."""
    width = self.subspaces * product.part_width(self.dim, self.subspaces)
    return 2 * width * (self.vocab + self.rotated * self.dim)

  def _projected(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B P"]:
    if "basis" not in arrays:
      return hidden
    basis = arrays["basis"]
    dtype = self.dtype or jnp.promote_types(hidden.dtype, basis.dtype)
    return softmax.linear_scores(hidden, basis, dtype=dtype).astype(dtype)

  def _linear(self, arrays: Arrays) -> tuple[RowFactory, Float[Array, "V"] | None]:
    if "basis" not in arrays:
      return super()._linear(arrays)
    shared = arrays["tables"], arrays["basis"]
    return RowFactory(arrays["codes"], shared, _rotated), arrays["bias"]

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    found = super()._of_text(text)
    if self.rotated:
      return found
    if not self._is_free("codes_init"):
      # The tables belong to other codes.
      return found | {"table_init": None}
    _, codes = text.products(self.codes, self.subspaces, self.dim)
    return found | {"codes_init": codes}

  def _rows(self, arrays: Arrays) -> RowFactory:
    return RowFactory(arrays["codes"], arrays["tables"], product.compose)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """Blocks of tokens; few rows of `hidden` are scored by sums of gathered numbers."""
    batch = hidden.shape[:-1]
    if not product.prefers_sums(math.prod(batch), self.subspaces, self.dim):
      return super()._scores(arrays, hidden)
    codes, bias, tables = arrays["codes"], arrays["bias"], arrays["tables"]
    hidden = self._projected(arrays, hidden)
    dtype = self._operand_dtype(hidden, tables)
    partial_MKB = product.partial_scores(hidden, tables, dtype)
    # The cap is of the sum, not of its parts.
    options = ScoreOptions(output=self._output())

    def finish(sum_WB, cut):
      return options.finish_rows(sum_WB, cut(bias))

    # Whole where it can be stored: `summed_scores` has tiles of its own.
    if math.prod(batch) * codes.shape[0] <= device.current().stored:
      sum_VB = product.summed_scores(partial_MKB, codes)
      return sampling.stored_block(sum_VB, self.vocab, finish, self.vocab_axis)
    scores = lambda cut: finish(product.summed_scores(partial_MKB, cut(codes)), cut)
    return sampling.row_blocks(batch, codes.shape[0], self.vocab, scores, self.vocab_axis)


class LearnedProductHead(_ProductTables):
  """A `ProductHead` whose codes are learned with a straight-through estimator.

  Each token has a latent row of D numbers, and its row is composed of the sub-vectors nearest to
  the latent row. The tables get the gradient of the composed rows; the latent row gets the gradient
  of its row unchanged, and `commitment` pulls it towards the row. Training needs V·D parameters
  more than inference: `vqjax.convert.frozen` gives the variables of the ProductHead. Source: VQ-VAE
  (van den Oord et al., 2017), Eq. 3, applied to the rows of the weight; only the loss moves the
  tables.

  Attributes:
    latent_init: initialiser of the [V, D] latent rows.
    commitment: coefficient of the squared distance between latent rows and rows, the mean over the
      tokens of the batch.
  """

  latent_init: Initializer = row_init
  commitment: float = 0.25

  def declare(self) -> Declaration:
    """The tables [M, K, D/M], the bias [V] and the latent rows [V, D]."""
    latent = Variable(
      (self.vocab, self.dim),
      ("vocab", "table_embed"),
      self.latent_init,
      self.param_dtype,
      pad_value=0,
    )
    return super().declare() | {"latent": latent}

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    return super()._of_text(text) | {"latent_init": text.contexts(self.dim)}

  def _rows(self, arrays: Arrays) -> RowFactory:
    latent, tables = arrays["latent"], arrays["tables"]
    # Once for all tiles, which the forward and the backward pass compose anew.
    codes = product.nearest_codes(*map(lax.stop_gradient, (latent, tables)))
    codes = codes.astype(code_dtype(self.codes))
    return RowFactory((latent, codes), tables, product.straight_through_rows)

  def _loss_terms(self, arrays, hidden, token, known, counted):
    log_prob, terms = super()._loss_terms(arrays, hidden, token, known, counted)
    token_N = token.reshape(-1)
    latent_ND = vocab_parallel.sharded_lookup(arrays["latent"], token_N, self.vocab_axis)
    # Of the commitment the latent row alone has a gradient: the loss moves the tables.
    tables = lax.stop_gradient(arrays["tables"])

    def distances(latent_ND):
      codes = product.nearest_codes(lax.stop_gradient(latent_ND), tables)
      row_ND = product.compose(codes, tables)
      return ((latent_ND - row_ND).astype(jnp.float32) ** 2).sum(axis=-1)

    # Of 2^13 tokens at once: TPUs hold each of the M parts of a row in 128 numbers.
    distance_N = quantize.in_chunks(distances, latent_ND, max(1, tiles.most_scores() >> 13))
    commitment = self.commitment * mean_over(distance_N, known.reshape(-1))
    return log_prob, terms | {"commitment": commitment}
