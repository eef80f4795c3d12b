"""The dense softmax head, with a weight of its own or tied to an embedding."""

from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.embeddings.base import Embedding
from vqjax.heads.base import row_init
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.variables import Declaration, Variable


class DenseHead(LinearHead):
  """softmax(hidden · weightᵀ + bias), with a row of D numbers for each token.

  A tied head scores against the table of an embedding. Give the same object to both:

    embedding = DenseEmbedding(vocab, dim)
    Transformer(embedding=embedding, head=DenseHead(vocab, dim, embedding=embedding))

  Attributes:
    use_bias: add a score for each token.
    embedding: the embedding whose table is the weight; None: the head has its own weight.
    weight_init: initialiser of the [V, D] weight.
    bias_init: initialiser of the [V] bias.
  """

  use_bias: bool = False
  embedding: Embedding | None = None
  weight_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The weight [V, D], or the tied embedding, and the bias [V]."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    if self.embedding is None:
      declared = {"weight": Variable(shape, axes, self.weight_init, self.param_dtype)}
    else:
      declared = {"embedding": self.embedding}
    if self.use_bias:
      declared["bias"] = Variable((self.vocab,), ("vocab",), self.bias_init, self.param_dtype)
    return declared

  def check(self) -> None:
    """Checks that a tied embedding has the vocabulary and the width of the head."""
    super().check()
    tied = self.embedding
    if tied is not None and (tied.vocab, tied.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"`embedding` must have vocab {self.vocab} and dim {self.dim}; got vocab {tied.vocab} and"
        f" dim {tied.dim}. Give the head and the embedding the same."
      )

  def _weight(self) -> RowFactory:
    return self.embedding.rows() if self.embedding else as_row_factory(self.array("weight"))

  def _bias(self) -> Float[Array, "V"] | None:
    return self.array("bias")
