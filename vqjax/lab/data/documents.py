"""How are whole documents of a split read by their numbers, and put into batches?"""

import abc
import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from vqjax.lab.data.cache import TokenSplit
from vqjax.lab.data.pipeline import ENDLESS, NONE, Batch, Loader, Order


class Reader(Protocol):
  """Examples of a split by their numbers."""

  def __len__(self) -> int:
    """How many there are."""

  def __call__(self, number: np.ndarray) -> Batch:
    """A batch of these examples, in which `NONE` is none: no token, no target."""


class Examples(Loader):
  """Whole examples, shuffled anew each epoch; their targets spell no text."""

  def whole(self, split, *, batch, context):
    return _AllExamples(self._reader(split, context), batch)

  def text_bytes(self, split):
    return None

  def _source(self, split, batch, context, seed, rows):
    return _ExampleBatches(self._reader(split, context), batch, seed, rows)

  @abc.abstractmethod
  def _reader(self, split: TokenSplit, context: int) -> Reader:
    """The examples of a split."""


class _ExampleBatches:
  def __init__(self, read, batch, seed, rows):
    self.read, self.order = read, Order(len(read), batch, seed, rows)

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    return self.read(self.order[index])


class _AllExamples:
  """Every example once, in order; the last batch is filled up with none."""

  def __init__(self, read, batch):
    self.read, self.batch = read, batch

  def __len__(self) -> int:
    return math.ceil(len(self.read) / self.batch)

  def __iter__(self) -> Iterator[Batch]:
    for step in range(len(self)):
      number = step * self.batch + np.arange(self.batch)
      yield self.read(np.where(number < len(self.read), number, NONE))


class DocumentRows:
  """Documents by number, cut off or filled up to `context` tokens."""

  def __init__(self, split: TokenSplit, context: int, ended: bool = False):
    """`ended` keeps the token that ends a document, where there is room for it.

    Raises:
      ValueError: a text has the ending token in it.
    """
    self.split, self.context, self.ended = split, context, ended
    self.ends = np.flatnonzero(split.tokens == split.eos)
    self.starts = np.concatenate([[0], self.ends[:-1] + 1])
    if len(self.ends) != split.documents:
      raise ValueError(
        f"{split.documents} documents have {len(self.ends)} ends: a text that has the ending token"
        " in it cannot be told apart; choose another tokenizer"
      )

  def __call__(self, number: np.ndarray) -> np.ndarray:
    """int32 [n, context]; `NONE` behind a document's end, and for the document `NONE`."""
    first, last = self.starts[number][:, None], self.ends[number][:, None]
    place = first + np.arange(self.context)
    inside = (place < last + self.ended) & (number != NONE)[:, None]
    tokens = self.split.tokens[np.minimum(place, last)].astype(np.int32)
    return np.where(inside, tokens, NONE).astype(np.int32)
