"""The dense embedding, a table [V, D]."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["DenseEmbedding"]


class DenseEmbedding(Embedding):
  """One free vector for each token: V·D parameters.

  Attributes:
    weight_init: initialiser of the [V, D] table.
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the parameters.
  """

  weight_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The table [V, D]."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    return {"weight": Variable(shape, axes, self.weight_init, self.param_dtype, pad_value=0)}

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Rows that are contexts."""
    return {"weight_init": text.contexts(self.dim)}

  def flops_per_token(self) -> int:
    """Zero: a lookup needs no arithmetic."""
    return 0

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    return self._lookup(arrays["weight"], token, self.dtype or self.param_dtype)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The table itself, in `param_dtype`."""
    return as_row_factory(arrays["weight"])
