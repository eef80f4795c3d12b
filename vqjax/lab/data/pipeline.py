"""Loaders of tokens: windows, streams, masked windows, evaluation batches."""

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
from vqjax.lab.models.bert import MASKED

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
    if context < 1:
      raise ValueError(f"`model.context` must be at least 1; got {context}. Raise it.")
    rows = np.arange(batch) if rows is None else rows
    source = self._source(split, batch, context, seed, rows)
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
  def _source(
    self, split: TokenSplit, batch: int, context: int, seed: int, rows: np.ndarray
  ) -> "grain.sources.RandomAccessDataSource":
    """Return random access to the rows of each batch that this process reads."""


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

  Attributes:
    shuffle: False: the windows come in the order of the text.
  """

  shuffle: bool = True

  def _source(self, split, batch, context, seed, rows):
    return _WindowBatches(split, batch, context, seed if self.shuffle else None, rows)


class _WindowBatches:
  def __init__(self, split, batch, context, seed, rows):
    _check_tokens(split, batch, context)
    self.split, self.context = split, context
    self.order = Order(math.ceil(len(split.tokens) / context), batch, seed, rows)

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Batch:
    start = self.order[index] * self.context
    start = np.minimum(start, len(self.split.tokens) - self.context)
    return _rows(self.split, start, self.context, reset=True)


class Order:
  """Batch i of a run: numbers i·B to (i + 1)·B of the epochs' permutations.

  Attributes:
    items: number of items in an epoch.
    batch: rows of a batch, B.
    seed: seed of the permutations; None: each epoch has the items in their order.
    rows: the rows of a batch that this process reads.
  """

  def __init__(self, items: int, batch: int, seed: int | None, rows: np.ndarray):
    self.items, self.batch, self.seed, self.rows = items, batch, seed, rows
    # A batch reads from at most two epochs, and permutations of large splits are slow.
    self._order = functools.lru_cache(maxsize=2)(self._permutation)

  def __getitem__(self, index: int) -> np.ndarray:
    number = np.arange(index * self.batch, (index + 1) * self.batch)[self.rows]
    epoch, position = np.divmod(number, self.items)
    return np.array([self._order(int(e))[p] for e, p in zip(epoch, position)])

  def _permutation(self, epoch: int) -> np.ndarray:
    if self.seed is None:
      return np.arange(self.items)
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

  def _source(self, split, batch, context, seed, rows):
    del seed
    return _StreamBatches(split, batch, context, rows)


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
  position = starts[:, None] + np.arange(context)
  targets = split.tokens[position].astype(np.int32)
  inputs = np.empty_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  before = split.tokens[np.maximum(starts - 1, 0)].astype(np.int32)
  inputs[:, 0] = np.where(starts == 0, split.eos, before)
  return {"inputs": inputs, "targets": targets, "reset": np.full(len(starts), reset)}


@dataclasses.dataclass(frozen=True)
class Masked(Windows):
  """Windows with hidden tokens to predict: {"inputs", "targets": [B, T], "reset"}.

  Of the chosen positions 80 % are hidden, 10 % have the token of a random position of the text,
  and 10 % are unchanged; only chosen positions have a target. The choice depends on the window and
  the epoch; in `whole` only on the position in the text.

  Source: Devlin et al., BERT, 2019, Section 3.1, whose random tokens are uniform in the vocabulary.

  Attributes:
    part: fraction of the positions that are chosen.
  """

  part: float = 0.15

  def __post_init__(self):
    if not 0 < self.part <= 1:
      raise ValueError(f"`loader.part` must be in (0, 1]; got {self.part}. 1 is the whole text.")

  def text_bytes(self, split):
    return None

  def whole(self, split, *, batch, context):
    # A generator for each window, so that its choice does not depend on the batch size.
    one = np.arange(1)
    for number, plain in enumerate(super().whole(split, batch=batch, context=context)):
      windows = []
      for row in range(batch):
        window = {name: x[row : row + 1] for name, x in plain.items()}
        seed = [0, number * batch + row]
        windows.append(self.mask(window, split, seed=seed, rows=one, batch=1))
      yield {name: np.concatenate([x[name] for x in windows]) for name in windows[0]}

  def _source(self, split, batch, context, seed, rows):
    plain = super()._source(split, batch, context, seed, rows)
    return _MaskedBatches(self, plain, split, 0 if seed is None else seed, rows, batch)

  def mask(
    self, plain: Batch, split: TokenSplit, *, seed: list[int], rows: np.ndarray, batch: int
  ) -> Batch:
    """Return the batch with hidden tokens; `plain` has its rows `rows`."""
    tokens = plain["targets"]
    # Draws are for the whole batch, so that each process has its rows of the same ones.
    draw, shape = np.random.default_rng(seed), (batch, tokens.shape[1])
    chosen = (draw.random(shape)[rows] < self.part) & (tokens != NONE)
    kind = draw.random(shape)[rows]
    other = split.tokens[draw.integers(0, len(split.tokens), shape)[rows]].astype(np.int32)
    seen = np.where(kind < 0.8, MASKED, np.where(kind < 0.9, other, tokens))
    return plain | {
      "inputs": np.where(chosen, seen, tokens).astype(np.int32),
      "targets": np.where(chosen, tokens, NONE).astype(np.int32),
    }


class _MaskedBatches:
  def __init__(self, loader, plain, split, seed, rows, batch):
    self.loader, self.plain, self.split = loader, plain, split
    self.seed, self.rows, self.batch = seed, rows, batch

  def __len__(self) -> int:
    return len(self.plain)

  def __getitem__(self, index: int) -> Batch:
    seed = [self.seed, index]
    plain = self.plain[index]
    return self.loader.mask(plain, self.split, seed=seed, rows=self.rows, batch=self.batch)


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
