"""What does the ordinary softmax head look like under the contract, free or tied?"""

from flax import linen as nn
from jaxtyping import Array, Float

from vqjax.embeddings.base import Embedding
from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Size


class DenseHead(LinearHead):
  """softmax(hidden · weightᵀ + bias): one row of D numbers for each token.

  Tied, it scores against the table of an embedding: give the same object to both,

    embedding = DenseEmbedding(vocab, dim)
    Transformer(embedding=embedding, head=DenseHead(vocab, dim, embedding=embedding))

  Attributes:
    use_bias: add a score for each token.
    embedding: the embedding whose table is the weight; None: the head has its own.
    weight_init: initialiser of the [V, D] weight.
    bias_init: initialiser of the [V] bias.
  """

  use_bias: bool = False
  embedding: Embedding | None = None
  weight_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    self._check_loss()
    self._check_tie()
    if self.embedding is None:
      shape = self.vocab, self.dim
      self.weight = self.param("weight", self.weight_init, shape, self.param_dtype)
    if self.use_bias:
      self.bias = self.param("bias", self.bias_init, (self.vocab,), self.param_dtype)

  def _check_tie(self):
    tied = self.embedding
    if tied is not None and (tied.vocab, tied.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"a head of vocab {self.vocab} and dim {self.dim} is tied to an embedding of vocab"
        f" {tied.vocab} and dim {tied.dim}; give both the same"
      )

  def _weight(self) -> RowFactory:
    return as_row_factory(self.weight) if self.embedding is None else self.embedding.rows()

  def _bias(self) -> Float[Array, "V"] | None:
    return self.bias if self.use_bias else None

  def size(self) -> Size:
    """V·D parameters and V for a bias; a tied head owns the bias alone."""
    params = (0 if self.embedding is not None else self.vocab * self.dim) + (
      self.vocab if self.use_bias else 0
    )
    return Size(params, bytes_of(params, self.param_dtype), 2 * self.vocab * self.dim)

  def logical_axes(self) -> dict:
    """The weight's and the bias's axes; a tied weight is the embedding's."""
    axes = {}
    if self.embedding is None:
      axes["params"] = {"weight": ("vocab", "table_embed")}
    else:
      own = self.embedding.logical_axes()
      axes = {collection: {"embedding": tree} for collection, tree in own.items()}
    if self.use_bias:
      axes["params"]["bias"] = ("vocab",)
    return axes
