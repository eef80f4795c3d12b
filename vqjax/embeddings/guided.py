"""What does an embedding look like that is drawn to a trained table while it learns?"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.ops.vocabulary import in_vocabulary, mean_in_vocabulary
from vqjax.types import Size


class GuidedEmbedding(Embedding):
  """The student's vectors; training adds their squared distances to the rows of another table.

  The table is the variable `table` of the collection `guide`, which `convert.FromTable` fills. What
  ships is the student. The distillation of Chen, Min and Sun, Learning K-way D-dimensional discrete
  codes for compact embedding representations, 2018, Section 3.3.

  Attributes:
    student: of this vocabulary and width.
    weight: coefficient of the mean over tokens of the squared distance.
  """

  student: Embedding
  weight: float = 1.0

  def setup(self):
    if (self.student.vocab, self.student.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"the student is {self.student.vocab} x {self.student.dim} in an embedding of"
        f" {self.vocab} x {self.dim}; give both the same"
      )
    if not 0 <= self.weight < math.inf:
      raise ValueError(f"weight {self.weight} is negative or not finite; 1 is usual")
    shape = self.vocab, self.dim
    self.guide = self.variable("guide", "table", lambda: jnp.zeros(shape, jnp.float32))

  def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
    """The student's vector of each token; nan for a token outside [0, V)."""
    return self.student(tokens)

  def loss_terms(
    self, tokens: Integer[Array, "*B"], deterministic: bool = True
  ) -> tuple[Float[Array, "*B D"], dict[str, Float[Array, ""]]]:
    """The vectors, the student's terms and "guide"."""
    vectors, terms = self.student.loss_terms(tokens, deterministic)
    return vectors, terms | self._distance(tokens, vectors)

  def aux(self, tokens: Integer[Array, "*B"]) -> dict[str, Float[Array, ""]]:
    """The student's terms and "guide"."""
    return self.student.aux(tokens) | self._distance(tokens, self.student(tokens))

  def _distance(self, tokens, vectors):
    known, token = in_vocabulary(tokens, self.vocab)
    # A vector that is none has no distance, and its gradient none that is nan.
    vectors = jnp.where(known[..., None], vectors, 0.0)
    square = ((vectors - self.guide.value[token]) ** 2).sum(axis=-1)
    return {"guide": self.weight * mean_in_vocabulary(square, tokens, self.vocab)}

  def table(self) -> Float[Array, "V D"]:
    """The student's."""
    return self.student.table()

  def size(self) -> Size:
    """The student's, and the bytes of the guide."""
    own = self.student.size()
    return own._replace(state_bytes=own.state_bytes + 4 * self.vocab * self.dim)

  def shipped(self) -> Size:
    """The student's."""
    return self.student.shipped()

  def logical_axes(self) -> dict:
    """The student's, and those of the guide."""
    axes = {name: {"student": tree} for name, tree in self.student.logical_axes().items()}
    return axes | {"guide": {"table": ("vocab", "table_embed")}}
