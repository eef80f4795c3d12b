"""The head of a table that is packed as strings of bits."""

# From a token to its row, of which only bits are stored:
#
#   token  --rank-->  rank  --places-->  where its bits begin in the stream, and its row group
#   row group  ------------------------->    width, scale and center of each coordinate     [C, D]
#   coordinates = center + scale · values of the bits                                   a tile
#   row = coordinates @ inverse
#
# The head scores coordinates, and maps the hidden vector instead of the rows:
#
#   hidden · (coordinates @ inverse)  =  (inverse · hidden) · coordinates
#   `_linear`                            `_projected`         `_rows`

from __future__ import annotations

from typing import Any

from flax import linen as nn

from vqjax.embeddings.packed import (
  PackedEmbedding,
  check_packed_rows,
  code_of,
  declared_rows,
  even_sizes,
  placed_rows,
  random_stream,
  two_bits,
)
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops import softmax
from vqjax.ops.row_factory import RowFactory
from vqjax.variables import Declaration, Initializer, Variable

__all__ = ["PackedHead"]


class PackedHead(LinearHead):
  """softmax(hidden · rowᵀ + bias), each row packed as a string of bits.

  The rows are those of a `PackedEmbedding`. The hidden vector is mapped to their coordinates
  once, and tiles of coordinates are read from the bits where they are scored: the table is never
  unpacked. `vqjax.tables` makes the variables from a trained dense head.

  Attributes:
    row_groups: number of row groups, C.
    units: elements of 16 bits of the stream; None: as many as two bits for each number take.
    is_ranked: whether tokens have ranks, in the order of falling probability, which take 2 or 4
      bytes each; False: the tokens are in this order.
    is_trellis: read each number together with the bits before it, as `vqjax.ops.trellis` does;
      False: from its own bits alone.
    use_bias: add a score for each token.
    embedding: the embedding whose rows are scored; None: the head has its own, and the fields of
      rows are those of the embedding.
    stream_init: initialiser of the uint16 stream.
    size_init: (vocab, row_groups) -> int [C], the tokens of each row group by rank.
    width_init: (row_groups, dim) -> int [C, D], the bits of each number, 0 to 8.
    scale_init: initialiser of the [C, D] scales; None: rows of mean square length 1.
    bias_init: initialiser of the [V] bias.
  """

  row_groups: int = 1
  units: int | None = None
  is_ranked: bool = True
  is_trellis: bool = True
  use_bias: bool = False
  embedding: PackedEmbedding | None = None
  stream_init: Initializer = random_stream
  size_init: Any = even_sizes
  width_init: Any = two_bits
  scale_init: Initializer | None = None
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The variables of the rows, or the tied embedding, and the bias [V]."""
    tied = self.embedding
    declared = {"embedding": tied} if tied is not None else dict(declared_rows(self))
    if self.use_bias:
      declared["bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def check(self) -> None:
    super().check()
    tied = self.embedding
    if tied is None:
      check_packed_rows(self)
    elif not isinstance(tied, PackedEmbedding) or (tied.vocab, tied.dim) != (
      self.vocab,
      self.dim,
    ):
      raise ValueError(
        f"`embedding` must be a PackedEmbedding of vocab {self.vocab} and dim {self.dim}; got"
        f" {tied!r}. Give the head and the embedding the same, or use a DenseHead."
      )

  def flops_per_token(self) -> int:
    """The map to coordinates, and one product of width D for each token."""
    return 2 * self.dim * (self.dim + self.vocab)

  def _rows(self, arrays: Arrays) -> RowFactory:
    """The rows in their coordinates, in which `_projected` gives the hidden vectors."""
    place, shared = placed_rows(self._of(arrays), self.vocab, self.vocab_axis)
    # `coordinates` does not read it, and its gradient comes through `_projected`.
    shared = {name: x for name, x in shared.items() if name != "inverse"}
    return RowFactory(place, shared, code_of(self.embedding or self).coordinates)

  def _of(self, arrays):
    return arrays if self.embedding is None else arrays["embedding"]

  def _projected(self, arrays, hidden):
    """inverse · hidden, in the promoted dtype of hidden vectors and parameters."""
    inverse = self._of(arrays)["inverse"]
    dtype = self._operand_dtype(hidden, inverse)
    return softmax.linear_scores(hidden, inverse, dtype=dtype).astype(dtype)

  def _linear(self, arrays):
    place, shared = placed_rows(self._of(arrays), self.vocab, self.vocab_axis)
    return RowFactory(place, shared, code_of(self.embedding or self).rows), arrays["bias"]
