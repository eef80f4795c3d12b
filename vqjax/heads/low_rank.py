"""What does a head look like whose weight is a product of two thin matrices?"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.types import Dtype, Size


class LowRankHead(Head):
  """softmax(weight · (down · hidden) + bias): rank·(D + V) parameters instead of V·D.

  The hidden vector is projected to `rank` numbers once, which every token's row is scored with.
  The baseline "low rank" of VQ-Logits, Table 1.

  Attributes:
    rank: width of the projection, r.
    use_bias: add a score for each token.
    down_init: initialiser of the [r, D] projection.
    weight_init: initialiser of the [V, r] weight.
    bias_init: initialiser of the [V] bias.
    dtype: dtype of both products' operands; None: that of hidden and weight together.
    param_dtype: dtype of the parameters.
  """

  rank: int
  use_bias: bool = False
  down_init: nn.initializers.Initializer = row_init
  weight_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    most = min(self.vocab, self.dim)
    if not 1 <= self.rank <= most:
      raise ValueError(
        f"rank {self.rank} for a weight of {self.vocab} x {self.dim}; give 1 to {most}"
      )
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.down = new("down", self.down_init, self.rank, self.dim)
    self.weight = new("weight", self.weight_init, self.vocab, self.rank)
    if self.use_bias:
      self.bias = new("bias", self.bias_init, self.vocab)

  @property
  def _bias(self):
    return self.bias if self.use_bias else None

  def _narrow(self, hidden):
    """down · hidden, float32 [*B, r], and the dtype in which it is scored."""
    self._check_hidden(hidden)
    dtype = self.dtype or jnp.promote_types(hidden.dtype, self.down.dtype)
    return softmax.linear_scores(hidden, self.down, dtype=dtype), dtype

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """weight · (down · hidden) + bias, float32."""
    narrow, dtype = self._narrow(hidden)
    return softmax.linear_scores(narrow, self.weight, self._bias, dtype)

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats, in tiles; nan for a token outside [0, V)."""
    narrow, dtype = self._narrow(hidden)
    return softmax.linear_log_prob(
      narrow, self.weight, tokens, self._bias, dtype=dtype, vocab_axis=self.vocab_axis
    )

  def _rows(self) -> tuple[vocab_parallel.Sharded, ...]:
    return vocab_parallel.Sharded(self.weight, 0), vocab_parallel.Sharded(self._bias, -jnp.inf)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    weight, bias = rows
    narrow, dtype = self._narrow(hidden)

    def scores(row_W):
      return softmax.linear_scores(
        narrow, weight[row_W], None if bias is None else bias[row_W], dtype
      )

    return sampling.row_blocks(
      hidden.shape[:-1], weight.shape[0], self.vocab, scores, self.vocab_axis
    )

  def size(self) -> Size:
    """r·(D + V) parameters and V for a bias."""
    products = self.rank * (self.dim + self.vocab)
    params = products + (self.vocab if self.use_bias else 0)
    return Size(params, bytes_of(params, self.param_dtype), 2 * products)

  def logical_axes(self) -> dict:
    """Axes of the projection, the weight and the bias."""
    axes = {"down": ("rank", "embed"), "weight": ("vocab", "table_embed")}
    if self.use_bias:
      axes["bias"] = ("vocab",)
    return {"params": axes}
