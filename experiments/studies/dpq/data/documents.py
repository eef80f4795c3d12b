"""Loaders of whole documents: classes, translations, tasks made of plain text."""

import dataclasses

import jax
import numpy as np

from vqjax.lab.data.pipeline import NONE, Batch, Examples
from vqjax.lab.data.token_cache import TokenSplit


class DocumentRows:
  """Documents by number, cut off or filled up to `context` tokens."""

  def __init__(self, split: TokenSplit, context: int, ended: bool = False):
    """Locate the documents of a split.

    Args:
      split: the tokens.
      context: length of a row.
      ended: keep the token that ends a document, where there is room for it.

    Raises:
      ValueError: a text has the ending token in it.
    """
    self.split, self.context, self.ended = split, context, ended
    self.ends = np.flatnonzero(split.tokens == split.eos)
    self.starts = np.concatenate([[0], self.ends[:-1] + 1])
    if len(self.ends) != split.documents:
      raise ValueError(
        f"`split` must have {split.documents} ending tokens, one for each document; got"
        f" {len(self.ends)}. A text spells the ending token: choose another tokenizer."
      )

  def __call__(self, number: np.ndarray) -> np.ndarray:
    """Return int32 [n, context], `NONE` after a document's end."""
    first, last = self.starts[number][:, None], self.ends[number][:, None]
    position = first + np.arange(self.context)
    inside = (position < last + self.ended) & (number != NONE)[:, None]
    tokens = self.split.tokens[np.minimum(position, last)].astype(np.int32)
    return np.where(inside, tokens, NONE).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Documents(Examples):
  """Documents with a class each: {"inputs": [B, T], "targets": [B]}.

  The inputs are a document's first T tokens, without the one that ends it, and `NONE` after them.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    return _LabelledDocuments(split, context)


class _LabelledDocuments:
  def __init__(self, split: TokenSplit, context: int):
    if split.labels is None or len(split.labels) != split.documents:
      labels = "none" if split.labels is None else len(split.labels)
      raise ValueError(
        f"`split` must have a class for each of {split.documents} documents; got {labels}. Choose"
        " labelled data, such as AGNews()."
      )
    self.rows, self.labels = DocumentRows(split, context), split.labels

  def __len__(self) -> int:
    return len(self.labels)

  def __call__(self, number: np.ndarray) -> Batch:
    classes = np.where(number == NONE, NONE, self.labels[number])
    return {"inputs": self.rows(number), "targets": classes.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Pairs(Examples):
  """Translations: {"inputs": {"source", "target"}, "targets"}, all [B, T].

  A source is its first T tokens, with the one that ends it. The target of the inputs is one token
  behind the targets and begins with the token that ends a document. `NONE` follows the end.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": {"source": row, "target": row}, "targets": row}

  def _reader(self, split, context):
    return _PairedDocuments(split, context)


class _PairedDocuments:
  def __init__(self, split: TokenSplit, context: int):
    if split.documents % 2:
      raise ValueError(
        f"`split` must have an even number of documents, in pairs; got {split.documents}. Choose"
        " paired data, such as Multi30k()."
      )
    self.rows, self.eos = DocumentRows(split, context, ended=True), split.eos
    self.pairs = split.documents // 2

  def __len__(self) -> int:
    return self.pairs

  def __call__(self, number: np.ndarray) -> Batch:
    source, targets = (
      self.rows(np.where(number == NONE, NONE, 2 * number + side)) for side in (0, 1)
    )
    target = np.full_like(targets, NONE)
    target[:, 1:] = np.where(targets[:, 1:] == NONE, NONE, targets[:, :-1])
    target[:, 0] = np.where(number == NONE, NONE, self.eos)
    return {"inputs": {"source": source, "target": target}, "targets": targets}


@dataclasses.dataclass(frozen=True)
class Continued(Examples):
  """A pair task of any text: {"inputs": [B, 2, T], "targets": [B]}.

  The inputs are the two halves of a document (target 1), or the first half of one and the second
  half of another (target 0), equally often.
  """

  def shapes(self, batch, context):
    rows = jax.ShapeDtypeStruct((batch, 2, context), np.int32)
    return {"inputs": rows, "targets": jax.ShapeDtypeStruct((batch,), np.int32)}

  def _reader(self, split, context):
    return _Continuations(split, context)


class _Continuations:
  """Example 2n is document n; in example 2n + 1 the second half is another's."""

  def __init__(self, split: TokenSplit, context: int):
    self.rows, self.context = DocumentRows(split, 2 * context), context
    self.documents = _at_least_two(split)

  def __len__(self) -> int:
    return 2 * self.documents

  def __call__(self, number: np.ndarray) -> Batch:
    document, other = number // 2, number % 2 == 1
    # Any fixed other document: always the same, and each is one for another.
    step = 1 + (document * 7919) % (self.documents - 1)
    second = np.where(other, (document + step) % self.documents, document)
    halves = []
    for side, which in enumerate((document, second)):
      rows = self.rows(np.where(number == NONE, NONE, which))
      length = (rows != NONE).sum(axis=1)
      middle = (length + 1) // 2
      first, last = (middle, length) if side else (np.zeros_like(middle), middle)
      position = first[:, None] + np.arange(self.context)
      tokens = np.take_along_axis(rows, np.minimum(position, rows.shape[1] - 1), axis=1)
      halves.append(np.where(position < last[:, None], tokens, NONE).astype(np.int32))
    targets = np.where(number == NONE, NONE, 1 - other)
    return {"inputs": np.stack(halves, axis=1), "targets": targets.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class Intruded(Examples):
  """A span task of any text: {"inputs": [B, T], "targets": [B, 2]}.

  A fifth of a document's tokens, at least two, at a position that depends on the document, is
  replaced by as many tokens of another document. The targets are its first and last position.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": row, "targets": jax.ShapeDtypeStruct((batch, 2), np.int32)}

  def _reader(self, split, context):
    return _Intrusions(split, context)


class _Intrusions:
  def __init__(self, split: TokenSplit, context: int):
    self.rows, self.documents = DocumentRows(split, context), _at_least_two(split)

  def __len__(self) -> int:
    return self.documents

  def __call__(self, number: np.ndarray) -> Batch:
    tokens = self.rows(number)
    length = (tokens != NONE).sum(axis=1)
    size = np.clip(length // 5, 2, None)
    # A document that is too short has no stretch, and no target.
    fits = (length > size) & (number != NONE)
    first = (number * 7919) % np.maximum(length - size + 1, 1)
    other_number = (number + 1 + (number * 31) % (self.documents - 1)) % self.documents
    other = self.rows(np.where(number == NONE, NONE, other_number))
    position = np.arange(tokens.shape[1])
    inside = (position >= first[:, None]) & (position < (first + size)[:, None]) & fits[:, None]
    # Where the other document has ended, the stretch keeps its own tokens.
    changed = inside & (other != NONE)
    targets = np.stack([first, first + size - 1], axis=1)
    return {
      "inputs": np.where(changed, other, tokens).astype(np.int32),
      "targets": np.where(fits[:, None], targets, NONE).astype(np.int32),
    }


def _at_least_two(split: TokenSplit) -> int:
  """The number of documents of a split, from which another one is drawn for each."""
  if split.documents < 2:
    raise ValueError(
      f"`split` must have at least two documents; got {split.documents}. Give more documents."
    )
  return split.documents
