"""In which batches does a model see whole documents with a class each?"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np

from vqjax.data.cache import TokenSplit
from vqjax.data.pipeline import ENDLESS, NONE, Batch, Loader, Order


@dataclasses.dataclass(frozen=True)
class Documents(Loader):
  """Documents and their classes, shuffled anew each epoch: {"inputs": [B, T], "targets": [B]}.

  A document has its first T tokens, without the one that ends it, and `NONE` behind them.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def whole(self, split, *, batch, context):
    return _AllDocuments(split, batch, context)

  def _source(self, split, batch, context, seed, rows):
    return _DocumentBatches(split, batch, context, seed, rows)


class _Reader:
  """Documents by number, cut off or filled up to `context`."""

  def __init__(self, split: TokenSplit, context: int):
    self.split, self.context = split, context
    self.ends = np.flatnonzero(split.tokens == split.eos)
    self.starts = np.concatenate([[0], self.ends[:-1] + 1])
    self._check()

  def _check(self):
    if self.split.labels is None:
      raise ValueError("the documents have no classes; choose labelled data, such as AGNews()")
    found = len(self.ends), len(self.split.labels)
    if found != (self.split.documents,) * 2:
      raise ValueError(
        f"{self.split.documents} documents have {found[0]} ends and {found[1]} classes; a text that"
        " has the ending token in it cannot be told apart: choose another tokenizer"
      )

  def __call__(self, number: np.ndarray) -> Batch:
    """A batch of these documents; `NONE` is none: no token, no class."""
    first, last = self.starts[number][:, None], self.ends[number][:, None]
    place = first + np.arange(self.context)
    inside = (place < last) & (number != NONE)[:, None]
    tokens = self.split.tokens[np.minimum(place, last)].astype(np.int32)
    return {
      "inputs": np.where(inside, tokens, NONE).astype(np.int32),
      "targets": np.where(number == NONE, NONE, self.split.labels[number]).astype(np.int32),
    }


class _DocumentBatches:
  def __init__(self, split, batch, context, seed, rows):
    self.read = _Reader(split, context)
    self.order = Order(split.documents, batch, seed, rows)

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    return self.read(self.order[index])


class _AllDocuments:
  """Every document once, in order; the last batch is filled up with none."""

  def __init__(self, split, batch, context):
    self.read, self.batch = _Reader(split, context), batch

  def __len__(self) -> int:
    return math.ceil(self.read.split.documents / self.batch)

  def __iter__(self) -> Iterator[Batch]:
    for step in range(len(self)):
      number = step * self.batch + np.arange(self.batch)
      yield self.read(np.where(number < self.read.split.documents, number, NONE))
