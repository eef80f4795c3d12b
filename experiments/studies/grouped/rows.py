"""Which heads do the tables of the grouped head compare, and how does each come to be?"""

import dataclasses
from collections.abc import Callable

from configs.grouped_lm import HeadOf, dense, grouped
from experiments.studies.grouped.settings import Setting
from vqjax import Embedding, GroupedHead, Head, UnsharedGroupedHead, convert
from vqjax.convert.orders import Ordering
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.training import FromRun


@dataclasses.dataclass(frozen=True)
class Row:
  """A model that is trained.

  Attributes:
    name: of its run.
    label: what tables call it.
    make: its experiment in a setting.
    needs: the row that it starts from.
    trained: False: it is evaluated as it begins.
  """

  name: str
  label: str
  make: Callable[[Setting], Experiment]
  needs: str | None = None
  trained: bool = True


def _plain(name: str, label: str, head: HeadOf, window: bool = False) -> Row:
  """From scratch."""
  fields = lambda s: {"window": s.window} if window else {}
  return Row(name, label, lambda s: s.experiment(name, head, **fields(s)))


def _regrouped(name: str, label: str, by: Ordering) -> Row:
  """From scratch, with tokens in another order than the tokenizer's."""

  def make(s: Setting) -> Experiment:
    begun = s.experiment(name, ordered)
    return dataclasses.replace(begun, init_from=conversion.Regrouped(by))

  return Row(name, label, make)


def ordered(vocab: int, dim: int, embedding: Embedding) -> Head:
  """A grouped head that keeps an order of its tokens."""
  del embedding
  return GroupedHead(vocab, dim, order_init=convert.in_order)


def unshared(vocab: int, dim: int, embedding: Embedding) -> Head:
  """One linear for each group."""
  del embedding
  return UnsharedGroupedHead(vocab, dim)


def of_groups(groups: int) -> HeadOf:
  """A grouped head of so many groups."""

  def make(vocab: int, dim: int, embedding: Embedding) -> Head:
    del embedding
    return GroupedHead(vocab, dim, groups)

  return make


TEACHER = "gpt-2"
"""The row whose trained model teaches, and is converted."""


def _more(s: Setting) -> Experiment:
  """The trained GPT-2, trained on as long as what is made of it."""
  begun = s.experiment("gpt-2-more", dense, train=s.tune)
  return dataclasses.replace(begun, init_from=FromRun(s.path(TEACHER)))


def _distilled(s: Setting) -> Experiment:
  """The paper's head from scratch, taught by the trained GPT-2."""
  own, teacher = s.experiment("distilled", grouped), s.experiment(TEACHER, dense)
  train = dataclasses.replace(own.train, trainable=("student",))
  model = conversion.Distilled(own.model, teacher.model)
  return dataclasses.replace(
    own, model=model, train=train, init_from=conversion.FromTeacher(s.path(TEACHER))
  )


def _converted(
  name: str, label: str, frequency: bool = False, tuned: bool = False, distillation: float = 0.0
) -> Row:
  """The trained GPT-2 with a grouped head made of its dense one."""

  def make(s: Setting) -> Experiment:
    own = ordered if frequency else grouped
    target = convert.ToGrouped(by=convert.ByFrequency() if frequency else None)
    return conversion.converted(
      *(s.experiment(TEACHER, dense), s.path(TEACHER)),
      *(own(FROM_TOKENIZER, s.dim, None), target),
      name=f"{s.name}-{name}",
      train=s.tune,
      distillation=distillation,
    )

  return Row(name, label, make, TEACHER, tuned)


EVERY = (
  _plain("gpt-2", "GPT-2", dense),
  _plain("gpt-neo", "GPT-Neo", dense, window=True),
  _plain("grouped", "grouped", grouped),
  _regrouped("shuffled", "grouped, tokens shuffled", convert.Shuffled()),
  _regrouped("frequency", "grouped, by frequency", convert.ByFrequency()),
  _regrouped("clusters", "grouped, by clusters", convert.ByClusters(convert.ContextKMeans())),
  _plain("unshared", "one linear a group", unshared),
  Row("distilled", "grouped, taught by GPT-2", _distilled, TEACHER),
  Row("gpt-2-more", "GPT-2, trained on", _more, TEACHER),
  _converted("converted", "GPT-2, converted"),
  _converted("converted-frequency", "GPT-2, converted by frequency", frequency=True),
  _converted("tuned", "GPT-2, converted, trained on", tuned=True),
  _converted("tuned-frequency", "GPT-2, by frequency, trained on", frequency=True, tuned=True),
  _converted(
    "tuned-distilled",
    "GPT-2, by frequency, trained on and taught",
    frequency=True,
    tuned=True,
    distillation=1.0,
  ),
)


def rows(s: Setting) -> list[Row]:
  """Those of a setting, each after the one that it starts from."""
  own = [row for row in EVERY if row.name in s.rows]
  return own + [
    _plain(f"groups-{groups}", f"{groups:,} groups", of_groups(groups)) for groups in s.sizes
  ]
