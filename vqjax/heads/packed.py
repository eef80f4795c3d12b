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

from flax import linen as nn

from vqjax.embeddings.packed import PackedEmbedding, PackedRows, placed_rows
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops import softmax
from vqjax.ops.row_factory import RowFactory
from vqjax.variables import Declaration, Initializer, Variable

__all__ = ["PackedHead"]


class PackedHead(PackedRows, LinearHead):
  """softmax(hidden · rowᵀ + bias), each row packed as a string of bits.

  The rows are those of a `PackedEmbedding`. The hidden vector is mapped to their coordinates
  once, and tiles of coordinates are read from the bits where they are scored: the table is never
  unpacked. `vqjax.tables` makes the variables from a trained dense head.

  Attributes:
    use_bias: add a score for each token.
    embedding: the embedding whose rows are scored; None: the head has its own, and the fields of
      rows are those of the embedding.
    bias_init: initialiser of the [V] bias.
  """

  use_bias: bool = False
  embedding: PackedEmbedding | None = None
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The variables of the rows, or the tied embedding, and the bias [V]."""
    tied = self.embedding
    declared = {"embedding": tied} if tied is not None else super().declare()
    if self.use_bias:
      declared["bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def check(self) -> None:
    super().check()
    tied, shape = self.embedding, (self.vocab, self.dim)
    if tied is not None and not (
      isinstance(tied, PackedEmbedding) and (tied.vocab, tied.dim) == shape
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
    return RowFactory(place, shared, (self.embedding or self).code.coordinates)

  def _of(self, arrays):
    return arrays if self.embedding is None else arrays["embedding"]

  def _projected(self, arrays, hidden):
    """inverse · hidden, in the promoted dtype of hidden vectors and parameters."""
    inverse = self._of(arrays)["inverse"]
    dtype = self._operand_dtype(hidden, inverse)
    return softmax.linear_scores(hidden, inverse, dtype=dtype).astype(dtype)

  def _linear(self, arrays):
    place, shared = placed_rows(self._of(arrays), self.vocab, self.vocab_axis)
    return RowFactory(place, shared, (self.embedding or self).code.rows), arrays["bias"]
