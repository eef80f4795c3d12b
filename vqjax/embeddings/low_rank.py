"""What does an embedding look like whose table is a product of two thin matrices?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.ops import vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class LowRankEmbedding(Embedding):
  """weight[token] · up: rank·(V + D) parameters instead of V·D.

  The baseline "low rank" of Chen et al., Differentiable product quantization, 2020, Table 9.

  Attributes:
    rank: numbers of a token's own, r.
    weight_init: initialiser of the [V, r] weight.
    up_init: initialiser of the [r, D] matrix that all tokens share.
    dtype: dtype of the vectors handed out; None: that of the parameters.
    param_dtype: dtype of the parameters.
  """

  rank: int
  weight_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  up_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    most = min(self.vocab, self.dim)
    if not 1 <= self.rank <= most:
      raise ValueError(
        f"rank {self.rank} for a table of {self.vocab} x {self.dim}; give 1 to {most}"
      )
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.weight = new("weight", self.weight_init, self.vocab, self.rank)
    self.up = new("up", self.up_init, self.rank, self.dim)

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    dtype = jnp.dtype(self.dtype or self.param_dtype)
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, dtype
    )
    rows = (vocab_parallel.Sharded(self.weight, 0),)
    own = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
    return jnp.where(known[..., None], own @ self.up.astype(dtype), jnp.nan)

  def table(self) -> Float[Array, "V D"]:
    """The product, in `param_dtype`."""
    return self.weight @ self.up

  def size(self) -> Size:
    """r·(V + D) parameters; a look-up multiplies r·D of them."""
    params = self.rank * (self.vocab + self.dim)
    return Size(params, params * jnp.dtype(self.param_dtype).itemsize, 2 * self.rank * self.dim)

  def logical_axes(self) -> dict:
    """Axes of both matrices."""
    return {"params": {"weight": ("vocab", "rank"), "up": ("rank", "table_embed")}}
