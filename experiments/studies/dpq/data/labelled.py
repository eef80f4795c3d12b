"""Sources of texts with a class each."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pandas as pd

from vqjax.lab.data.corpus_files import content_hash, normalised_hash
from vqjax.lab.data.source import Source
from vqjax.lm.texts import data_path

Labelled = tuple[str, int]
"""A text and the number of its class."""


class Columns(NamedTuple):
  """A CSV file and its columns, counted from 0.

  Attributes:
    file: name of the file.
    label: column of the class.
    texts: columns that make the text.
    first: number of the first class in the file.
  """

  file: str
  label: int
  texts: tuple[int, ...]
  first: int = 0

  def read(self, folder: Path, classes: int) -> Iterator[Labelled]:
    """Yield the rows of the file, whose classes must be among `classes`."""
    path = folder / self.file
    rows = pd.read_csv(
      path, header=None, dtype=str, na_filter=False, usecols=[self.label, *self.texts]
    )
    numbers = range(self.first, self.first + classes)
    if not (wrong := rows[~rows[self.label].isin(map(str, numbers))]).empty:
      raise ValueError(
        f"the classes of {path} must be in {numbers[0]}..{numbers[-1]}; got"
        f" {wrong[self.label].iloc[0]} in row {wrong.index[0] + 1}. Correct the file."
      )
    # The files write a line's end as a backslash, with an n or without.
    for *parts, label in zip(*(rows[at] for at in (*self.texts, self.label)), strict=True):
      text = " ".join(parts).replace("\\n", " ").replace("\\", " ")
      yield " ".join(text.split()), int(label) - self.first


@dataclasses.dataclass(frozen=True)
class LabelledSource(Source):
  """Documents with classes from CSV files; a text that is in several files counts once.

  A tenth of the training texts, by their hashes, is the validation split, and without a file for
  the test, another tenth is the test split. A test text is in no other split.
  """

  path: str
  train_files: ClassVar[tuple[Columns, ...]]
  test_files: ClassVar[tuple[Columns, ...]] = ()

  @property
  def classes(self) -> tuple[str, ...]:
    """The names of the classes: the lines of classes.txt."""
    lines = (self._folder() / "classes.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line)

  def examples(self, split: str) -> Iterator[Labelled]:
    """Yield each different text of a split once, in the order of the files and of `documents`."""
    seen = set()
    for text, label in self._read(self.test_files):
      if split == "test":
        yield text, label
      seen.add(normalised_hash(text))
    if split == "test" and self.test_files:
      return
    for text, label in self._read(self.train_files):
      key = normalised_hash(text)
      if key in seen:
        continue
      seen.add(key)
      share = key / 2**64
      own = "test" if share >= 0.9 and not self.test_files else "train"
      if ("valid" if share < 0.1 else own) == split:
        yield text, label

  def _documents(self, split: str) -> Iterator[str]:
    return (text for text, _ in self.examples(split))

  def labels(self, split: str) -> np.ndarray:
    """Return the numbers of the classes of `documents`, int32."""
    return np.fromiter((label for _, label in self.examples(split)), np.int32)

  def _read(self, files: Iterable[Columns]) -> Iterator[Labelled]:
    count = len(self.classes)
    for columns in files:
      yield from columns.read(self._folder(), count)

  def _folder(self) -> Path:
    return data_path(self.path, kind=f"{type(self).__name__}.path")

  def fingerprint(self) -> str:
    """Return a hash of the files and of the part of validation."""
    files = [self._folder() / columns.file for columns in (*self.train_files, *self.test_files)]
    return content_hash([type(self).__name__, "0.1", *files])


@dataclasses.dataclass(frozen=True)
class AGNews(LabelledSource):
  """AG News, four classes: the official test set, and published training subsets.

  Title and description are one text. Some files have only the description, so that one article may
  occur twice, under two different texts.

  Attributes:
    path: folder with the CSV files, here or under $VQJAX_DATA.
  """

  path: str = "ag_news"

  train_files = (
    Columns("subset2k_amrayach_train.csv", label=0, texts=(1, 2), first=1),
    Columns("subset4k_keaml_train.csv", label=0, texts=(1,)),
    Columns("subset5k_keaml_unbalanced.csv", label=0, texts=(1,)),
    Columns("subset5k_lst11111_train.csv", label=1, texts=(0,)),
  )
  test_files = (Columns("test.csv", label=0, texts=(1, 2), first=1),)


@dataclasses.dataclass(frozen=True)
class DBpedia(LabelledSource):
  """DBpedia, fourteen classes: 14,000 of the training rows, split three ways.

  Attributes:
    path: folder with the CSV file, here or under $VQJAX_DATA.
  """

  path: str = "dbpedia14"

  train_files = (Columns("subset14k_train.csv", label=0, texts=(1,)),)
