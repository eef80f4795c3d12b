"""Which heads do the tables of the grouped head compare, and how does each come to be?"""

import dataclasses
from collections.abc import Callable

from configs.grouped_lm import HeadOf, dense, grouped
from experiments.grouped_settings import Setting
from vqjax import Embedding, GroupedHead, Head
from vqjax.config import Experiment
from vqjax.training import FromRun


@dataclasses.dataclass(frozen=True)
class Row:
  """A model that is trained.

  Attributes:
    name: of its run.
    label: what tables call it.
    make: its experiment in a setting.
    needs: the row that it starts from.
  """

  name: str
  label: str
  make: Callable[[Setting], Experiment]
  needs: str | None = None


def _plain(name: str, label: str, head: HeadOf, window: bool = False) -> Row:
  """From scratch."""
  fields = lambda s: {"window": s.window} if window else {}
  return Row(name, label, lambda s: s.experiment(name, head, **fields(s)))


def _more(s: Setting) -> Experiment:
  """The trained GPT-2, trained on as long as what is made of it."""
  begun = s.experiment("gpt-2-more", dense, train=s.tune)
  return dataclasses.replace(begun, start=FromRun(s.path("gpt-2")))


def of_groups(groups: int) -> HeadOf:
  """A grouped head of so many groups."""

  def make(vocab: int, dim: int, embedding: Embedding) -> Head:
    del embedding
    return GroupedHead(vocab, dim, groups)

  return make


EVERY = (
  _plain("gpt-2", "GPT-2", dense),
  _plain("gpt-neo", "GPT-Neo", dense, window=True),
  _plain("grouped", "grouped", grouped),
  Row("gpt-2-more", "GPT-2, trained on", _more, "gpt-2"),
)


def rows(s: Setting) -> list[Row]:
  """Those of a setting, each after the one that it starts from."""
  own = [row for row in EVERY if row.name in s.rows]
  return own + [
    _plain(f"groups-{groups}", f"{groups:,} groups", of_groups(groups)) for groups in s.sizes
  ]
