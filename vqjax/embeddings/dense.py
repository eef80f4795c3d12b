"""What does an ordinary embedding table look like under the contract?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.ops import vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class DenseEmbedding(Embedding):
  """One free vector for each token: V·D parameters.

  Attributes:
    weight_init: initialiser of the [V, D] table.
    dtype: dtype of the vectors handed out; None: that of the parameters.
    param_dtype: dtype of the parameters.
  """

  weight_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    self.weight = self.param("weight", self.weight_init, (self.vocab, self.dim), self.param_dtype)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, dtype
    )
    rows = (vocab_parallel.Sharded(self.weight, 0),)
    vectors = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
    return jnp.where(known[..., None], vectors, jnp.nan)

  def table(self) -> Float[Array, "V D"]:
    """The parameters themselves, [V, D], in `param_dtype`."""
    return self.weight

  def size(self) -> Size:
    """V·D parameters; a look-up costs no arithmetic."""
    params = self.vocab * self.dim
    return Size(params, params * jnp.dtype(self.param_dtype).itemsize, 0)

  def logical_axes(self) -> dict:
    """The table's axes."""
    return {"params": {"weight": ("vocab", "table_embed")}}
