"""Distillation of a student model from a frozen teacher."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.convert.trained_variables import Variables, part_of, with_part
from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lab.starting_points.starts import dense_rows
from vqjax.lab.training.checkpoint import check_tokenizer, read_run_variables
from vqjax.lab.training.run_folder import EncodedText
from vqjax.lm.models import LanguageModel
from vqjax.ops.distillation import SoftTargetLoss, block_soft_target_loss, linear_soft_target_loss
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.vocabulary import in_vocabulary, mean_over

__all__ = ["Distilled", "FromTeacher"]


class Distilled(nn.Module):
  """A student whose training loss includes its divergence from a frozen teacher.

  The term is weight · T² · KL(teacher ‖ student) at temperature T, averaged over the tokens. It is
  exact and computed in tiles, without the logits of either model. All other methods are those of
  the student; train with `Train(trainable=("student",))`. Source: Hinton et al., Distilling the
  knowledge in a neural network, 2015.

  Attributes:
    student: a model with any head that scores its vocabulary in blocks.
    teacher: a model whose head is linear (`LinearHead` or `CodebookHead`).
    weight: coefficient of the term.
    temperature: T, which divides the scores of both models.

  Raises:
    ValueError: at initialisation or application: a weight that is negative or not finite, or
      models of different vocabularies.
    ValueError: at initialisation or application: the teacher's head is not linear, or the student's
      head has no blocks.
  """

  student: LanguageModel
  teacher: LanguageModel
  weight: float = 1.0
  temperature: float = 1.0

  def setup(self):
    if not 0 <= self.weight < math.inf:
      raise ValueError(
        f"`weight` must be at least 0 and finite; got {self.weight}. 1 is usual, 0 is no teacher."
      )
    if not _is_linear(self.teacher.head):
      raise ValueError(
        "`teacher.head` must be linear, a LinearHead or a CodebookHead; got a"
        f" {type(self.teacher.head).__name__}. Distil from another model."
      )
    if self.student.head.vocab != self.teacher.head.vocab:
      raise ValueError(
        f"`student` must have the teacher's {self.teacher.head.vocab} tokens; got"
        f" {self.student.head.vocab}. Distil between models of one tokenizer."
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
    """The student's context, the most tokens of a row."""
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
    """The student's loss terms, and the mean "distillation" term."""
    hidden, terms = self.student.hidden_and_terms(tokens, deterministic)
    log_prob, of_head = self.student.head_terms(hidden, targets)
    teacher_hidden = jax.lax.stop_gradient(self.teacher.hidden(tokens))
    soft = self._soft_target_loss(hidden, teacher_hidden)
    known, _ = in_vocabulary(targets, self.student.head.vocab)
    kl = mean_over(soft.kl, known)
    return log_prob, terms | of_head | {"distillation": self.weight * self.temperature**2 * kl}

  def _soft_target_loss(self, hidden, teacher_hidden) -> SoftTargetLoss:
    """The divergence, by tiles if the student's head is linear, else by its blocks."""
    head, teacher = self.student.head, self.teacher.head
    teacher_softcap = getattr(teacher, "softcap", None)
    rows, bias = jax.lax.stop_gradient(teacher.linear())
    if _is_linear(head):
      weight, own_bias = head.linear()
      return linear_soft_target_loss(
        hidden,
        weight,
        teacher_hidden,
        rows,
        own_bias,
        bias,
        teacher_softcap=teacher_softcap,
        options=ScoreOptions(
          temperature=self.temperature,
          softcap=getattr(head, "softcap", None),
          vocab_axis=head.vocab_axis,
        ),
      )
    by_blocks = functools.partial(
      block_soft_target_loss, temperature=self.temperature, teacher_softcap=teacher_softcap
    )
    return head.over_blocks(by_blocks, hidden, teacher_hidden, rows, bias)

  def logical_axes(self) -> dict:
    """Names of the axes of the variables of both models."""
    axes: Variables = {}
    for name in ("student", "teacher"):
      axes = with_part(axes, name, getattr(self, name).logical_axes())
    return axes


def _is_linear(head: Head) -> bool:
  return hasattr(type(head), "linear")


@dataclasses.dataclass(frozen=True)
class FromTeacher:
  """Initial variables of a `Distilled` model: the teacher's from its run.

  Attributes:
    folder: run folder of the teacher.
    student: the student's `Experiment.init_from`, such as `FromDense(...)`; None: freshly
      initialised.
  """

  folder: str
  student: Callable[..., dict] | None = None

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The variables of both models."""
    check_tokenizer(self.folder, text)
    teacher, step = read_run_variables(self.folder)
    dense_rows(teacher, f"checkpoint {step} of {self.folder}")
    student = part_of(variables, "student")
    if self.student is not None:
      student = self.student(text, model.student, student)
    return with_part(with_part({}, "student", student), "teacher", teacher)
