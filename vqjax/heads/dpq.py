"""The head that scores the rows of a `DPQEmbedding`, trained end to end."""

# The rows are those of an embedding that the head owns, declared under the name `table`:
#
#   query [V, quantizer.dim]  --quantiser-->  row [D]  --LinearHead-->  scores
#
#   tiles of the loss   all rows, with the quantiser's running statistics, which they do not change
#   targets of a batch  quantised once more as inputs of an embedding would be (`_training_parts`):
#                       they update these statistics and give the quantiser's terms of the loss

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from flax import linen as nn

from vqjax.assign.text import TextStats
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.embeddings.dpq import DPQEmbedding, check_quantizer
from vqjax.heads.base import Arrays
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory
from vqjax.quantizers import Quantizer
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["DPQHead"]


class DPQHead(LinearHead):
  """softmax(hidden · rowᵀ + bias) with the rows of a `DPQEmbedding`.

  This is DPQ on the output side; the head owns the embedding. The rows of the whole vocabulary are
  quantised a tile at a time, as outside training; the targets of a batch update the quantiser's
  statistics and its loss terms. To share the codes of the input embedding, take
  `DenseHead(embedding=e)`. `compact` and `vqjax.convert.to_head` convert the head to a
  `ProductHead` for inference.

  Attributes:
    quantizer: DPQ-SX or DPQ-VQ, with results of width `dim`.
    use_bias: add a score for each token.
    query_init: initialiser of the [V, quantizer.dim] query table.
    bias_init: initialiser of the [V] bias.
  """

  quantizer: Quantizer
  use_bias: bool = False
  query_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def check(self) -> None:
    super().check()
    check_quantizer(self.quantizer)

  def declare(self) -> Declaration:
    """The query table and the quantiser of the rows, and the bias [V]."""
    declared = {"table": self._rows_embedding()}
    if self.use_bias:
      declared["bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Queries that are contexts, and each token's frequency."""
    width = self._rows_embedding().quantizer.dim
    return super()._of_text(text) | {"query_init": text.contexts(width)}

  def setup(self):
    super().setup()
    # Declared anew instead of kept from `declare`: Linen binds what is assigned here.
    self.table = self._rows_embedding()

  def _rows_embedding(self) -> DPQEmbedding:
    return DPQEmbedding(
      vocab=self.vocab,
      dim=self.dim,
      # A field is bound to this head; the embedding gets one of its own.
      quantizer=self.quantizer.clone(parent=None),
      query_init=self.query_init,
      param_dtype=self.param_dtype,
      vocab_axis=self.vocab_axis,
      parent=None,
    )

  def flops_per_token(self) -> int:
    """Every row of the vocabulary is quantised and multiplied."""
    return self.vocab * (self._rows_embedding().flops_per_token() + 2 * self.dim)

  def parts(self) -> dict[str, Any]:
    return super().parts() | {"table": self.table.parts()}

  def _rows(self, arrays: Arrays) -> RowFactory:
    return self.table.rows_of(arrays["table"])

  def _training_parts(self, tokens):
    """The quantiser's terms for the targets, which update its statistics in training."""
    parts, terms = super()._training_parts(tokens)
    # A step that makes the statistics mutable trains; an evaluation does not.
    train = self.is_mutable_collection("batch_stats")
    _, of_rows = self.table._embedded(tokens, train)
    return parts, terms | of_rows

  def compact(self, variables: dict) -> CompactEmbedding:
    """The bit-packed codes and the values of the rows, and the bias."""
    own = {name: trees["table"] for name, trees in variables.items() if "table" in trees}
    bias = np.asarray(variables["params"]["bias"], np.float32) if self.use_bias else None
    return dataclasses.replace(self._rows_embedding().compact(own), bias=bias)
