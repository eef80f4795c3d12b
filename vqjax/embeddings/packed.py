"""The embedding of a table that is packed as strings of bits."""

# What a packed table is made of, with C row groups of like probability:
#
#   stream   uint16 [units]     the bits of all rows, those of likely tokens first
#   size     [C]                rows of each row group, so that a rank has a row group and a place
#   width    [C, D]             bits of each coordinate of a row group, 0 to 8
#   scale, center   [C, D]      from values of the bits to coordinates
#   inverse  [D, D]             from coordinates to the model's basis
#   rank     [V]                the place of each token in the order of the rows
#
#   token --rank--> rank --places--> (unit, row group) --values--> coordinates --inverse--> vector
#
# Every device has all of this but the ranks, which are split by tokens.

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from vqjax.assign.multiple import code_dtype
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.layer import Layer
from vqjax.ops import trellis, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.types import Dtype, MeshAxes
from vqjax.variables import Declaration, Initializer, Variable, integer_variable

__all__ = ["PackedEmbedding"]


def _default_units(vocab: int, dim: int) -> int:
  """Elements of a stream with two bits for each number."""
  # The first element belongs to no row: the first window begins before the first row does.
  return 1 + vocab * -(-2 * dim // trellis.UNIT)


def random_stream(key: Array, shape: tuple[int, ...], dtype: Dtype = jnp.uint16) -> Array:
  """Default stream: random bits, which are rows of normal numbers."""
  return jax.random.bits(key, shape, dtype)


def even_sizes(vocab: int, row_groups: int) -> np.ndarray:
  """Default row groups: about as many rows of each."""
  return np.diff(np.arange(row_groups + 1) * vocab // row_groups)


def two_bits(row_groups: int, dim: int) -> np.ndarray:
  """Default widths: two bits for each number."""
  return np.full((row_groups, dim), 2)


def _unit_rows(key, shape, dtype):
  del key
  return jnp.full(shape, shape[-1] ** -0.5, dtype)


class PackedRows(Layer):
  """Base class of layers with rows that are packed as strings of bits.

  Attributes:
    row_groups: number of row groups, C.
    units: elements of 16 bits of the stream; None: as many as two bits for each number take.
    is_ranked: whether tokens have ranks, in the order of falling probability, which take 2 or 4
      bytes each; False: the tokens are in this order.
    is_trellis: read each number together with the bits before it, as `vqjax.ops.trellis` does;
      False: from its own bits alone.
    stream_init: initialiser of the uint16 stream.
    size_init: (vocab, row_groups) -> int [C], the tokens of each row group by rank.
    width_init: (row_groups, dim) -> int [C, D], the bits of each number, 0 to 8.
    scale_init: initialiser of the [C, D] scales; None: rows of mean square length 1.
  """

  row_groups: int = 1
  units: int | None = None
  is_ranked: bool = True
  is_trellis: bool = True
  stream_init: Initializer = random_stream
  size_init: Any = even_sizes
  width_init: Any = two_bits
  scale_init: Initializer | None = None

  def declare(self) -> Declaration:
    """The stream, sizes, widths and ranks, the scales, the centres and the inverse."""
    v, d, c, dtype = self.vocab, self.dim, self.row_groups, self.param_dtype
    units = _default_units(v, d) if self.units is None else self.units
    of_group = ("row_groups", "coordinates")
    identity = lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)
    width = lambda: np.asarray(self.width_init(c, d))
    declared = {
      "stream": Variable((units,), ("units",), self.stream_init, jnp.uint16, "codes"),
      "size": integer_variable((c,), ("row_groups",), lambda: np.asarray(self.size_init(v, c))),
      "width": integer_variable((c, d), of_group, width, jnp.uint8),
      "scale": Variable((c, d), of_group, self.scale_init or _unit_rows, dtype),
      "center": Variable((c, d), of_group, nn.initializers.zeros_init(), dtype),
      "inverse": Variable((d, d), ("coordinates", "basis"), identity, dtype),
    }
    if self.is_ranked:
      declared["rank"] = integer_variable(
        (v,), ("vocab",), lambda: np.arange(v), code_dtype(v), pad_value=0
      )
    return declared

  def check(self) -> None:
    super().check()
    if not 1 <= self.row_groups <= self.vocab:
      raise ValueError(
        f"`row_groups` must be in [1, vocab]; got {self.row_groups} for vocab {self.vocab}."
        " 16 are usual."
      )
    if self.units is not None and self.units < 1:
      raise ValueError(
        f"`units` must be at least 1; got {self.units}. Two bits for each number are"
        f" {_default_units(self.vocab, self.dim)} elements."
      )

  @property
  def code(self) -> trellis.Code:
    """How the bits are read."""
    return trellis.TRELLIS if self.is_trellis else trellis.LEVELS


class PackedEmbedding(PackedRows, Embedding):
  """Rows packed as strings of bits, more of them for frequent tokens.

  A row is (center + scale · values) @ inverse: center and scale belong to its row group of like
  probability, and the values are read from its bits (`vqjax.ops.trellis`). The bits, the widths and
  the ranks are of the collection `codes`: they come from `vqjax.tables.pack` and are never
  trained; centres, scales and the inverse are parameters. Given as the `embedding` of a
  `PackedHead`, the same object ties the two.

  Attributes:
    dtype: dtype of the returned vectors; None: `param_dtype`.
    param_dtype: dtype of the parameters.
  """

  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def flops_per_token(self) -> int:
    """The product with the inverse, and a multiply-add for each number."""
    return 2 * self.dim * (self.dim + 1)

  def _vectors(self, arrays: Arrays, token: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    rank = self._lookup(arrays["rank"], token, jnp.int32) if self.is_ranked else token
    place = trellis.row_starts(rank.reshape(-1), arrays["size"], arrays["width"])
    row = self.code.rows(place, _shared(arrays)).reshape(*token.shape, self.dim)
    return row.astype(self.dtype or self.param_dtype)

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The rows, composed a tile at a time."""
    return RowFactory(*placed_rows(arrays, self.vocab, self.vocab_axis), self.code.rows)

  def _table(self) -> Float[Array, "V D"]:
    # Values are float32, whatever the parameters are.
    return super()._table().astype(self.param_dtype)


def placed_rows(
  arrays: Arrays, vocab: int, vocab_axis: MeshAxes | None
) -> tuple[tuple[Array, Array], dict[str, Array]]:
  """What the rows that this device holds are composed of.

  Returns:
    The place of every row in the stream and its row group, and the arrays that all rows share.
  """
  if "rank" in arrays:
    # Stored as 2 or 4 bytes.
    rank = arrays["rank"].astype(jnp.int32)
  else:
    axis = vocab_parallel.inside(vocab_axis)
    count = vocab if axis is None else -(-vocab // vocab_parallel.axis_size(axis))
    rank = vocab_parallel.first_row(axis, count) + jnp.arange(count, dtype=jnp.int32)
    # Rows that pad the last device's part are like the last one.
    rank = jnp.minimum(rank, vocab - 1)
  return trellis.row_starts(rank, arrays["size"], arrays["width"]), _shared(arrays)


def _shared(arrays):
  return {name: arrays[name] for name in ("stream", "width", "scale", "center", "inverse")}
