"""Sentences and their translations."""

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.source import SPLITS, Source
from vqjax.lm.texts import data_path


@dataclasses.dataclass(frozen=True)
class Multi30k(Source):
  """Captions in English and German: 29,000, 1,014 and 1,000 pairs (test of 2016).

  Documents alternate between the two.

  Source: Elliott et al., Multi30K: multilingual English-German image descriptions, 2016.

  Attributes:
    path: folder with train.en.gz, train.de.gz, val.*, test_2016_flickr.*, here or under
      $VQJAX_DATA.
  """

  path: str = "multi30k/raw"

  def _documents(self, split: str) -> Iterator[str]:
    for pair in self.pairs(split):
      yield from pair

  def pairs(self, split: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of both files in pairs, with single spaces.

    Raises:
      ValueError: one file has more lines than the other.
    """
    sides = []
    for path in self._files(split):
      with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        sides.append([" ".join(line.split()) for line in file])
    if len(sides[0]) != len(sides[1]):
      raise ValueError(
        f"the files of {split!r} in {self.path} must have as many lines; got {len(sides[0])} and"
        f" {len(sides[1])}. Give files whose lines correspond."
      )
    yield from zip(*sides, strict=True)

  def _files(self, split: str) -> list[Path]:
    name = {"train": "train", "valid": "val", "test": "test_2016_flickr"}[split]
    folder = data_path(self.path, kind="Multi30k.path")
    return [folder / f"{name}.{language}.gz" for language in ("en", "de")]

  def fingerprint(self) -> str:
    """Return a hash of the files."""
    files = [file for split in SPLITS for file in self._files(split)]
    return content_hash([type(self).__name__, "en", "de", *files])
