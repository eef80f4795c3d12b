"""In which batches does a model see the tokens, and how does an interrupted run find its place?"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from vqjax.lab.data.cache import TokenSplit

Batch = dict[str, np.ndarray]

NONE = -1
"""In targets: this place has none. In inputs of whole documents: behind the end."""

ENDLESS = 2**40
"""Batches of a source: an epoch's order depends on its number, so a run is one long sequence."""


class Loader(abc.ABC):
  """How a split is cut into an endless sequence of batches: a frozen dataclass for configs."""

  def batches(
    self,
    split: TokenSplit,
    *,
    batch: int,
    context: int,
    seed: int,
    rows: np.ndarray | None = None,
  ) -> grain.DatasetIterator:
    """Batches of these `shapes`, or the rows `rows` of each.

    `get_state()` of the iterator is JSON, and `set_state` goes on exactly there, whichever rows are
    read.

    Raises:
      ValueError: the split is too small for one batch, or the context holds no token.
    """
    if context < 1:
      raise ValueError(f"model.context {context} holds no token; give at least 1")
    rows = np.arange(batch) if rows is None else rows
    source = self._source(split, batch, context, seed, rows)
    # A thread runs ahead, so that no step waits even where the tokens are not in memory yet.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(source).to_iter_dataset(reading))

  @abc.abstractmethod
  def shapes(self, batch: int, context: int) -> dict[str, Any]:
    """Shape and dtype of "inputs", "targets" and whatever else is in a batch, rows first.

    A target of `NONE` is no target.
    """

  @abc.abstractmethod
  def whole(self, split: TokenSplit, *, batch: int, context: int) -> Iterable[Batch]:
    """Batches of these shapes in which every target of a split is exactly once, in order."""

  def text_bytes(self, split: TokenSplit) -> int | None:
    """UTF-8 bytes of the text that the targets of `whole` spell; None: they spell none."""
    return split.text_bytes

  @abc.abstractmethod
  def _source(
    self, split: TokenSplit, batch: int, context: int, seed: int, rows: np.ndarray
  ) -> "grain.sources.RandomAccessDataSource":
    """Batch number -> the rows of it that this process reads."""


class _NextTokens(Loader):
  """{"inputs", "targets": [B, T] int32, "reset": [B] bool}: every target follows its input.

  The first token of the split follows an `eos`. `reset` marks rows that do not continue the same
  row of the batch before.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": row, "reset": jax.ShapeDtypeStruct((batch,), np.bool_)}

  def whole(self, split, *, batch, context):
    return EvaluationBatches(split, batch, context)


def _check_tokens(split, batch, context):
  needed = batch * context
  if len(split.tokens) < needed:
    raise ValueError(
      f"{len(split.tokens)} tokens are too few for one batch of {batch} windows of {context}"
      f" ({needed} tokens); lower train.batch or model.context, or give more text"
    )


@dataclasses.dataclass(frozen=True)
class Windows(_NextTokens):
  """Windows of consecutive tokens, shuffled anew each epoch.

  An epoch has every token: the last window starts early enough to be whole. Where batches do not
  divide an epoch, one of them holds the end of one and the start of the next.

  Attributes:
    shuffle: False: the windows come in the order of the text.
  """

  shuffle: bool = True

  def _source(self, split, batch, context, seed, rows):
    return _WindowBatches(split, batch, context, seed if self.shuffle else None, rows)


@dataclasses.dataclass(frozen=True)
class Streams(_NextTokens):
  """Contiguous streams: row b of a batch goes on where row b of the batch before ended.

  The split is cut into as many equal streams as a batch has rows; the tokens that are left over at
  the end of each are dropped. What recurrent models that carry their state need.
  """

  def whole(self, split, *, batch, context):
    """The same in streams, so that a model that remembers its rows reads each as one text."""
    return EvaluationStreams(split, batch, context)

  def _source(self, split, batch, context, seed, rows):
    del seed
    return _StreamBatches(split, batch, context, rows)


class _WindowBatches:
  def __init__(self, split, batch, context, seed, rows):
    _check_tokens(split, batch, context)
    self.split, self.context = split, context
    windows = math.ceil(len(split.tokens) / context)
    self.order = Order(windows, batch, seed, rows)

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    start = self.order[index] * self.context
    start = np.minimum(start, len(self.split.tokens) - self.context)
    return _rows(self.split, start, self.context, reset=True)


class Order:
  """Batch i of a run: places i·B to (i + 1)·B of the epochs' permutations, laid end to end.

  Attributes:
    items: how many there are in an epoch.
    batch: rows of a batch.
    seed: of the permutations; None: each epoch has the items in their order.
    rows: those of a batch that are read here.
  """

  def __init__(self, items: int, batch: int, seed: int | None, rows: np.ndarray):
    self.items, self.batch, self.seed, self.rows = items, batch, seed, rows
    self._order = functools.lru_cache(maxsize=2)(self._permutation)

  def __getitem__(self, index: int) -> np.ndarray:
    number = np.arange(index * self.batch, (index + 1) * self.batch)[self.rows]
    epoch, place = np.divmod(number, self.items)
    return np.array([self._order(int(e))[p] for e, p in zip(epoch, place)])

  def _permutation(self, epoch: int) -> np.ndarray:
    if self.seed is None:
      return np.arange(self.items)
    return np.random.default_rng([self.seed, epoch]).permutation(self.items)


class _StreamBatches:
  def __init__(self, split, batch, context, rows):
    _check_tokens(split, batch, context)
    self.split, self.context = split, context
    self.length = len(split.tokens) // batch
    self.starts = (np.arange(batch) * self.length)[rows]

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    step = index % (self.length // self.context)
    return _rows(self.split, self.starts + step * self.context, self.context, reset=step == 0)


def _rows(split: TokenSplit, starts: np.ndarray, context: int, reset: bool) -> Batch:
  """Windows of targets from each start; their inputs are one token earlier."""
  place = starts[:, None] + np.arange(context)
  targets = split.tokens[place].astype(np.int32)
  inputs = np.empty_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  before = split.tokens[np.maximum(starts - 1, 0)].astype(np.int32)
  inputs[:, 0] = np.where(starts == 0, split.eos, before)
  return {"inputs": inputs, "targets": targets, "reset": np.full(len(starts), reset)}


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """Batches in which every token of a split is a target exactly once, in order.

  {"inputs", "targets": [B, T] int32, "reset": [B] bool}, all of one shape; the targets are `NONE`
  where the text has ended. `reset` is True: no row continues another.

  Attributes:
    split: the tokens.
    batch: rows, B.
    context: tokens in a row, T.
  """

  split: TokenSplit
  batch: int
  context: int

  def __len__(self) -> int:
    return math.ceil(len(self.split.tokens) / (self.batch * self.context))

  def __iter__(self) -> Iterator[dict[str, Any]]:
    size = self.batch * self.context
    for first in range(0, len(self.split.tokens), size):
      place = first + np.arange(size).reshape(self.batch, self.context)
      yield _until(self.split, place, len(self.split.tokens), reset=True)


class EvaluationStreams(EvaluationBatches):
  """The same in B streams of nearly equal length, each of which one row reads to its end.

  Row b of a batch goes on where row b of the batch before ended; the first batch resets all rows.
  """

  def __len__(self) -> int:
    return math.ceil(self._length / self.context)

  @property
  def _length(self) -> int:
    return math.ceil(len(self.split.tokens) / self.batch)

  def __iter__(self) -> Iterator[dict[str, Any]]:
    starts = np.arange(self.batch)[:, None] * self._length
    ends = np.minimum(starts + self._length, len(self.split.tokens))
    for step in range(len(self)):
      place = starts + step * self.context + np.arange(self.context)
      yield _until(self.split, place, ends, reset=step == 0)


def _until(split: TokenSplit, place: np.ndarray, end: np.ndarray | int, reset: bool) -> Batch:
  """Targets at these places, none from `end` on, and their inputs, one token earlier."""
  total, real = len(split.tokens), place < end
  targets = np.where(real, split.tokens[np.minimum(place, total - 1)].astype(np.int32), NONE)
  before = split.tokens[np.clip(place - 1, 0, total - 1)]
  inputs = np.where(real, np.where(place == 0, split.eos, before), 0)
  return {
    "inputs": inputs.astype(np.int32),
    "targets": targets.astype(np.int32),
    "reset": np.full(len(place), reset),
  }
