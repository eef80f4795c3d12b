"""Sources of sentences and their translations."""

import abc
import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.source import SPLITS, Source
from vqjax.lm.texts import data_path


class PairedSource(Source):
  """Pairs of a text and its translation; documents alternate between the two."""

  @abc.abstractmethod
  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """Yield the (source, target) pairs of a split."""

  def _documents(self, split: str) -> Iterator[str]:
    for source, target in self.pairs(split):
      yield source
      yield target


@dataclasses.dataclass(frozen=True)
class Multi30k(PairedSource):
  """Captions in English and German: 29,000, 1,014 and 1,000 pairs (test of 2016).

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
    """Yield the lines of both files in pairs."""
    yield from paired_lines(self._file(split, self.source), self._file(split, self.target))

  def _file(self, split: str, language: str) -> Path:
    name = {"train": "train", "valid": "val", "test": "test_2016_flickr"}[split]
    path = data_path(self.path, kind="Multi30k.path") / f"{name}.{language}.gz"
    if not path.is_file():
      raise FileNotFoundError(
        f"`Multi30k.path`, `source` and `target` must name existing files; got {path}."
        " Give the folder of the pairs, and languages that it has."
      )
    return path

  def fingerprint(self) -> str:
    """Return a hash of the files, and of which is source and which is target."""
    sides = self.source, self.target
    files = [self._file(split, side) for split in SPLITS for side in sides]
    return content_hash([type(self).__name__, *sides, *files])


@dataclasses.dataclass(frozen=True)
class PairedText(PairedSource):
  """The lines of two files a split: any parallel text.

  Attributes:
    train: files of the source and of the target sentences, here or under $VQJAX_DATA; a file may be
      a .gz.
    valid: the same for validation.
    test: the same for the test.
  """

  train: tuple[str, str]
  valid: tuple[str, str]
  test: tuple[str, str]

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of both files in pairs."""
    yield from paired_lines(*self._files(split))

  def _files(self, split: str) -> list[Path]:
    names = getattr(self, split)
    if len(names) != 2:
      raise ValueError(
        f"`PairedText.{split}` must be two files, source and target; got {names}. Give both."
      )
    return [data_path(name, kind=f"PairedText.{split}") for name in names]

  def fingerprint(self) -> str:
    """Return a hash of the files and of their order."""
    return content_hash([type(self).__name__, *(f for split in SPLITS for f in self._files(split))])


def paired_lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
  """Yield the lines of two files in pairs, with single spaces; a file may be a .gz.

  Raises:
    ValueError: one file has more lines than the other.
  """
  sides = []
  for path in (source, target):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="\n") as file:
      sides.append([" ".join(line.split()) for line in file])
  if len(sides[0]) != len(sides[1]):
    raise ValueError(
      f"`source` and `target` must have as many lines; got {len(sides[0])} in {source} and"
      f" {len(sides[1])} in {target}. Give files whose lines correspond."
    )
  yield from zip(*sides, strict=True)


@dataclasses.dataclass(frozen=True)
class Mirrored(PairedSource):
  """The first words of each line of a text, and these words in reverse order.

  A task for a quick trial on any text: the model must learn where to attend.

  Attributes:
    text: where the words come from.
    words: most words of a line.
  """

  text: Source
  words: int = 6

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each line with a word in it."""
    for document in self.text.documents(split):
      for line in document.splitlines():
        words = line.split()[: self.words]
        if words:
          yield " ".join(words), " ".join(reversed(words))

  def fingerprint(self) -> str:
    """Return a hash of the text's fingerprint and the number of words."""
    return content_hash([type(self).__name__, str(self.words), self.text.fingerprint()])
