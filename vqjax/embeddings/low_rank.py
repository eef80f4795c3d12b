"""The low-rank embedding, whose table is a product of two thin matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vqjax.assign.rows import low_rank
from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["LowRankEmbedding"]


class LowRankEmbedding(Embedding):
  """weight[token] · up: rank·(V + D) parameters instead of V·D.

  It is the baseline "low rank" of Chen et al., Differentiable product quantization, 2020, Table 9.

  Attributes:
    rank: number of coefficients of a token, r.
    weight_init: initialiser of the [V, r] weight.
    up_init: initialiser of the [r, D] matrix that the coefficients multiply.
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the parameters.
  """

  rank: int
  weight_init: Initializer = row_init
  up_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The coefficients [V, r] and the matrix [r, D]."""
    v, d, r, dtype = self.vocab, self.dim, self.rank, self.param_dtype
    return {
      "weight": Variable((v, r), ("vocab", "rank"), self.weight_init, dtype, pad_value=0),
      "up": Variable((r, d), ("rank", "table_embed"), self.up_init, dtype),
    }

  def check(self) -> None:
    most = min(self.vocab, self.dim)
    if not 1 <= self.rank <= most:
      raise ValueError(
        f"`rank` must be in [1, {most}]; got {self.rank} for a table of {self.vocab} x {self.dim}."
        " Use a DenseEmbedding for the full rank."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The best product of two matrices for contexts."""
    rows = text.contexts(self.dim)
    if rows is None:
      return {}
    weight, up = low_rank(rows, text.weights(), self.rank)
    return {"weight_init": weight, "up_init": up}

  def flops_per_token(self) -> int:
    """The product of r coefficients with the matrix [r, D]."""
    return 2 * self.rank * self.dim

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    return self._lookup(arrays["weight"], token, dtype) @ arrays["up"].astype(dtype)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The product of the two matrices, in `param_dtype`."""
    # Whole, [V, D], and not a tile at a time: a `LowRankHead` is what scores in rank r.
    return as_row_factory(arrays["weight"] @ arrays["up"])
