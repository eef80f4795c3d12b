"""The interfaces of data: sources of documents, and prepared data without text."""

import abc
from collections.abc import Iterator, Sized
from typing import final

import numpy as np
from jaxtyping import Int

__all__ = ["SPLITS", "Prepared", "Source"]

SPLITS = ("train", "valid", "test")
"""The names of the splits of every source."""


class Source(abc.ABC):
  """Documents in three splits, and a fingerprint of them.

  A subclass is a frozen dataclass with plain fields, so that it can stand in a config, be
  overridden from a command line and be hashed. Its constructor reads nothing.
  """

  @final
  def documents(self, split: str) -> Iterator[str]:
    """Return the documents of a split, always in the same order.

    Raises:
      ValueError: `split` is not "train", "valid" or "test", or has no document.
      FileNotFoundError: the data are missing.
    """
    if split not in SPLITS:
      raise ValueError(f"`split` must be one of {', '.join(SPLITS)}; got {split!r}. Name one.")
    return self._documents(split)

  def labels(self, split: str) -> Int[np.ndarray, "n"] | None:
    """Return the numbers of the classes of `documents`; None where they have none."""
    del split
    return None

  @abc.abstractmethod
  def _documents(self, split: str) -> Iterator[str]:
    """Yield the documents of a split that is one of `SPLITS`."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Return a hash that changes when the text that `documents` yields changes."""


class Prepared(abc.ABC):
  """Data that are not text: three splits that a loader reads without a tokenizer.

  A subclass is a frozen dataclass with plain fields, like a subclass of `Source`.
  """

  @property
  @abc.abstractmethod
  def vocab(self) -> int:
    """The number of different targets, which is the `vocab` of the model's head."""

  @abc.abstractmethod
  def split(self, name: str) -> Sized:
    """Return the examples of "train", "valid" or "test"."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Return a hash that changes when the splits change."""
