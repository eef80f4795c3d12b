"""What must a source of documents answer, and what data that are no text?"""

import abc
from collections.abc import Iterator, Sized
from typing import final

SPLITS = ("train", "valid", "test")
"""The names of the splits of every source."""


class Source(abc.ABC):
  """Documents in three splits, and a fingerprint of them.

  A subclass is a frozen dataclass with plain fields, so that it can stand in a config, be
  overridden from a command line and be hashed. Constructing one reads nothing.
  """

  @final
  def documents(self, split: str) -> Iterator[str]:
    """The documents of a split, always in the same order.

    Raises:
      ValueError: `split` is not "train", "valid" or "test", or has no document.
      FileNotFoundError: the data are not there.
    """
    if split not in SPLITS:
      raise ValueError(f"there is no split {split!r}; the splits are {', '.join(SPLITS)}")
    return self._documents(split)

  @abc.abstractmethod
  def _documents(self, split: str) -> Iterator[str]:
    """The documents of a split that is one of `SPLITS`."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """A hash that changes when the text that `documents` yields changes."""


class Prepared(abc.ABC):
  """Data that are no text: three splits that a loader reads as they are, without a tokenizer.

  A subclass is a frozen dataclass with plain fields, as that of a `Source` is.
  """

  @property
  @abc.abstractmethod
  def vocab(self) -> int:
    """How many different targets there are: the `vocab` of the model's head."""

  @abc.abstractmethod
  def split(self, name: str) -> Sized:
    """The examples of "train", "valid" or "test"."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """A hash that changes when the splits change."""
