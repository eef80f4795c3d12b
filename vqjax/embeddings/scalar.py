"""What does an embedding look like whose every number has a few bits?"""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Integer, UInt

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings.base import Embedding
from vqjax.ops import packing, vocab_parallel
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class ScalarEmbedding(Embedding):
  """low + step · level: each number is one of 2^bits evenly spaced levels, the same for the table.

  The baseline "scalar quantization" of Chen et al., Differentiable product quantization, 2020,
  Table 9. The levels are the variable `levels` of the collection `codes`; `scalar_levels` makes
  them from a trained table. The two ends of the scale are parameters.

  Attributes:
    bits: of a number, 1 to 16.
    dtype: dtype of the vectors handed out; None: float32.
  """

  bits: int
  dtype: Dtype | None = None

  def setup(self):
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    _check_bits(self.bits)
    new = lambda name, value: self.param(name, nn.initializers.constant(value), (), jnp.float32)
    self.low, self.high = new("low", -1.0), new("high", 1.0)
    shape = self.vocab, self.dim
    self.levels = self.variable(
      "codes", "levels", lambda: jnp.zeros(shape, code_dtype(2**self.bits))
    )

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    look_up = lambda rows, token: vocab_parallel.sharded_lookup(
      rows[0], token, self.vocab_axis, jnp.dtype(jnp.float32)
    )
    rows = (vocab_parallel.Sharded(jnp.asarray(self.levels.value), 0),)
    level = vocab_parallel.over_vocabulary(self.vocab_axis, look_up, rows, token)
    vectors = jnp.where(known[..., None], self._numbers(level), jnp.nan)
    return vectors.astype(jnp.dtype(self.dtype or jnp.float32))

  def _numbers(self, level):
    return self.low + (self.high - self.low) / (2**self.bits - 1) * level

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary, float32."""
    return self._numbers(jnp.asarray(self.levels.value, jnp.float32))

  def size(self) -> Size:
    """Two parameters, and V·D levels as they lie in memory; 2·D operations."""
    levels = self.vocab * self.dim * code_dtype(2**self.bits).itemsize
    return Size(2, 8 + levels, 2 * self.dim)

  def shipped(self) -> Size:
    """The same, with levels at `bits` bits each."""
    levels = packing.packed_bytes(self.vocab, self.dim, self.bits)
    return Size(2, 8 + levels, 2 * self.dim)

  def logical_axes(self) -> dict:
    """Axes of the levels."""
    return {"params": {"low": (), "high": ()}, "codes": {"levels": ("vocab", "table_embed")}}


def scalar_levels(
  table: Float[np.ndarray, "V D"], bits: int
) -> tuple[UInt[np.ndarray, "V D"], float, float]:
  """The nearest of 2^bits levels between the least and the largest number of a table; the two ends.

  Raises:
    ValueError: bits outside 1 to 16, or a number of the table is not finite.
  """
  _check_bits(bits)
  if not np.isfinite(table).all():
    raise ValueError("the table has numbers that are not finite; mend the run it comes from")
  low, high = float(table.min()), float(table.max())
  step = (high - low) / (2**bits - 1)
  levels = np.rint((table - low) / step) if step else np.zeros(table.shape)
  return levels.astype(code_dtype(2**bits)), low, high


def _check_bits(bits: int) -> None:
  if not 1 <= bits <= 16:
    raise ValueError(f"bits {bits} are not between 1 and 16; 8, 6 and 4 are usual")
