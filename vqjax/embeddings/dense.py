"""The dense embedding, a table [V, D]."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init


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

  def flops_per_token(self) -> int:
    """Zero: a lookup needs no arithmetic."""
    return 0

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    vectors = self._gather("weight", token, jnp.dtype(self.dtype or self.param_dtype))
    return jnp.where(known[..., None], vectors, jnp.nan)

  def table(self) -> Float[Array, "V D"]:
    """The table itself, [V, D], in `param_dtype`."""
    return self.array("weight")
