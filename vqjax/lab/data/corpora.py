"""How are Penn Treebank and WikiText read, line by line in their order?"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from vqjax.lab.data.files import content_hash, data_path, read_lines, split_files
from vqjax.lab.data.source import SPLITS, Source


@dataclasses.dataclass(frozen=True)
class _Lines(Source):
  """A folder with a file for each split, of which every line is a document, empty ones included."""

  path: str = ""

  def _documents(self, split: str) -> Iterator[str]:
    # A line's own blanks carry nothing: words are separated by single spaces.
    yield from (line.strip() for line in read_lines(self._files()[split]))

  def _files(self) -> dict[str, Path]:
    folder = data_path(self.path, kind=type(self).__name__)
    found = split_files(folder) if folder.is_dir() else {}
    missing = [name for name in SPLITS if name not in found]
    if missing:
      raise FileNotFoundError(
        f"{folder} lacks a file for {', '.join(missing)}; a {type(self).__name__} folder holds one"
        " for each of train, valid and test, named for it"
      )
    return found

  def fingerprint(self) -> str:
    """A hash of the three files."""
    files = self._files()
    return content_hash([type(self).__name__, *(files[name] for name in SPLITS)])


@dataclasses.dataclass(frozen=True)
class PennTreebank(_Lines):
  """Penn Treebank in Mikolov's version: 929,589 / 73,760 / 82,430 tokens with <eos>, 10,000 words.

  Attributes:
    path: folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt, here or under $VQJAX_DATA.
  """

  path: str = "ptb"


@dataclasses.dataclass(frozen=True)
class WikiText(_Lines):
  """WikiText-2: 2,088,628 / 217,646 / 245,569 tokens with <eos>, 33,278 words; or WikiText-103.

  Attributes:
    path: folder with a file for each split, here or under $VQJAX_DATA.
  """

  path: str = "wikitext-2"
