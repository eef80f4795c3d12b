"""How does a compressed model learn from the dense one it was made of?"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lab.conversion.starts import dense_rows
from vqjax.lab.training.checkpoint import check_tokenizer, read_variables
from vqjax.lab.training.run import Text
from vqjax.models import Transformer
from vqjax.ops.distillation import SoftTargetLoss, block_soft_target_loss, linear_soft_target_loss
from vqjax.ops.vocabulary import mean_in_vocabulary


class Distilled(nn.Module):
  """A student whose training loss has a term for its distance from a frozen teacher.

  The term is weight · T² · KL(teacher ‖ student) at temperature T, the mean over the tokens, exact
  and in tiles: neither has logits. It is the student alone that is evaluated, sampled from and
  measured; train it with `Train(trainable=("student",))`.

  Attributes:
    student: a model with any head that scores its vocabulary in blocks.
    teacher: a model whose head is linear (`LinearHead` or `CodebookHead`).
    weight: coefficient of the term.
    temperature: divides the scores of both.

  Raises:
    ValueError: when it is initialised or applied: a weight that is negative or not finite, or
      models of different vocabularies.
    TypeError: likewise: a teacher whose head is not linear, a student's that has no blocks.
  """

  student: Transformer
  teacher: Transformer
  weight: float = 1.0
  temperature: float = 1.0

  def setup(self):
    if not 0 <= self.weight < math.inf:
      raise ValueError(
        f"distillation weight {self.weight} is negative or not finite; 1 is usual, 0 for no teacher"
      )
    if not _is_linear(self.teacher.head):
      raise TypeError(
        f"the teacher's head is a {type(self.teacher.head).__name__}, which scores no rows; distil"
        " from a LinearHead or a CodebookHead"
      )
    if self.student.head.vocab != self.teacher.head.vocab:
      raise ValueError(
        f"the student has {self.student.head.vocab} tokens, the teacher {self.teacher.head.vocab};"
        " distil between models of one tokenizer"
      )

  @property
  def embedding(self) -> Embedding:
    """The student's embedding."""
    return self.student.embedding

  @property
  def head(self) -> Head:
    """The student's head."""
    return self.student.head

  @property
  def context(self) -> int:
    """The student's."""
    return self.student.context

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T V"]:
    """The student's logits."""
    return self.student(tokens, deterministic)

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """The student's log-probability, in nats, of each target."""
    return self.student.log_prob(tokens, targets, deterministic)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """The student's loss terms, and "distillation", of the places that have a target."""
    hidden, terms = self.student.hidden_and_terms(tokens, deterministic)
    log_prob, of_head = self.student.head_terms(hidden, targets)
    teacher_hidden = jax.lax.stop_gradient(self.teacher.hidden(tokens))
    found = self._soft_target_loss(hidden, teacher_hidden)
    kl = mean_in_vocabulary(found.kl, targets, self.student.head.vocab)
    return log_prob, terms | of_head | {"distillation": self.weight * self.temperature**2 * kl}

  def _soft_target_loss(self, hidden, teacher_hidden) -> SoftTargetLoss:
    """By tiles of rows where the student's head has rows, else by the blocks that it scores."""
    head, teacher = self.student.head, self.teacher.head
    options = {
      "temperature": self.temperature,
      "teacher_softcap": getattr(teacher, "softcap", None),
    }
    rows, bias = jax.lax.stop_gradient(teacher.linear())
    if _is_linear(head):
      weight, own_bias = head.linear()
      return linear_soft_target_loss(
        *(hidden, weight, teacher_hidden, rows, own_bias, bias),
        softcap=getattr(head, "softcap", None),
        vocab_axis=head.vocab_axis,
        **options,
      )
    by_blocks = functools.partial(block_soft_target_loss, **options)
    return head.over_blocks(by_blocks, hidden, teacher_hidden, rows, bias)

  def logical_axes(self) -> dict:
    """Those of both, under their names."""
    axes: dict[str, Any] = {}
    for name in ("student", "teacher"):
      for collection, tree in getattr(self, name).logical_axes().items():
        axes.setdefault(collection, {})[name] = tree
    return axes


def _is_linear(head: Head) -> bool:
  return hasattr(type(head), "linear")


@dataclasses.dataclass(frozen=True)
class FromTeacher:
  """The start of a `Distilled` model: the teacher from its run, the student by a start of its own.

  Attributes:
    folder: the teacher's run.
    student: the student's `Experiment.init_from`, such as `FromDense(...)`; None: as initialised.
  """

  folder: str
  student: Callable[..., dict] | None = None

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The variables of both."""
    check_tokenizer(self.folder, text)
    teacher, step = read_variables(self.folder)
    dense_rows(teacher, f"checkpoint {step} of {self.folder}")
    student = _part(variables, "student")
    if self.student is not None:
      student = self.student(text, model.student, student)
    names = student.keys() | teacher.keys()
    both = {"student": student, "teacher": teacher}
    return {
      name: {part: tree[name] for part, tree in both.items() if name in tree} for name in names
    }


def _part(variables: dict[str, Any], name: str) -> dict[str, Any]:
  return {collection: tree[name] for collection, tree in variables.items() if name in tree}
