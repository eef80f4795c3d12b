"""Sources of texts with a class each."""

import abc
import csv
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vqjax.lab.data.corpus_files import content_hash, normalised_hash
from vqjax.lab.data.source import Source
from vqjax.lm.texts import data_path


class Labelled(NamedTuple):
  """A text and the number of its class."""

  text: str
  label: int


class LabelledSource(Source):
  """Documents with a class each."""

  @abc.abstractmethod
  def examples(self, split: str) -> Iterator[Labelled]:
    """Yield the documents of a split with their classes, in the order of `documents`."""

  @property
  @abc.abstractmethod
  def classes(self) -> tuple[str, ...]:
    """The names of the classes."""

  def _documents(self, split: str) -> Iterator[str]:
    for example in self.examples(split):
      yield example.text

  def labels(self, split: str) -> np.ndarray:
    """Return the numbers of the classes of `documents`, int32."""
    return np.fromiter((example.label for example in self.examples(split)), np.int32)


@dataclasses.dataclass(frozen=True)
class Columns:
  """The columns of a CSV file, counted from 0.

  Attributes:
    file: name of the file.
    label: column of the class.
    texts: columns that make the text; None: all others.
    first: number of the first class in the file.
  """

  file: str
  label: int
  texts: Sequence[int] | None
  first: int = 0

  def read(self, path: Path, classes: int) -> Iterator[Labelled]:
    """Yield the rows of a file of these columns, of `classes` classes.

    Raises:
      ValueError: a row lacks a column, or has a class out of range.
    """
    needed = max(self.label, *(self.texts or ()), 1) + 1
    with path.open(encoding="utf-8", newline="") as lines:
      for number, row in enumerate(csv.reader(lines), 1):
        if len(row) < needed:
          raise ValueError(
            f"{path}, row {number} must have {needed} columns; got {len(row)}. Correct the file."
          )
        label, last = row[self.label], self.first + classes - 1
        if not label.isdecimal() or not self.first <= int(label) <= last:
          raise ValueError(
            f"{path}, row {number}: the label must be in {self.first}..{last}; got {label!r}."
            " Correct the row, or the number of classes."
          )
        # The files write a line's end as a backslash, with an n or without.
        others = [column for column in range(len(row)) if column != self.label]
        text = " ".join(row[column] for column in self.texts or others)
        text = text.replace("\\n", " ").replace("\\", " ")
        yield Labelled(" ".join(text.split()), int(label) - self.first)


@dataclasses.dataclass(frozen=True)
class _Topics(LabelledSource):
  """Classes of CSV files; a text that is in several files counts once.

  A part of the training texts, by their hashes, is the validation split, and where there is no file
  for the test, another such part is the test split. A test text is in no other split.
  """

  path: str = ""
  valid_fraction: float = 0.1

  _train = ()
  _test = ()
  _test_fraction = 0.0

  def __post_init__(self):
    most = 1 - self._test_fraction
    if not 0 < self.valid_fraction < most:
      raise ValueError(
        f"`data.valid_fraction` must be in (0, {most:g}); got {self.valid_fraction}. 0.05 is usual."
      )

  @property
  def classes(self) -> tuple[str, ...]:
    """The lines of classes.txt."""
    lines = (self._folder() / "classes.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line)

  def examples(self, split: str) -> Iterator[Labelled]:
    """Yield each different text once, in the order of the files."""
    seen = set()
    for example in self._read(self._test):
      if split == "test":
        yield example
      seen.add(normalised_hash(example.text))
    if split == "test" and self._test:
      return
    for example in self._read(self._train):
      key = normalised_hash(example.text)
      if key in seen:
        continue
      seen.add(key)
      share = key / 2**64
      own = "test" if share >= 1 - self._test_fraction else "train"
      if ("valid" if share < self.valid_fraction else own) == split:
        yield example

  def _read(self, files: Iterable[Columns]) -> Iterator[Labelled]:
    count = len(self.classes)
    for columns in files:
      yield from columns.read(self._folder() / columns.file, count)

  def _folder(self) -> Path:
    return data_path(self.path, kind=f"{type(self).__name__}.path")

  def fingerprint(self) -> str:
    """Return a hash of the files and of how they are split."""
    files = [self._folder() / columns.file for columns in (*self._train, *self._test)]
    return content_hash([type(self).__name__, str(self.valid_fraction), *files])


@dataclasses.dataclass(frozen=True)
class AGNews(_Topics):
  """AG News, four classes: the official test set, and published training subsets.

  Title and description are one text. Some files have only the description, so that one article may
  occur twice, under two different texts.

  Attributes:
    path: folder with the CSV files, here or under $VQJAX_DATA.
    valid_fraction: part of the training texts that is the validation split.
  """

  path: str = "ag_news"

  _train = (
    Columns("subset2k_amrayach_train.csv", label=0, texts=(1, 2), first=1),
    Columns("subset4k_keaml_train.csv", label=0, texts=(1,)),
    Columns("subset5k_keaml_unbalanced.csv", label=0, texts=(1,)),
    Columns("subset5k_lst11111_train.csv", label=1, texts=(0,)),
  )
  _test = (Columns("test.csv", label=0, texts=(1, 2), first=1),)


@dataclasses.dataclass(frozen=True)
class DBpedia(_Topics):
  """DBpedia, fourteen classes: 14,000 of the training rows, split three ways.

  Attributes:
    path: folder with the CSV file, here or under $VQJAX_DATA.
    valid_fraction: part of the texts that is the validation split; a tenth is the test split.
  """

  path: str = "dbpedia14"

  _train = (Columns("subset14k_train.csv", label=0, texts=(1,)),)
  _test_fraction = 0.1


@dataclasses.dataclass(frozen=True)
class Zhang(_Topics):
  """A dataset of Zhang et al., Character-level convolutional networks, 2015, as published.

  Attributes:
    path: folder with train.csv, test.csv and classes.txt, which has a line for each class and which
      the archives of Yelp's reviews lack; here or under $VQJAX_DATA.
    valid_fraction: part of the training texts that is the validation split.
  """

  valid_fraction: float = 0.05

  _train = (Columns("train.csv", label=0, texts=None, first=1),)
  _test = (Columns("test.csv", label=0, texts=None, first=1),)
