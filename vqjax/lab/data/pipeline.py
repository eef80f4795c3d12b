"""Loaders of batches: windows and streams of tokens, whole examples, evaluation."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from vqjax.lab.data.token_cache import TokenSplit

if TYPE_CHECKING:
  import grain

__all__ = [
  "NONE",
  "Batch",
  "EvaluationBatches",
  "EvaluationStreams",
  "Examples",
  "Loader",
  "Streams",
  "Windows",
]

Batch = dict[str, np.ndarray]

NONE = -1
"""In targets, a position without a target; in inputs of whole documents, one after the end."""

ENDLESS = 2**40
"""Length of a source: an epoch's order depends on its number, so that a run is one sequence."""


class Loader(abc.ABC):
  """A way to cut a split into an endless sequence of batches."""

  def batches(
    self,
    split: TokenSplit,
    *,
    batch: int,
    context: int,
    seed: int,
    rows: np.ndarray | None = None,
  ) -> grain.DatasetIterator:
    """Return an iterator of batches, or of the rows `rows` of each.

    `get_state()` of the iterator is JSON; after `set_state` it continues exactly there, for any
    `rows`.

    Raises:
      ValueError: the split is too small for one batch, or `context` is below 1.
    """
    # Not at the top: it takes half a second, and most commands train nothing.
    import grain

    if context < 1:
      raise ValueError(f"`model.context` must be at least 1; got {context}. Raise it.")
    rows = np.arange(batch) if rows is None else rows
    source = _Endless(self._batch_at(split, batch, context, seed, rows))
    # A thread runs ahead, so that no step waits even where the tokens are not in memory yet.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(source).to_iter_dataset(reading))

  @abc.abstractmethod
  def shapes(self, batch: int, context: int) -> dict[str, Any]:
    """Return shape and dtype of each array of a batch, rows first.

    A target of `NONE` is not a target.
    """

  @abc.abstractmethod
  def whole(self, split: TokenSplit, *, batch: int, context: int) -> Iterable[Batch]:
    """Return batches in which every target of a split occurs exactly once, in order."""

  def text_bytes(self, split: TokenSplit) -> int | None:
    """Return the UTF-8 bytes that the targets of `whole` spell; None: no text."""
    return split.text_bytes

  @abc.abstractmethod
  def _batch_at(
    self, split: TokenSplit, batch: int, context: int, seed: int, rows: np.ndarray
  ) -> Callable[[int], Batch]:
    """Return a function: number of a batch -> its rows that this process reads."""


class _Endless:
  """A source of grain, from a function of the number of a batch."""

  def __init__(self, get: Callable[[int], Batch]):
    self._get = get

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    return self._get(index)


class _NextTokens(Loader):
  """Next tokens: {"inputs", "targets": [B, T] int32, "reset": [B] bool}.

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
      f"`split` must have {needed} tokens for one batch of {batch} windows of {context}; got"
      f" {len(split.tokens)}. Lower train.batch or model.context, or give more text."
    )


@dataclasses.dataclass(frozen=True)
class Windows(_NextTokens):
  """Windows of consecutive tokens, shuffled anew each epoch.

  An epoch has every token: the last window starts early enough to be whole. A batch may hold the
  end of one epoch and the start of the next.
  """

  def _batch_at(self, split, batch, context, seed, rows):
    _check_tokens(split, batch, context)
    order = _Order(math.ceil(len(split.tokens) / context), batch, seed, rows)
    last = len(split.tokens) - context
    start = lambda index: np.minimum(order[index] * context, last)
    return lambda index: _rows(split, start(index), context, reset=True)


class _Order:
  """Batch i of a run: numbers i·B to (i + 1)·B of the epochs' permutations.

  Attributes:
    items: number of items in an epoch.
    batch: rows of a batch, B.
    seed: seed of the permutations.
    rows: the rows of a batch that this process reads.
  """

  def __init__(self, items: int, batch: int, seed: int, rows: np.ndarray):
    self.items, self.batch, self.seed, self.rows = items, batch, seed, rows
    # A batch reads from at most two epochs, and permutations of large splits are slow.
    self._order = functools.lru_cache(maxsize=2)(self._permutation)

  def __getitem__(self, index: int) -> np.ndarray:
    number = np.arange(index * self.batch, (index + 1) * self.batch)[self.rows]
    epoch, position = np.divmod(number, self.items)
    return np.array([self._order(int(e))[p] for e, p in zip(epoch, position)])

  def _permutation(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([self.seed, epoch]).permutation(self.items)


@dataclasses.dataclass(frozen=True)
class Streams(_NextTokens):
  """Contiguous streams: row b of a batch continues row b of the batch before.

  The split is cut into as many equal streams as a batch has rows; the tokens that are left over at
  the end of each are dropped. Recurrent models that carry their state need this.
  """

  def whole(self, split, *, batch, context):
    """Return the split in streams, for models that carry a state."""
    return EvaluationStreams(split, batch, context)

  def _batch_at(self, split, batch, context, seed, rows):
    del seed
    _check_tokens(split, batch, context)
    length = len(split.tokens) // batch
    starts = (np.arange(batch) * length)[rows]

    def at(index):
      step = index % (length // context)
      return _rows(split, starts + step * context, context, reset=step == 0)

    return at


def _rows(split: TokenSplit, starts: np.ndarray, context: int, reset: bool) -> Batch:
  """Windows of targets from each start; their inputs are one token earlier."""
  position = starts[:, None] + np.arange(context)
  targets = split.tokens[position].astype(np.int32)
  inputs = np.empty_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  before = split.tokens[np.maximum(starts - 1, 0)].astype(np.int32)
  inputs[:, 0] = np.where(starts == 0, split.eos, before)
  return {"inputs": inputs, "targets": targets, "reset": np.full(len(starts), reset)}


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """Batches in which every token of a split is a target exactly once, in order.

  {"inputs", "targets": [B, T] int32, "reset": [B] bool}, all of one shape; the targets are `NONE`
  after the end of the text. `reset` is True: no row continues another.

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

  def __iter__(self) -> Iterator[Batch]:
    size = self.batch * self.context
    for first in range(0, len(self.split.tokens), size):
      position = first + np.arange(size).reshape(self.batch, self.context)
      yield _until(self.split, position, len(self.split.tokens), reset=True)


class EvaluationStreams(EvaluationBatches):
  """Every token once, in B streams of nearly equal length, one for each row.

  Row b of a batch continues row b of the batch before; the first batch resets all rows.
  """

  def __len__(self) -> int:
    return math.ceil(self._length / self.context)

  @property
  def _length(self) -> int:
    return math.ceil(len(self.split.tokens) / self.batch)

  def __iter__(self) -> Iterator[Batch]:
    starts = np.arange(self.batch)[:, None] * self._length
    ends = np.minimum(starts + self._length, len(self.split.tokens))
    for step in range(len(self)):
      position = starts + step * self.context + np.arange(self.context)
      yield _until(self.split, position, ends, reset=step == 0)


def _until(split: TokenSplit, position: np.ndarray, end: np.ndarray | int, reset: bool) -> Batch:
  """Targets at these positions, none from `end` on, and their inputs."""
  total, real = len(split.tokens), position < end
  targets = np.where(real, split.tokens[np.minimum(position, total - 1)].astype(np.int32), NONE)
  before = split.tokens[np.clip(position - 1, 0, total - 1)]
  inputs = np.where(real, np.where(position == 0, split.eos, before), 0)
  return {
    "inputs": inputs.astype(np.int32),
    "targets": targets.astype(np.int32),
    "reset": np.full(len(position), reset),
  }


class _Reader(Protocol):
  """Random access to the examples of a split by their numbers."""

  def __len__(self) -> int:
    """Return the number of examples."""

  def __call__(self, number: np.ndarray) -> Batch:
    """Return a batch of these examples; the example `NONE` is empty."""


class Examples(Loader):
  """A loader of whole examples, shuffled anew each epoch.

  Their targets spell no text.
  """

  def whole(self, split, *, batch, context):
    return _AllExamples(self._reader(split, context), batch)

  def text_bytes(self, split):
    return None

  def _batch_at(self, split, batch, context, seed, rows):
    read = self._reader(split, context)
    order = _Order(len(read), batch, seed, rows)
    return lambda index: read(order[index])

  @abc.abstractmethod
  def _reader(self, split: TokenSplit, context: int) -> _Reader:
    """Return the examples of a split."""


class _AllExamples:
  """Every example once, in order; the last batch is filled with the example `NONE`."""

  def __init__(self, read, batch):
    self.read, self.batch = read, batch

  def __len__(self) -> int:
    return math.ceil(len(self.read) / self.batch)

  def __iter__(self) -> Iterator[Batch]:
    for step in range(len(self)):
      number = step * self.batch + np.arange(self.batch)
      yield self.read(np.where(number < len(self.read), number, NONE))
