"""An embedding that is trained towards a given table."""

# loss of a step = ... + weight · mean over tokens of |student(token) - table[token]|²
#
# The table is a variable, so that it is saved with the run, but of a collection that no optimiser
# and no tied head reads: `parts`, `rows_of` and `inference_size` are the student's.

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from vqjax.assign.text import TextStats
from vqjax.embeddings.base import Arrays, Embedding
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.vocabulary import in_vocabulary, mean_over
from vqjax.types import Size
from vqjax.variables import Declaration, Variable

__all__ = ["GuidedEmbedding"]


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
    if not isinstance(self.student, Embedding):
      raise TypeError(
        f"`student` must be an embedding; got {type(self.student).__name__}. Give the one to train."
      )
    if (self.student.vocab, self.student.dim) != (self.vocab, self.dim):
      raise ValueError(
        f"`student` must have vocab {self.vocab} and dim {self.dim}; got {self.student.vocab} and"
        f" {self.student.dim}. Give both the same."
      )
    if not 0 <= self.weight < math.inf:
      raise ValueError(f"`weight` must be finite and not negative; got {self.weight}. 1 is usual.")

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    begun = self.student.started_from(text)
    return {"student": None if begun is self.student else begun}

  def flops_per_token(self) -> int:
    """The operations of the student."""
    return self.student.flops_per_token()

  def _embedded(self, tokens, train):
    vectors, terms = self.student._embedded(tokens, train)
    known, token = in_vocabulary(tokens, self.vocab)
    # The nan vector of a token outside the vocabulary must not reach the gradient.
    found = jnp.where(known[..., None], vectors, 0.0)
    square = ((found - self.array("table")[token]) ** 2).sum(axis=-1)
    return vectors, terms | {"guide": self.weight * mean_over(square, known)}

  def parts(self) -> dict[str, Any]:
    return self.student.parts()

  def rows_of(self, arrays: Arrays) -> RowFactory:
    """The rows of the student."""
    return self.student.rows_of(arrays)

  def inference_size(self) -> Size:
    return self.student.inference_size()
