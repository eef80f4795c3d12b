"""How are texts with a class each read, once each, whichever file they came in?"""

import abc
import csv
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vqjax.lab.data.duplicates import key
from vqjax.lab.data.files import content_hash, data_path
from vqjax.lab.data.source import Source


class Labelled(NamedTuple):
  """A text and the number of its class."""

  text: str
  label: int


class LabelledSource(Source):
  """Documents with a class each."""

  @abc.abstractmethod
  def examples(self, split: str) -> Iterator[Labelled]:
    """The documents of a split with their classes, in the order of `documents`."""

  @property
  @abc.abstractmethod
  def classes(self) -> tuple[str, ...]:
    """Names of the classes."""

  def _documents(self, split: str) -> Iterator[str]:
    for example in self.examples(split):
      yield example.text

  def labels(self, split: str) -> np.ndarray:
    """The numbers of the classes of `documents`: int32."""
    return np.fromiter((example.label for example in self.examples(split)), np.int32)


class _Columns(NamedTuple):
  """A CSV file: where its label is, what it counts from, and where its texts are."""

  file: str
  label: int
  first: int
  texts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Topics(LabelledSource):
  """Classes of CSV files; a text that is in several files counts once.

  A part of the training texts, by their hashes, is the validation split, and where there is no file
  for it, another such part the test split. A test text is in no other split.
  """

  path: str = ""
  valid_fraction: float = 0.1

  _train = ()
  _test = ()
  _test_fraction = 0.0

  def __post_init__(self):
    if not 0 < self.valid_fraction < 1 - self._test_fraction:
      raise ValueError(
        f"data.valid_fraction {self.valid_fraction} is outside (0, {1 - self._test_fraction:g});"
        " 0.1 is usual"
      )

  @property
  def classes(self) -> tuple[str, ...]:
    """From classes.txt."""
    lines = (self._folder() / "classes.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line)

  def examples(self, split: str) -> Iterator[Labelled]:
    """Each different text once, in the order of the files."""
    held_out = set()
    for example in self._read(self._test):
      if split == "test":
        yield example
      held_out.add(key(example.text))
    if split == "test" and self._test:
      return
    for example in self._read(self._train):
      identity = key(example.text)
      if identity in held_out:
        continue
      held_out.add(identity)
      if self._split(identity) == split:
        yield example

  def _split(self, identity: int) -> str:
    place = identity / 2**64
    if place < self.valid_fraction:
      return "valid"
    return "test" if place >= 1 - self._test_fraction else "train"

  def _read(self, files: Iterable[_Columns]) -> Iterator[Labelled]:
    count = len(self.classes)
    for columns in files:
      path = self._folder() / columns.file
      with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines), 1):
          where = f"{path}, row {number}"
          yield csv_example(row, columns.label, columns.first, columns.texts, count, where)

  def _folder(self) -> Path:
    return data_path(self.path, kind=type(self).__name__)

  def fingerprint(self) -> str:
    """A hash of the files and of how they are split."""
    folder = self._folder()
    files = [folder / columns.file for columns in (*self._train, *self._test)]
    return content_hash([type(self).__name__, str(self.valid_fraction), *files])


def csv_example(
  row: Sequence[str], label: int, first: int, texts: Sequence[int], classes: int, where: str
) -> Labelled:
  """The text and the class of a row of a CSV file.

  Args:
    row: its columns.
    label: the column of the class.
    first: what classes are counted from.
    texts: the columns that make the text.
    classes: how many there are.
    where: file and row, for a message.

  Raises:
    ValueError: a column is missing, or the class is none.
  """
  wanted = max(label, *texts, 1) + 1
  if len(row) < wanted:
    raise ValueError(f"{where} has {len(row)} columns where {wanted} are wanted; mend the file")
  number = row[label]
  if not number.isdecimal() or not 0 <= int(number) - first < classes:
    raise ValueError(
      f"{where} has label {number!r}; classes count from {first} to {first + classes - 1}"
    )
  # The files write a line's end as a backslash, with an n or without.
  text = " ".join(row[column] for column in texts).replace("\\n", " ").replace("\\", " ")
  return Labelled(" ".join(text.split()), int(number) - first)


@dataclasses.dataclass(frozen=True)
class AGNews(_Topics):
  """AG News: the official test set, and the training rows at hand: four classes of news.

  Title and description are one text; some files have the description alone, so that one article may
  be there twice, under two different texts.

  Attributes:
    path: folder with the CSV files, here or under $VQJAX_DATA.
    valid_fraction: part of the training texts that is the validation split.
  """

  path: str = "ag_news"

  _train = (
    _Columns("subset2k_amrayach_train.csv", 0, 1, (1, 2)),
    _Columns("subset4k_keaml_train.csv", 0, 0, (1,)),
    _Columns("subset5k_keaml_unbalanced.csv", 0, 0, (1,)),
    _Columns("subset5k_lst11111_train.csv", 1, 0, (0,)),
  )
  _test = (_Columns("test.csv", 0, 1, (1, 2)),)


@dataclasses.dataclass(frozen=True)
class DBpedia(_Topics):
  """DBpedia's fourteen classes: 14,000 of the training rows, of which a part is the test split.

  Attributes:
    path: folder with the CSV file, here or under $VQJAX_DATA.
    valid_fraction: part of the texts that is the validation split; as much again is the test split.
  """

  path: str = "dbpedia14"

  _train = (_Columns("subset14k_train.csv", 0, 0, (1,)),)
  _test_fraction = 0.1
