"""The codebook embedding, in which tokens share K vectors."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from vqjax import assign
from vqjax.assign.table import check_codes
from vqjax.embeddings.base import Embedding
from vqjax.ops import codes as code_ops
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, row_init, table


class CodebookEmbedding(Embedding):
  """codebook[code of the token]: K·D parameters for V tokens.

  Given as the `embedding` of a `CodebookHead`, the same object ties the two. Source: VQ-Logits,
  Section 6, "tied input-output embeddings", c_M(i).

  The table token -> code is the variable `assignment` of the collection `codes`: it is saved and
  restored with the parameters, and never trained.

  Attributes:
    codes: number of codes, K.
    assignment_init: int [V], the code of each token, or a function (vocab, codes) that makes it.
    codebook_init: initialiser of the [K, D] codebook.
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the parameters.
  """

  codes: int
  assignment_init: assign.Assignment = assign.contiguous
  codebook_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The codebook [K, D] and the code of each token [V]."""
    v, k = self.vocab, self.codes
    shape, axes = (k, self.dim), ("codes", "table_embed")
    make = lambda: assign.checked(self.assignment_init(v, k), v, k)
    return {
      "codebook": Variable(shape, axes, self.codebook_init, self.param_dtype, pad_value=0),
      "assignment": table((v,), ("vocab",), make, pad_value=code_ops.NO_CODE),
    }

  def check(self) -> None:
    """Check the number of codes."""
    check_codes(self.vocab, self.codes)

  def flops_per_token(self) -> int:
    """Zero: a lookup needs no arithmetic."""
    return 0

  def factors(self) -> tuple[Float[Array, "K D"], Int[Array, "V"]]:
    """The codebook and the code of each token; a tied head scores with them."""
    return self.array("codebook"), self.array("assignment")

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token's code; nan for a token outside [0, V)."""
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    return code_ops.code_vectors(*self.factors(), tokens, dtype, self.vocab_axis)

  def table(self) -> Float[Array, "V D"]:
    """The vector of every token, in `param_dtype`: V·D numbers, of which K·D differ."""
    codebook, assignment = self.factors()
    return codebook[assignment]
