"""Which documents does a file or a folder of text hold, and which of them are held out?"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vqjax.lab.data.docstrings import stdlib_documents, stdlib_modules
from vqjax.lab.data.files import content_hash, data_path, read_text, split_files
from vqjax.lab.data.source import SPLITS, Source

SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".csv", ".html", ".py", ".tokens"})
"""Endings of the files of a folder that are read as text."""


@dataclasses.dataclass(frozen=True)
class Text(Source):
  """Documents from text files; without a path, the docstrings of Python's standard library.

  A folder whose own files say their splits in their names (train.txt, ptb.valid.txt, x-test.md)
  has these splits. Any other folder is one document for each text file in it, at any depth. One
  or two files are is one document for each paragraph, where blank lines separate paragraphs. Whole
  documents are held out, those whose text has the lowest hashes: equal documents are on the same
  side, and one that is added moves hardly any other.

  Attributes:
    path: a file or folder, here or under $VQJAX_DATA; None: the standard library's docstrings.
    valid_fraction: part of the documents held out for validation, where no file says it.
    test_fraction: part of the documents held out for the test, likewise.
  """

  path: str | None = None
  valid_fraction: float = 0.05
  test_fraction: float = 0.05

  def __post_init__(self):
    fractions = self.valid_fraction, self.test_fraction
    if min(fractions) < 0 or sum(fractions) >= 1:
      raise ValueError(
        f"valid_fraction {fractions[0]} and test_fraction {fractions[1]} leave nothing to train on"
        " or are negative; 0.05 each is usual"
      )

  def _documents(self, split: str) -> Iterator[str]:
    named = self._named_splits()
    if named is not None:
      yield from self._in_named_file(named, split)
      return
    hashes = np.array([_hash(document) for document in self._all()], np.uint64)
    chosen = self._splits_of(hashes) == SPLITS.index(split)
    if not chosen.any():
      raise ValueError(self._explain_empty(split, hashes.size))
    yield from (document for document, mine in zip(self._all(), chosen) if mine)

  def _named_splits(self) -> dict[str, Path] | None:
    """The folder's files that say their splits, or None where none says train."""
    if self.path is None:
      return None
    path = data_path(self.path)
    found = split_files(path) if path.is_dir() else {}
    return found if "train" in found else None

  def _in_named_file(self, named: dict[str, Path], split: str) -> Iterator[str]:
    if split not in named:
      raise ValueError(
        f"{self.path} has files for {', '.join(named)} but none for {split!r}; add {split}.txt, or"
        " name one file and let documents be held out"
      )
    documents = list(paragraphs(read_text(named[split])))
    if not documents:
      raise ValueError(f"{named[split]} holds no text; give it some, or another path")
    yield from documents

  def _all(self) -> Iterator[str]:
    if self.path is None:
      yield from stdlib_documents()
      return
    path = data_path(self.path)
    if path.is_file():
      yield from paragraphs(read_text(path))
      return
    files = text_files(path)
    for file in files:
      text = read_text(file).strip()
      # Too few files to hold some out: a book is read paragraph by paragraph.
      yield from paragraphs(text) if len(files) < len(SPLITS) else filter(None, [text])

  def _splits_of(self, hashes: np.ndarray) -> np.ndarray:
    """Index into SPLITS of each document; a split with a fraction gets at least one document."""
    order = np.unique(hashes)
    valid = _at_least_one(order.size * self.valid_fraction)
    test = _at_least_one(order.size * self.test_fraction)
    rank = np.searchsorted(order, hashes)
    return np.where(rank < valid, 1, np.where(rank < valid + test, 2, 0))

  def _explain_empty(self, split: str, documents: int) -> str:
    if documents == 0:
      return f"{self.path} holds no text; give a file or folder with some"
    return (
      f"the {documents} documents of {self.path} leave none for {split!r}; give more documents (a"
      " file has one for each paragraph between blank lines), a data.valid_fraction and a"
      f" data.test_fraction above 0 (now {self.valid_fraction} and {self.test_fraction}), or a"
      " folder with train.txt, valid.txt and test.txt"
    )

  def fingerprint(self) -> str:
    """A hash of all documents and of how they are split."""
    named = self._named_splits()
    if named is not None:
      return content_hash(part for name in sorted(named) for part in (name, named[name]))
    settings = f"{self.valid_fraction} {self.test_fraction}"
    return _of_stdlib(settings) if self.path is None else content_hash([settings, *self._all()])


@functools.lru_cache(maxsize=8)
def _of_stdlib(settings: str) -> str:
  """The fingerprint of the docstrings: hashed once, since they are the running program's own."""
  # The modules' bytes fix their docstrings, and need no parsing of the whole library.
  return content_hash([settings, *stdlib_modules()])


def _hash(document: str) -> int:
  return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little")


def _at_least_one(share: float) -> int:
  return max(1, round(share)) if share else 0


def paragraphs(text: str) -> Iterator[str]:
  """The parts of a text between blank lines."""
  for part in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text):
    if part.strip():
      yield part.strip()


def text_files(folder: Path) -> list[Path]:
  """The text files of a folder at any depth, sorted by path; hidden ones are passed over.

  Raises:
    ValueError: there are none.
  """
  inside = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
  visible = [
    path
    for path in inside
    if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
  ]
  if not visible:
    raise ValueError(
      f"{folder} holds no text file; give a file, or a folder with files that end in one of"
      f" {' '.join(sorted(SUFFIXES))}"
    )
  return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())
