"""How are sentences and their translations read, and in which batches does a model see them?"""

import abc
import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from vqjax.lab.data.cache import TokenSplit
from vqjax.lab.data.documents import DocumentRows, Examples
from vqjax.lab.data.files import content_hash, data_path
from vqjax.lab.data.pipeline import NONE, Batch
from vqjax.lab.data.source import SPLITS, Source


class PairedSource(Source):
  """Pairs of a text and its translation: every other document, from the first on, is a source."""

  @abc.abstractmethod
  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """The (source, target) pairs of a split."""

  def _documents(self, split: str) -> Iterator[str]:
    for source, target in self.pairs(split):
      yield source
      yield target


@dataclasses.dataclass(frozen=True)
class Multi30k(PairedSource):
  """Captions of pictures in English and German: 29,000 / 1,014 / 1,000 pairs (test of 2016).

  Source: Elliott et al., Multi30K: multilingual English-German image descriptions, 2016.

  Attributes:
    path: folder with train.en.gz, train.de.gz, val.*, test_2016_flickr.*, here or under
      $VQJAX_DATA.
    source: language to translate from.
    target: language to translate to.
  """

  path: str = "multi30k/raw"
  source: str = "en"
  target: str = "de"

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """The lines of both files, one by one."""
    yield from paired_lines(*(self._file(split, side) for side in (self.source, self.target)))

  def _file(self, split: str, language: str) -> Path:
    name = {"train": "train", "valid": "val", "test": "test_2016_flickr"}[split]
    path = data_path(self.path, kind="Multi30k") / f"{name}.{language}.gz"
    if not path.is_file():
      raise FileNotFoundError(f"there is no {path}; set Multi30k.path, source or target")
    return path

  def fingerprint(self) -> str:
    """A hash of the files, and of which is which."""
    sides = self.source, self.target
    files = [self._file(split, side) for split in SPLITS for side in sides]
    return content_hash([type(self).__name__, *sides, *files])


def paired_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
  """The lines of two files, of which either may be a .gz.

  Raises:
    ValueError: one has more lines than the other.
  """
  sides = [_lines(path) for path in (source, target)]
  if len(sides[0]) != len(sides[1]):
    raise ValueError(
      f"{source} has {len(sides[0])} lines and {target} {len(sides[1])}: lines are no pairs; mend"
      " the files"
    )
  yield from zip(*sides, strict=True)


def _lines(path: Path) -> list[str]:
  opened = gzip.open if path.suffix == ".gz" else open
  with opened(path, "rt", encoding="utf-8", newline="\n") as file:
    return [" ".join(line.split()) for line in file]


@dataclasses.dataclass(frozen=True)
class Mirrored(PairedSource):
  """The first words of each document's lines, and the same words from the last to the first.

  A task for a quick try, on any text: what is to be learned is where to look.

  Attributes:
    text: where the words come from.
    words: most words of a line that count.
  """

  text: Source
  words: int = 6

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """A pair for each line with a word in it."""
    for document in self.text.documents(split):
      for line in document.splitlines():
        words = line.split()[: self.words]
        if words:
          yield " ".join(words), " ".join(reversed(words))

  def fingerprint(self) -> str:
    """The text's, and the number of words."""
    return content_hash([type(self).__name__, str(self.words), self.text.fingerprint()])


@dataclasses.dataclass(frozen=True)
class Pairs(Examples):
  """Pairs, shuffled anew each epoch: {"inputs": {"source", "target"}, "targets"}, all [B, T].

  A source has its first T tokens, the one that ends it among them. The target of the inputs is one
  token behind the targets and begins with the token that ends a document. `NONE` is behind the end.
  """

  def shapes(self, batch, context):
    row = jax.ShapeDtypeStruct((batch, context), np.int32)
    return {"inputs": {"source": row, "target": row}, "targets": row}

  def _reader(self, split, context):
    return _Reader(split, context)


class _Reader:
  def __init__(self, split: TokenSplit, context: int):
    if split.documents % 2:
      raise ValueError(f"{split.documents} documents are no pairs; choose paired data: Multi30k()")
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
