"""Which tasks can be made of plain text: hidden words, continuations, stretches of another text?"""

import dataclasses

import jax
import numpy as np

from vqjax.lab.data.cache import TokenSplit
from vqjax.lab.data.documents import DocumentRows, Examples
from vqjax.lab.data.pipeline import NONE, Batch, Windows
from vqjax.lab.models.bert import MASKED


@dataclasses.dataclass(frozen=True)
class Masked(Windows):
  """Windows of which some tokens are to be guessed: {"inputs", "targets": [B, T], "reset"}.

  Of the chosen places 80 % are hidden, 10 % have the token of a random place of the text, and 10 %
  are as they were; a target is there alone. Which, depends on the window and on the epoch; in
  `whole` on the place in the text alone. Source: Devlin et al., BERT, 2019, Section 3.1, whose
  random tokens are uniform in the vocabulary.

  Attributes:
    part: of the places that are chosen.
  """

  part: float = 0.15

  def __post_init__(self):
    if not 0 < self.part <= 1:
      raise ValueError(f"loader.part {self.part} is outside (0, 1]; 0.15 is usual")

  def text_bytes(self, split):
    return None

  def whole(self, split, *, batch, context):
    # A draw a window: a window's does not depend on the batch that it is in.
    for number, found in enumerate(super().whole(split, batch=batch, context=context)):
      windows = [
        self._masked({k: x[row : row + 1] for k, x in found.items()}, split, [0, place], ONE, 1)
        for row, place in enumerate(range(number * batch, (number + 1) * batch))
      ]
      yield {name: np.concatenate([x[name] for x in windows]) for name in windows[0]}

  def _source(self, split, batch, context, seed, rows):
    inner, own = super()._source(split, batch, context, seed, rows), 0 if seed is None else seed
    return _Mapped(inner, lambda found, at: self._masked(found, split, [own, at], rows, batch))

  def _masked(
    self, found: Batch, split: TokenSplit, seed: list[int], rows: np.ndarray, batch: int
  ) -> Batch:
    tokens = found["targets"]
    # Of the whole batch: each process has the rows that it reads of the same.
    draw, shape = np.random.default_rng(seed), (batch, tokens.shape[1])
    chosen = (draw.random(shape)[rows] < self.part) & (tokens != NONE)
    kind = draw.random(shape)[rows]
    other = split.tokens[draw.integers(0, len(split.tokens), shape)[rows]].astype(np.int32)
    seen = np.where(kind < 0.8, MASKED, np.where(kind < 0.9, other, tokens))
    return found | {
      "inputs": np.where(chosen, seen, tokens).astype(np.int32),
      "targets": np.where(chosen, tokens, NONE).astype(np.int32),
    }


ONE = np.arange(1)


class _Mapped:
  def __init__(self, inner, change):
    self.inner, self.change = inner, change

  def __len__(self) -> int:
    return len(self.inner)

  def __getitem__(self, index: int) -> Batch:
    return self.change(self.inner[index], index)


@dataclasses.dataclass(frozen=True)
class Continued(Examples):
  """Does the second text go on with the first? {"inputs": [B, 2, T], "targets": [B]}.

  The two halves of a document, or the first half of one and the second of another, each as often: 1
  and 0. A pair task of any text, as BERT's next-sentence prediction is.
  """

  def shapes(self, batch, context):
    rows = jax.ShapeDtypeStruct((batch, 2, context), np.int32)
    return {"inputs": rows, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    return _Continuations(split, context)


class _Continuations:
  """Example 2n is document n, example 2n + 1 its first half with a second that is not its own."""

  def __init__(self, split: TokenSplit, context: int):
    self.rows, self.context = DocumentRows(split, 2 * context), context
    self.documents = split.documents
    if self.documents < 2:
      raise ValueError("one document has no other; give text with at least two documents")

  def __len__(self) -> int:
    return 2 * self.documents

  def __call__(self, number: np.ndarray) -> Batch:
    document, other = number // 2, number % 2 == 1
    # Any fixed other document: always the same, and each is one for another.
    step = 1 + (document * 7919) % (self.documents - 1)
    second = np.where(other, (document + step) % self.documents, document)
    gone = number == NONE
    halves = [
      _half(self.rows(np.where(gone, NONE, which)), side, self.context)
      for side, which in enumerate((document, second))
    ]
    targets = np.where(gone, NONE, 1 - other)
    return {"inputs": np.stack(halves, axis=1), "targets": targets.astype(np.int32)}


def _half(rows: np.ndarray, side: int, context: int) -> np.ndarray:
  """The first or the second half of each row's tokens, `NONE` behind."""
  length = (rows != NONE).sum(axis=1)
  first = np.where(side == 0, 0, (length + 1) // 2)[:, None]
  last = np.where(side == 0, (length + 1) // 2, length)[:, None]
  place = first + np.arange(context)
  tokens = np.take_along_axis(rows, np.minimum(place, rows.shape[1] - 1), axis=1)
  return np.where(place < last, tokens, NONE).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Intruded(Examples):
  """Which stretch of a text is of another? {"inputs": [B, T], "targets": [B, 2]}: its two ends.

  A fifth of a document's tokens, at least two, at a place that depends on the document, has given
  way to as many of another document. A span task of any text.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": jax.ShapeDtypeStruct((batch, 2), np.int32)}

  def _reader(self, split, context):
    return _Intrusions(split, context)


class _Intrusions:
  def __init__(self, split: TokenSplit, context: int):
    self.rows, self.documents = DocumentRows(split, context), split.documents
    if self.documents < 2:
      raise ValueError("one document has no other; give text with at least two documents")

  def __len__(self) -> int:
    return self.documents

  def __call__(self, number: np.ndarray) -> Batch:
    tokens = self.rows(number)
    length = (tokens != NONE).sum(axis=1)
    size = np.clip(length // 5, 2, None)
    # Too short a document has no stretch, and no target.
    fits = (length > size) & (number != NONE)
    first = (number * 7919) % np.maximum(length - size + 1, 1)
    other = self.rows(np.where(number == NONE, NONE, self._other(number)))
    place = np.arange(tokens.shape[1])
    inside = (place >= first[:, None]) & (place < (first + size)[:, None]) & fits[:, None]
    # A token of padding stands for none: the stretch keeps its own there.
    changed = inside & (other != NONE)
    targets = np.stack([first, first + size - 1], axis=1)
    return {
      "inputs": np.where(changed, other, tokens).astype(np.int32),
      "targets": np.where(fits[:, None], targets, NONE).astype(np.int32),
    }

  def _other(self, number):
    return (number + 1 + (number * 31) % (self.documents - 1)) % self.documents
