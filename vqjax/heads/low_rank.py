"""The low-rank head, whose weight is a product of two thin matrices."""

#   hidden [*B, D]  --down [r, D]-->  narrow [*B, r]  --weight [V, r]-->  scores [*B, V]
#
# Every hook projects once and is then that of a dense head of width r: tiles in the loss, blocks in
# decoding. No row of width D exists, nor the [V, D] product of the two matrices.

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.assign.rows import low_rank
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays, Head
from vqjax.ops import linear_decoding, sampling, softmax
from vqjax.ops.scores import ScoreOptions
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["LowRankHead"]


class LowRankHead(Head):
  """softmax(weight · (down · hidden) + bias).

  The head has rank·(D + V) parameters instead of V·D. The hidden vector is projected to `rank`
  numbers once, and every token's row scores those. It is the baseline "low rank" of VQ-Logits,
  Table 1.

  Attributes:
    rank: width of the projection, r.
    use_bias: add a score for each token.
    down_init: initialiser of the [r, D] projection.
    weight_init: initialiser of the [V, r] weight.
    bias_init: initialiser of the [V] bias.
  """

  rank: int
  use_bias: bool = False
  down_init: Initializer = row_init
  weight_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The projection [r, D], the weight [V, r] and the bias [V]."""
    v, d, r, dtype = self.vocab, self.dim, self.rank, self.param_dtype
    declared = {
      "down": Variable((r, d), ("rank", "embed"), self.down_init, dtype),
      "weight": Variable((v, r), ("vocab", "table_embed"), self.weight_init, dtype, pad_value=0),
    }
    if self.use_bias:
      declared["bias"] = Variable((v,), ("vocab",), self.bias_init, dtype)
    return declared

  def check(self) -> None:
    most = min(self.vocab, self.dim)
    if not 1 <= self.rank <= most:
      raise ValueError(
        f"`rank` must be in [1, {most}]; got {self.rank} for a weight of {self.vocab} x {self.dim}."
        " Use a DenseHead for the full rank."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The best product of two matrices for contexts, and each token's frequency."""
    found, rows = super()._of_text(text), text.contexts(self.dim)
    if rows is None:
      return found
    weight, down = low_rank(rows, text.weights(), self.rank)
    return found | {"weight_init": weight, "down_init": down}

  def flops_per_token(self) -> int:
    """The products of the projection, of width D, and of the scores, of width r."""
    return 2 * self.rank * (self.dim + self.vocab)

  def _project(self, arrays, hidden):
    """down · hidden in float32, [*B, r], and the dtype in which it is scored."""
    # Decided before the projection: its float32 result would promote the second product.
    dtype = self.dtype or jnp.promote_types(hidden.dtype, arrays["down"].dtype)
    return softmax.linear_scores(hidden, arrays["down"], dtype=dtype), dtype

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """weight · (down · hidden) + bias, in float32."""
    narrow_BR, dtype = self._project(arrays, hidden)
    return softmax.linear_scores(narrow_BR, arrays["weight"], arrays["bias"], dtype)

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    narrow_BR, dtype = self._project(arrays, hidden)
    return softmax.linear_log_prob(
      narrow_BR,
      arrays["weight"],
      token,
      arrays["bias"],
      temperature=temperature,
      mask=counted,
      dtype=dtype,
      vocab_axis=self.vocab_axis,
    )

  def parts(self) -> dict[str, Any]:
    """The variables, with a bias that removes the rows which pad a device's part."""
    return super().parts() | {"bias": self._padded_bias("bias")}

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    narrow_BR, dtype = self._project(arrays, hidden)
    return linear_decoding.linear_blocks(
      narrow_BR,
      arrays["weight"],
      arrays["bias"],
      self.vocab,
      ScoreOptions(dtype=dtype, vocab_axis=self.vocab_axis),
    )
