"""What does an embedding look like whose tokens share K vectors?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax import assign
from vqjax.assign.table import check_codes
from vqjax.embeddings.base import Embedding
from vqjax.ops import codes as code_ops
from vqjax.types import Dtype, Size


class CodebookEmbedding(Embedding):
  """The vector of a token is the codebook's at the token's code: K·D parameters for V tokens.

  The same object as the embedding of a `CodebookHead` ties the two. Source: VQ-Logits, Section 6,
  "tied input-output embeddings", c_M(i).

  The table token -> code is the variable `assignment` of the collection `codes`: saved and
  restored with the parameters, never trained.

  Attributes:
    codes: number of codes, K.
    assignment_init: (vocab, codes) -> int [V], the code of each token.
    codebook_init: initialiser of the [K, D] codebook.
    dtype: dtype of the vectors handed out; None: that of the parameters.
    param_dtype: dtype of the parameters.
  """

  codes: int
  assignment_init: assign.Assignment = assign.contiguous
  codebook_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    check_codes(self.vocab, self.codes)
    shape = self.codes, self.dim
    self.codebook = self.param("codebook", self.codebook_init, shape, self.param_dtype)
    self.assignment = self.variable("codes", "assignment", self._initial_assignment)
    assign.check_shape(self.assignment.value.shape, self.vocab)

  def _initial_assignment(self):
    table = assign.checked(self.assignment_init(self.vocab, self.codes), self.vocab, self.codes)
    return jnp.asarray(table)

  def factors(self) -> tuple[Float[Array, "K D"], Int[Array, "V"]]:
    """The codebook and the code of each token: what a tied head scores with."""
    # Inside `nn.scan` the variable may be the NumPy array it was made from.
    return self.codebook, jnp.asarray(self.assignment.value)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token's code; nan for a token outside [0, V)."""
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    return code_ops.code_vectors(*self.factors(), tokens, dtype, self.vocab_axis)

  def table(self) -> Float[Array, "V D"]:
    """The vector of every token, in `param_dtype`: V·D numbers, of which K·D differ."""
    codebook, assignment = self.factors()
    return codebook[assignment]

  def size(self) -> Size:
    """K·D parameters, and four bytes a token for the table of codes; no arithmetic."""
    params = self.codes * self.dim
    state = params * jnp.dtype(self.param_dtype).itemsize + 4 * self.vocab
    return Size(params, state, 0)

  def logical_axes(self) -> dict:
    """Axes of the codebook and of the table of codes."""
    return {
      "params": {"codebook": ("codes", "table_embed")},
      "codes": {"assignment": ("vocab",)},
    }
