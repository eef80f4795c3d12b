"""Plain text: files and folders, or the docstrings of Python's standard library."""

import ast
import dataclasses
import functools
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vqjax.lab.data.corpus_files import content_hash, split_files
from vqjax.lab.data.source import SPLITS, Source
from vqjax.lm.texts import check_separator, data_path, read_text, split_documents

__all__ = ["Text"]

SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".csv", ".html", ".py", ".tokens"})
"""Endings of the files of a folder that are read as text."""

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo"}
"""Folders of the standard library's path that hold other people's packages, tests or programs."""


@dataclasses.dataclass(frozen=True)
class Text(Source):
  """Documents from text files, or the docstrings of Python's standard library.

  A folder whose own files have splits in their names (train.txt, ptb.valid.txt) has these splits.
  In any other folder each text file at any depth is a document. In one file, or a folder of two,
  each paragraph between blank lines is a document. With a separator, every file holds the documents
  between it. The documents with the lowest hashes are held out: equal documents are in one split,
  and a new document hardly moves others.

  Attributes:
    path: a file or folder, here or under $VQJAX_DATA; None: the standard library's docstrings, some
      350,000 words.
    valid_fraction: part of the documents held out for validation, unless files are named for it.
    test_fraction: part of the documents held out for the test, unless files are named for it.
    separator: text between documents of a file, such as "<|endoftext|>", or "\\n", which makes a
      document of each line; None: as above.
  """

  path: str | None = None
  valid_fraction: float = 0.05
  test_fraction: float = 0.05
  separator: str | None = None

  def __post_init__(self):
    check_separator(self.separator, "data.separator")
    valid, test = self.valid_fraction, self.test_fraction
    if min(valid, test) < 0 or valid + test >= 1:
      raise ValueError(
        "`data.valid_fraction` and `data.test_fraction` must be at least 0 and below 1 together;"
        f" got {valid} and {test}. 0.05 each is usual."
      )

  def _documents(self, split: str) -> Iterator[str]:
    named = self._named_splits()
    if named is not None:
      if split not in named:
        raise ValueError(
          f"`data.path` must have a file for {split!r}; got {self.path} with {', '.join(named)}."
          f" Add {split}.txt, or name one file, so that documents are held out."
        )
      documents = list(self._parts(read_text(named[split])))
      if not documents:
        raise ValueError(f"{named[split]} must hold text; got none. Give a file with paragraphs.")
      yield from documents
      return
    hashes = np.array([_hash(document) for document in self._all()], np.uint64)
    chosen = self._splits_of(hashes) == SPLITS.index(split)
    if not chosen.any():
      fraction = (
        "lower data.valid_fraction and data.test_fraction"
        if split == "train"
        else f"a data.{split}_fraction above 0"
      )
      between = "between two separators" if self.separator else "for each paragraph"
      raise ValueError(
        f"`data.path` must have a document for {split!r}; got {hashes.size} documents in"
        f" {self.path}. Give more of them (a file has one {between}; data.separator=\\\\n makes one"
        f" of each line), {fraction}, or a folder with train.txt, valid.txt and test.txt."
      )
    yield from (document for document, mine in zip(self._all(), chosen) if mine)

  def _named_splits(self) -> dict[str, Path] | None:
    """The folder's files that are named for splits, or None where none is named train."""
    if self.path is None:
      return None
    path = data_path(self.path, kind="data.path")
    named = split_files(path) if path.is_dir() else {}
    return named if "train" in named else None

  def _all(self) -> Iterator[str]:
    """Every document, held out or not."""
    if self.path is None:
      yield from _stdlib_documents()
      return
    path = data_path(self.path, kind="data.path")
    if path.is_file():
      yield from self._parts(read_text(path))
      return
    files = _text_files(path)
    # With too few files to hold some out, a book is read paragraph by paragraph.
    is_split = self.separator is not None or len(files) < len(SPLITS)
    for file in files:
      text = read_text(file).strip()
      yield from self._parts(text) if is_split else filter(None, [text])

  def _parts(self, text: str) -> Iterator[str]:
    """The documents of the text of one file."""
    if self.separator is None:
      return _paragraphs(text)
    return split_documents(text, self.separator)

  def _splits_of(self, hashes: np.ndarray) -> np.ndarray:
    """Index into SPLITS of each document; a fraction means at least one document."""
    order = np.unique(hashes)
    valid, test = (
      max(1, round(order.size * fraction)) if fraction else 0
      for fraction in (self.valid_fraction, self.test_fraction)
    )
    rank = np.searchsorted(order, hashes)
    return np.where(rank < valid, 1, np.where(rank < valid + test, 2, 0))

  def fingerprint(self) -> str:
    """Return a hash of all documents and of how they are split."""
    named = self._named_splits()
    if named is not None:
      separator = [] if self.separator is None else [self.separator]
      files = (part for name in sorted(named) for part in (name, named[name]))
      return content_hash([*separator, *files])
    settings = f"{self.valid_fraction} {self.test_fraction}"
    if self.path is None:
      return _stdlib_fingerprint(settings)
    return content_hash([settings, *self._all()])


def _hash(document: str) -> int:
  return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little")


def _paragraphs(text: str) -> Iterator[str]:
  """Yield the parts of a text between blank lines."""
  for part in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text):
    if part.strip():
      yield part.strip()


def _text_files(folder: Path) -> list[Path]:
  """Return the visible text files of a folder at any depth, sorted by path.

  Raises:
    ValueError: there is no text file.
  """
  inside = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
  visible = [
    path
    for path in inside
    if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
  ]
  if not visible:
    raise ValueError(
      f"`data.path` must hold a text file; got {folder}. Give a file, or a folder with files that"
      f" end in one of {' '.join(sorted(SUFFIXES))}."
    )
  return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def stdlib_modules() -> list[Path]:
  """Return the standard library's modules in Python source, sorted by path.

  Raises:
    FileNotFoundError: this Python has its library in another form, such as a zip file.
  """
  root = Path(sysconfig.get_paths()["stdlib"])
  inside = (path.relative_to(root) for path in root.rglob("*.py"))
  kept = sorted((p for p in inside if not EXCLUDED & set(p.parts)), key=lambda p: p.as_posix())
  if not kept:
    raise FileNotFoundError(
      f"{root} must hold Python source; got none. Give Text(path=...) a file or a folder."
    )
  return [root / path for path in kept]


@functools.lru_cache(maxsize=1)
def _stdlib_documents() -> tuple[str, ...]:
  """One document for each module that has docstrings, joined in source order."""
  documents = ("\n\n".join(docstrings(path.read_bytes())) for path in stdlib_modules())
  return tuple(document for document in documents if document)


@functools.lru_cache(maxsize=8)
def _stdlib_fingerprint(settings: str) -> str:
  # The modules' bytes fix their docstrings, and need not be parsed.
  return content_hash([settings, *stdlib_modules()])


def docstrings(module: bytes) -> Iterator[str]:
  """Yield the dedented docstrings in a module's source, in source order.

  A module that does not parse (some are examples of errors) has none.
  """
  try:
    tree = ast.parse(module)
  except (SyntaxError, ValueError):
    return
  owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
  for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
    if text:
      # A lone surrogate is legal in Python source and has no UTF-8 form.
      yield text.encode("utf-8", "replace").decode("utf-8")
