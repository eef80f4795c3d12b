"""The dense softmax head, with a weight of its own or tied to an embedding."""

# Where the rows are, by the field `embedding`:
#
#   None                  the head's variable `weight`        arrays["weight"]
#   one of vqjax          rows of whatever that declares      embedding.rows_of(arrays["embedding"])
#   flax.linen.Embed      its table, which Flax creates       arrays["embedding"]["embedding"]
#
# A tied embedding is bound where the model binds it; the head reads its arrays and owns none.

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Embedding
from vqjax.heads.base import Arrays, Head
from vqjax.heads.linear import LinearHead
from vqjax.ops import vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.scores import OutputFunction, ScoreOptions
from vqjax.ops.vocab_parallel import Sharded
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["DenseHead"]


class DenseRows(Head):
  """Base class of heads with D numbers for each token, their own or an embedding's.

  Attributes:
    use_bias: add a score for each token.
    embedding: the embedding whose table is the weight, of vqjax or a `flax.linen.Embed`; None: the
      head has its own weight.
    weight_init: initialiser of the [V, D] weight.
    bias_init: initialiser of the [V] bias.
  """

  use_bias: bool = False
  embedding: Embedding | nn.Embed | None = None
  weight_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The weight [V, D], or the tied embedding, and the bias [V]."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    weight = Variable(shape, axes, self.weight_init, self.param_dtype, pad_value=0)
    if self.embedding is None:
      declared = {"weight": weight}
    elif isinstance(self.embedding, nn.Embed):
      # Not created from here: only shape and axes of Flax's variable are read.
      declared = {"embedding": {"embedding": weight}}
    else:
      declared = {"embedding": self.embedding}
    if self.use_bias:
      declared["bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def check(self) -> None:
    super().check()
    tied = self.embedding
    if tied is None:
      return
    if not isinstance(tied, (Embedding, nn.Embed)):
      raise ValueError(
        f"`embedding` must be an embedding of vqjax or an nn.Embed; got a {type(tied).__name__}."
        " Give the model's embedding to its head."
      )
    foreign = isinstance(tied, nn.Embed)
    vocab, dim = (tied.num_embeddings, tied.features) if foreign else (tied.vocab, tied.dim)
    if (vocab, dim) != (self.vocab, self.dim):
      raise ValueError(
        f"`embedding` must have vocab {self.vocab} and dim {self.dim}; got vocab {vocab} and dim"
        f" {dim}. Give the head and the embedding the same."
      )

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Rows that are contexts, unless an embedding has them, and each token's frequency."""
    rows = text.contexts(self.dim) if self.embedding is None else None
    return super()._of_text(text) | {"weight_init": rows}

  def parts(self) -> dict[str, Any]:
    """The variables, and the table of an `nn.Embed`."""
    found = super().parts()
    if isinstance(self.embedding, nn.Embed):
      table = vocab_parallel.automatic(jnp.asarray(self.embedding.embedding))
      found["embedding"] = {"embedding": Sharded(table, 0)}
    return found

  def _rows(self, arrays: Arrays) -> RowFactory:
    if self.embedding is None:
      return as_row_factory(arrays["weight"])
    if isinstance(self.embedding, nn.Embed):
      return as_row_factory(arrays["embedding"]["embedding"])
    return self.embedding.rows_of(arrays["embedding"])


class DenseHead(DenseRows, LinearHead):
  """softmax(hidden · weightᵀ + bias), with a row of D numbers for each token.

  A tied head scores against the table of an embedding. Give the same object to both:

    embedding = DenseEmbedding(vocab, dim)
    Transformer(embedding=embedding, head=DenseHead(vocab, dim, embedding=embedding))

  Attributes:
    output: function of each score that the softmax is taken of, such as `SigSoftmax()`, instead of
      a `softcap`; None: the score itself.
  """

  output: OutputFunction | None = dataclasses.field(default=None, kw_only=True)

  def check(self) -> None:
    super().check()
    # Constructed for its check alone, which refuses a cap and another function together.
    ScoreOptions(softcap=self.softcap, output=self.output)
    if not isinstance(self.output, (OutputFunction, type(None))):
      raise ValueError(
        f"`output` must be an OutputFunction or None; got {self.output!r}. Give SigSoftmax()."
      )

  def _linear(self, arrays):
    if self.output is not None:
      raise ValueError(
        f"`output` must be None where rows and bias alone are read; got {self.output}. Use a head"
        " without an output function, or its log-probabilities."
      )
    return super()._linear(arrays)

  def _output(self) -> OutputFunction | None:
    return super()._output() if self.output is None else self.output
