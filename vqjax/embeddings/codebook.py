"""The codebook embedding, in which tokens share K vectors."""

# token  --assignment [V]-->  code  --codebook [K, D]-->  vector
#
# Both tables are split over devices, tokens and codes by themselves: a lookup takes two steps, each
# of which sums over the devices what the one that has the row contributes (`code_vectors`).

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vqjax import assign
from vqjax.assign.checks import check_codes
from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops import codes as code_ops
from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype
from vqjax.variables import Declaration, Initializer, Variable, integer_variable, row_init

__all__ = ["CodebookEmbedding"]


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
  assignment_init: assign.Assignment = assign.zipf_mass
  codebook_init: Initializer = row_init
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def declare(self) -> Declaration:
    """The codebook [K, D] and the code of each token [V]."""
    v, k = self.vocab, self.codes
    shape, axes = (k, self.dim), ("codes", "table_embed")
    make = lambda: assign.checked_assignment(self.assignment_init(v, k), v, k)
    return {
      "codebook": Variable(shape, axes, self.codebook_init, self.param_dtype, pad_value=0),
      "assignment": integer_variable((v,), ("vocab",), make, pad_value=code_ops.NO_CODE),
    }

  def check(self) -> None:
    check_codes(self.vocab, self.codes)

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Codes by exchange with their mean contexts."""
    code = text.codes(self.codes, init=self.assignment_init)
    rows = text.means(code, self.codes, self.dim)
    return {"assignment_init": code, "codebook_init": rows}

  def flops_per_token(self) -> int:
    """Zero: a lookup needs no arithmetic."""
    return 0

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    factors = arrays["codebook"], arrays["assignment"]
    return code_ops.code_vectors(*factors, token, dtype, self.vocab_axis)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The vector of every token, in `param_dtype`: V·D numbers, of which K·D differ."""
    codebook, axis = arrays["codebook"], vocab_parallel.inside(self.vocab_axis)
    # A device's tokens may have codes of any device. What pads the codebook is no token's code.
    if axis:
      codebook = vocab_parallel.gathered(codebook, axis).reshape(-1, self.dim)
    return as_row_factory(codebook[arrays["assignment"]])
