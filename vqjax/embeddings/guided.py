"""An embedding that is trained towards a given table."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from vqjax.embeddings.base import Embedding
from vqjax.ops.vocabulary import in_vocabulary, mean_in_vocabulary
from vqjax.types import Size
from vqjax.variables import Declaration, Variable


class GuidedEmbedding(Embedding):
  """The student's vectors, trained towards the rows of a given table.

  Training adds the squared distances to the loss. The table is the variable `table` of the
  collection `guide`, which `convert.Guide` fills. Inference needs the student only. Source: the
  distillation of Chen, Min and Sun, Learning K-way D-dimensional discrete codes for compact
  embedding representations, 2018, Section 3.3.

  Attributes:
    student: an embedding of the same vocabulary and width.
    weight: coefficient of the mean over tokens of the squared distance.
  """

  student: Embedding
  weight: float = 1.0

  def declare(self) -> Declaration:
    """The student and the given table [V, D]."""
    zeros = lambda key, shape, dtype: jnp.zeros(shape, dtype)
    guide = Variable(
      (self.vocab, self.dim),
      ("vocab", "table_embed"),
      zeros,
      collection="guide",
      random=False,
    )
    return {"student": self.student, "table": guide}

  def check(self) -> None:
    """Check the student and the coefficient."""
    if (self.student.vocab, self.student.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"`student` must have vocab {self.vocab} and dim {self.dim}; got {self.student.vocab} and"
        f" {self.student.dim}. Give both the same."
      )
    if not 0 <= self.weight < math.inf:
      raise ValueError(f"`weight` must be finite and not negative; got {self.weight}. 1 is usual.")

  def flops_per_token(self) -> int:
    """The operations of the student."""
    return self.student.flops_per_token()

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
    # The nan vector of a token outside the vocabulary must not reach the gradient.
    vectors = jnp.where(known[..., None], vectors, 0.0)
    square = ((vectors - self.array("table")[token]) ** 2).sum(axis=-1)
    return {"guide": self.weight * mean_in_vocabulary(square, tokens, self.vocab)}

  def table(self) -> Float[Array, "V D"]:
    """The table of the student."""
    return self.student.table()

  def inference_size(self) -> Size:
    """The size of the student for inference."""
    return self.student.inference_size()
