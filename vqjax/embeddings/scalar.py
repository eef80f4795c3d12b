"""The scalar-quantised embedding, with a few bits for each number."""

# vector = low + (high - low) / (2^bits - 1) · level, for levels [V, D] of `bits` bits.
#
# Levels are stored in whole bytes, so that a lookup gathers rows; `compact` packs them, as D codes
# of a token into one table of 2^bits numbers.

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, UInt

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import bit_packing
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype, Size
from vqjax.variables import Declaration, Variable, integer_variable

__all__ = ["ScalarEmbedding"]


class ScalarEmbedding(Embedding):
  """low + step · level, where each number has one of 2^bits equally spaced levels.

  It is the baseline "scalar quantization" of Chen et al., Differentiable product quantization,
  2020, Table 9. The levels are the variable `levels` of the collection `codes`; `scalar_levels`
  computes them from a trained table. The two ends of the scale, the same for all numbers, are
  parameters.

  Attributes:
    bits: bits of a number, 1 to 16.
    dtype: dtype of the returned vectors; None: float32.
  """

  bits: int
  dtype: Dtype | None = None

  def declare(self) -> Declaration:
    """The ends of the scale and the levels [V, D]."""
    shape, axes, dtype = (self.vocab, self.dim), ("vocab", "table_embed"), code_dtype(2**self.bits)
    return {
      "low": Variable((), (), nn.initializers.constant(-1.0)),
      "high": Variable((), (), nn.initializers.constant(1.0)),
      "levels": integer_variable(shape, axes, lambda: np.zeros(shape, dtype), dtype, pad_value=0),
    }

  def check(self) -> None:
    _check_bits(self.bits)

  def flops_per_token(self) -> int:
    """A multiply-add for each number."""
    return 2 * self.dim

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    level = self._lookup(arrays["levels"], token, jnp.float32)
    vectors = self._dequantized(level, arrays["low"], arrays["high"])
    return vectors.astype(jnp.dtype(self.dtype or jnp.float32))

  def _dequantized(self, level, low, high):
    # Without the barrier a compiled program may round product and sum at once, and an eager one may
    # not: the compact form has the numbers of both.
    return low + jax.lax.optimization_barrier((high - low) / (2**self.bits - 1) * level)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The vectors of the tokens, in float32."""
    level = arrays["levels"].astype(jnp.float32)
    return as_row_factory(self._dequantized(level, arrays["low"], arrays["high"]))

  def compact(self, variables: dict) -> CompactEmbedding:
    """The form for inference: packed levels of `bits` bits, and the 2^bits numbers.

    A level is a code into one table of numbers that all D positions share.
    """
    levels = jnp.arange(2**self.bits, dtype=jnp.float32)
    values = self._dequantized(levels, variables["params"]["low"], variables["params"]["high"])
    return CompactEmbedding(
      data=bit_packing.bit_packed(np.asarray(variables["codes"]["levels"]), self.bits),
      values=np.asarray(values, np.float32)[None, :, None],
      vocab=self.vocab,
      dim=self.dim,
      codes=2**self.bits,
      subspaces=self.dim,
      additive=False,
      dtype=jnp.dtype(self.dtype or jnp.float32).name,
    )

  def inference_size(self) -> Size:
    """The size of `compact`: levels at `bits` bits each, and the 2^bits numbers."""
    levels = bit_packing.bit_packed_bytes(self.vocab, self.dim, self.bits)
    return self.size()._replace(state_bytes=4 * 2**self.bits + levels)


def scalar_levels(
  table: Float[np.ndarray, "V D"], bits: int
) -> tuple[UInt[np.ndarray, "V D"], float, float]:
  """The nearest of 2^bits levels for each number, and the ends of the scale.

  The ends are the least and the largest number of the table.

  Raises:
    ValueError: `bits` is outside [1, 16], or a number of the table is not finite.
  """
  _check_bits(bits)
  if not np.isfinite(table).all():
    wrong = np.size(table) - np.isfinite(table).sum()
    raise ValueError(
      f"`table` must be finite; got {wrong} numbers that are not. Use an earlier checkpoint."
    )
  low, high = float(table.min()), float(table.max())
  step = (high - low) / (2**bits - 1)
  levels = np.zeros(np.shape(table), code_dtype(2**bits))
  # A block at a time: in float64, in which the steps of a bfloat16 table do not vanish.
  for first in range(0, len(levels) if step else 0, bit_packing.BLOCK):
    block = slice(first, first + bit_packing.BLOCK)
    levels[block] = np.rint((np.asarray(table[block], np.float64) - low) / step)
  return levels, low, high


def _check_bits(bits: int) -> None:
  if not 1 <= bits <= 16:
    raise ValueError(f"`bits` must be in [1, 16]; got {bits}. 8, 6 and 4 are usual.")
