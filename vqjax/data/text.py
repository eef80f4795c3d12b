"""Which documents does a file or a folder of text hold, and which of them are held out?"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from vqjax.data.docstrings import stdlib_documents, stdlib_modules
from vqjax.data.files import content_hash, data_path, read_text, split_files
from vqjax.data.source import SPLITS, Source

SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".csv", ".html", ".py", ".tokens"})
"""Endings of the files of a folder that are read as text."""


@dataclasses.dataclass(frozen=True)
class Text(Source):
  """Documents from text files; without a path, the docstrings of Python's standard library.

  A folder whose own files say their splits in their names (train.txt, ptb.valid.txt, x-test.md)
  has these splits. Any other folder is one document for each text file in it, at any depth. A
  single file is one document for each paragraph, where blank lines separate paragraphs. Whole
  documents are held out, chosen by a hash of their text: a document that is added moves no other.

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
    place = dict(zip(SPLITS, (0, 0, 0))) | {split: 0}
    for document in self._all():
      where = self._split_of(document)
      place[where] += 1
      if where == split:
        yield document
    self._check_split(split, place)

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
    for file in text_files(path):
      text = read_text(file).strip()
      if text:
        yield text

  def _split_of(self, document: str) -> str:
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    if place < self.valid_fraction:
      return "valid"
    return "test" if place < self.valid_fraction + self.test_fraction else "train"

  def _check_split(self, split: str, place: dict[str, int]) -> None:
    total = sum(place.values())
    if total == 0:
      raise ValueError(f"{self.path} holds no text; give a file or folder with some")
    if place[split] == 0:
      raise ValueError(
        f"none of the {total} documents of {self.path} falls to {split!r}; raise"
        f" data.valid_fraction and data.test_fraction (now {self.valid_fraction} and"
        f" {self.test_fraction}), give more documents, or a folder with train.txt, valid.txt and"
        " test.txt"
      )

  def fingerprint(self) -> str:
    """A hash of all documents and of how they are split."""
    named = self._named_splits()
    if named is not None:
      return content_hash(part for name in sorted(named) for part in (name, named[name]))
    settings = f"{self.valid_fraction} {self.test_fraction}"
    # The modules' bytes fix their docstrings, and need no parsing of the whole library.
    parts = stdlib_modules() if self.path is None else self._all()
    return content_hash([settings, *parts])


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
