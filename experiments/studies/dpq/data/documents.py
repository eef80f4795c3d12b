"""Loaders of whole documents: classes, translations, tasks made of plain text."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from vqjax.lab.data.pipeline import NONE, Batch, Examples
from vqjax.lab.data.token_cache import TokenSplit


@dataclasses.dataclass(frozen=True)
class Reader:
  """So many examples, which a function makes of their numbers; `NONE` is an empty one."""

  examples: int
  read: Callable[[np.ndarray], Batch]

  def __len__(self) -> int:
    return self.examples

  def __call__(self, number: np.ndarray) -> Batch:
    return jax.tree.map(np.int32, self.read(number))


def document_rows(
  split: TokenSplit, context: int, ended: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
  """Numbers of documents -> [n, context], cut off or filled up with `NONE`.

  Args:
    split: the tokens.
    context: length of a row.
    ended: keep the token that ends a document, where there is room for it.

  Raises:
    ValueError: a text has the ending token in it.
  """
  ends = np.flatnonzero(split.tokens == split.eos)
  starts = np.concatenate([[0], ends[:-1] + 1])
  if len(ends) != split.documents:
    raise ValueError(
      f"`split` must have {split.documents} ending tokens, one for each document; got {len(ends)}."
      " A text spells the ending token: choose another tokenizer."
    )

  def rows(number):
    first, last = starts[number][:, None], ends[number][:, None]
    position = first + np.arange(context)
    inside = (position < last + ended) & (number != NONE)[:, None]
    return np.where(inside, split.tokens[np.minimum(position, last)].astype(np.int32), NONE)

  return rows


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.int32)


@dataclasses.dataclass(frozen=True)
class Documents(Examples):
  """Documents with a class each: {"inputs": [B, T], "targets": [B]}.

  The inputs are a document's first T tokens, without the one that ends it, and `NONE` after them.
  """

  def shapes(self, batch, context):
    return {"inputs": _ints(batch, context), "targets": _ints(batch)}

  def _reader(self, split, context):
    labels = () if split.labels is None else split.labels
    if len(labels) != split.documents:
      raise ValueError(
        f"`split` must have a class for each of {split.documents} documents; got {len(labels)}."
        " Choose labelled data, such as AGNews()."
      )
    rows = document_rows(split, context)
    return Reader(
      split.documents,
      lambda number: {
        "inputs": rows(number),
        "targets": np.where(number == NONE, NONE, labels[number]),
      },
    )


@dataclasses.dataclass(frozen=True)
class Pairs(Examples):
  """Translations: {"inputs": {"source", "target"}, "targets"}, all [B, T].

  A source is its first T tokens, with the one that ends it. The target of the inputs is one token
  behind the targets and begins with the token that ends a document. `NONE` follows the end.
  """

  def shapes(self, batch, context):
    row = _ints(batch, context)
    return {"inputs": {"source": row, "target": row}, "targets": row}

  def _reader(self, split, context):
    if split.documents % 2:
      raise ValueError(
        f"`split` must have an even number of documents, in pairs; got {split.documents}. Choose"
        " paired data, such as Multi30k()."
      )
    rows = document_rows(split, context, ended=True)

    def read(number):
      source, targets = (rows(np.where(number == NONE, NONE, 2 * number + n)) for n in (0, 1))
      before = np.insert(targets[:, :-1], 0, split.eos, axis=1)
      inputs = {"source": source, "target": np.where(targets == NONE, NONE, before)}
      return {"inputs": inputs, "targets": targets}

    return Reader(split.documents // 2, read)


@dataclasses.dataclass(frozen=True)
class Continued(Examples):
  """A pair task of any text: {"inputs": [B, 2, T], "targets": [B]}.

  The inputs are the two halves of a document (target 1), or the first half of one and the second
  half of another (target 0), equally often.
  """

  def shapes(self, batch, context):
    return {"inputs": _ints(batch, 2, context), "targets": _ints(batch)}

  def _reader(self, split, context):
    rows, documents = document_rows(split, 2 * context), split.documents
    if documents < 2:
      raise ValueError(f"`split` must have at least 2 documents; got {documents}. Give more.")

    def half(number, side):
      """The first or the second half of documents."""
      whole = rows(number)
      length = (whole != NONE).sum(axis=1)
      middle = (length + 1) // 2
      first, last = (middle, length) if side else (0 * middle, middle)
      position = first[:, None] + np.arange(context)
      tokens = np.take_along_axis(whole, np.minimum(position, 2 * context - 1), axis=1)
      return np.where(position < last[:, None], tokens, NONE)

    def read(number):
      """Example 2n is document n; in example 2n + 1 the second half is another's."""
      document, is_other = number // 2, number % 2 == 1
      # Any fixed other document: always the same, and each is one for another.
      step = 1 + (document * 7919) % (documents - 1)
      second = np.where(is_other, (document + step) % documents, document)
      halves = [
        half(np.where(number == NONE, NONE, own), n) for n, own in enumerate((document, second))
      ]
      targets = np.where(number == NONE, NONE, 1 - is_other)
      return {"inputs": np.stack(halves, axis=1), "targets": targets}

    return Reader(2 * documents, read)
