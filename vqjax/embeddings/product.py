"""The product-quantised embedding, with M fixed codes for each token."""

# codes [V, M] choose from values, of which a vector is composed in one of two ways:
#
#   additive=False   values [M, K, D/M]   M parts, one after another
#   additive=True    values [M, K, D]     the mean of M vectors of full width
#   rotated=True     values [M, K, C]     M parts, one after another, times `basis` [M C, D]
#
# With `shared` there is one table [1, K, ...] for all M codes. Lookup, table and `compact` call the
# same `product.compose` in float32 and round once at the end, so that they agree bit for bit.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vqjax.assign.multiple import checked_codes, code_dtype, mixed_radix
from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import bit_packing, product
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype, Size
from vqjax.variables import (
  Declaration,
  Initializer,
  Variable,
  composed_init,
  integer_variable,
  row_init,
)

__all__ = ["ProductEmbedding"]


class ProductEmbedding(Embedding):
  """Fixed codes with trainable values: K·D parameters and M codes for each token.

  It holds the product quantisation of a trained table, or codes that were learned before and fixed.
  The codes are the variable `codes` of the collection `codes`: they are saved and restored with the
  parameters, and never trained.

  Attributes:
    codes: number of values that a code chooses from, K.
    subspaces: number of codes of a token, M.
    shared: use one table of values for all M codes.
    additive: the vector is the mean of M vectors of width D; False: M parts of width D/M each.
    codes_init: (vocab, codes, subspaces) -> int [V, M], or the array.
    values_init: initialiser of the values [M or 1, K, D or D/M]; None: `composed_init`.
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the values.
    rotated: multiply the concatenated parts by a trainable matrix `basis`; M need not divide D.
  """

  codes: int
  subspaces: int
  shared: bool = False
  additive: bool = False
  codes_init: Callable[[int, int, int], np.ndarray] | np.ndarray | Array = mixed_radix
  values_init: Initializer | None = None
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32
  rotated: bool = dataclasses.field(default=False, kw_only=True)

  def declare(self) -> Declaration:
    """The values [M or 1, K, D or D/M], the codes [V, M], and the basis [M C, D]."""
    v, k, m = self.vocab, self.codes, self.subspaces
    width = self.dim if self.additive else product.part_width(self.dim, m)
    shape, axes = (1 if self.shared else m, k, width), ("subspaces", "sub_codes", "sub_embed")
    make = lambda: checked_codes(np.asarray(self.codes_init(v, k, m)), v, k, m)
    init = self.values_init or composed_init(self.dim, m if self.additive else 1)
    declared = {
      "values": Variable(shape, axes, init, self.param_dtype),
      "codes": integer_variable((v, m), ("vocab", "subspaces"), make, code_dtype(k), pad_value=0),
    }
    if self.rotated:
      shape, axes = (m * width, self.dim), ("rank", "table_embed")
      declared["basis"] = Variable(shape, axes, row_init, self.param_dtype)
    return declared

  def check(self) -> None:
    if self.codes < 1 or self.subspaces < 1:
      raise ValueError(
        f"`codes` and `subspaces` must be at least 1; got {self.codes} and {self.subspaces}. 32 and"
        " 25 are usual."
      )
    if not self.additive and not self.rotated and self.dim % self.subspaces:
      raise ValueError(
        f"`subspaces` must divide dim {self.dim}; got {self.subspaces}. Give a divisor, or"
        " additive=True."
      )
    if self.rotated and (self.additive or self.subspaces > self.dim):
      got = "additive=True" if self.additive else f"{self.subspaces} subspaces of dim {self.dim}"
      raise ValueError(f"`rotated` must be False with {got}; got True. Give rotated=False.")

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Product codes of contexts, for vectors that are M parts with values of their own."""
    if self.shared or self.additive or self.rotated or not self._is_free("codes_init"):
      return {}
    values, codes = text.products(self.codes, self.subspaces, self.dim)
    return {"codes_init": codes, "values_init": values}

  def flops_per_token(self) -> int:
    """The additions of M vectors where `additive`, the product where `rotated`; else zero."""
    if self.rotated:
      return 2 * product.part_width(self.dim, self.subspaces) * self.subspaces * self.dim
    return self.subspaces * self.dim if self.additive else 0

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    code = self._lookup(arrays["codes"], token, jnp.int32)
    return self._composed(code, arrays).astype(self._out)

  def _composed(self, code, arrays):
    values, basis = arrays["values"].astype(jnp.float32), arrays.get("basis")
    return product.compose(code, values, self.additive, basis)

  @property
  def _out(self):
    return jnp.dtype(self.dtype or self.param_dtype)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The vectors of the tokens, in `param_dtype`."""
    # Once a call: the passes of a loss read these rows instead of composing each tile again.
    rows = self._composed(arrays["codes"].astype(jnp.int32), arrays)
    return as_row_factory(rows.astype(self.param_dtype))

  def compact(self, variables: dict) -> CompactEmbedding:
    """The form for inference: bit-packed codes, the values, and the basis."""
    basis = variables["params"].get("basis")
    return CompactEmbedding(
      data=bit_packing.bit_packed(
        np.asarray(variables["codes"]["codes"]), bit_packing.bits_for(self.codes)
      ),
      values=np.asarray(variables["params"]["values"], np.float32),
      vocab=self.vocab,
      dim=self.dim,
      codes=self.codes,
      subspaces=self.subspaces,
      additive=self.additive,
      dtype=self._out.name,
      basis=None if basis is None else np.asarray(basis, np.float32),
    )

  def inference_size(self) -> Size:
    """The size of `compact`: float32 values, and codes at ceil(log2 K) bits."""
    size = self.size()
    codes = bit_packing.bit_packed_bytes(
      self.vocab, self.subspaces, bit_packing.bits_for(self.codes)
    )
    return size._replace(state_bytes=4 * size.params + codes)
