"""Corpora in their published formats: Penn Treebank, WikiText, C4, TinyStories."""

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from vqjax.lab.data.corpus_files import (
  SPLIT_NAMES,
  content_hash,
  normalised_hash,
  outline,
  split_files,
)
from vqjax.lab.data.source import SPLITS, Source
from vqjax.lm.texts import data_path, read_lines

__all__ = ["JSONLines", "PennTreebank", "Stories", "WikiText"]


@dataclasses.dataclass(frozen=True)
class _Lines(Source):
  """A folder with a file for each split; every line is a document."""

  path: str = ""

  def _documents(self, split: str) -> Iterator[str]:
    # Blanks around a line carry nothing: words are separated by single spaces.
    yield from (line.strip() for line in read_lines(self._files()[split]))

  def _files(self) -> dict[str, Path]:
    folder = data_path(self.path, kind=f"{type(self).__name__}.path")
    files = split_files(folder) if folder.is_dir() else {}
    missing = [name for name in SPLITS if name not in files]
    if missing:
      raise FileNotFoundError(
        f"`{type(self).__name__}.path` must hold files named for train, valid and test; got"
        f" {folder} without {', '.join(missing)}. Give the folder of the three files."
      )
    return files

  def fingerprint(self) -> str:
    """Return a hash of the three files."""
    files = self._files()
    return content_hash([type(self).__name__, *(files[name] for name in SPLITS)])


@dataclasses.dataclass(frozen=True)
class PennTreebank(_Lines):
  """Penn Treebank in Mikolov's version, 10,000 words.

  Training, validation and test have 929,589, 73,760 and 82,430 tokens with <eos>.

  Attributes:
    path: folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt, here or under $VQJAX_DATA.
  """

  path: str = "ptb"


@dataclasses.dataclass(frozen=True)
class WikiText(_Lines):
  """WikiText-2 with 33,278 words, or WikiText-103.

  WikiText-2 has 2,088,628, 217,646 and 245,569 tokens with <eos>.

  Attributes:
    path: folder with a file for each split, here or under $VQJAX_DATA.
  """

  path: str = "wikitext-2"


JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""Endings of the files that `JSONLines` reads."""


@dataclasses.dataclass(frozen=True)
class JSONLines(Source):
  """A folder of files with a JSON object in each line, named for their splits.

  AllenAI publishes C4 like this: c4-train.00000-of-01024.json.gz and so on. Its documents are in
  random order, so any of its files will do; some 70 hold the paper's 10 billion tokens. In a
  corpus without files for the test, such as C4, every second document of validation is the test.

  Attributes:
    path: the folder, here or under $VQJAX_DATA.
    text: the member of an object that holds the document.
  """

  path: str = "c4/en"
  text: str = "text"

  def _documents(self, split: str) -> Iterator[str]:
    files = self._files()
    halved = not files["test"] and split != "train"
    number = 0
    for file in files["valid" if halved else split]:
      for line_number, line in _json_lines(file):
        if not halved or number % 2 == (split == "test"):
          yield self._document(line, f"{file}, line {line_number}")
        number += 1

  def _document(self, line: bytes, where: str) -> str:
    try:
      value = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{where} must be JSON; got {error}. Fetch the file again.") from None
    if not isinstance(value, dict) or not isinstance(value.get(self.text), str):
      members = value.items() if isinstance(value, dict) else ()
      kinds = ", ".join(f"{name} ({type(member).__name__})" for name, member in members)
      raise ValueError(
        f"{where} must be an object with the text {self.text!r}; got {kinds or 'no members'}. Set"
        " data.text to the member's name."
      )
    try:
      value[self.text].encode()
    except UnicodeEncodeError:  # JSON can spell what no text holds
      raise ValueError(
        f"{where} must be Unicode; got half a surrogate pair. Remove it from the text."
      ) from None
    return value[self.text]

  def _files(self) -> dict[str, list[Path]]:
    """The files of each split, by name; only the test may have none."""
    folder = data_path(self.path, kind="data.path")
    files: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
      named = {SPLIT_NAMES[w] for w in re.split(r"[^a-z]+", path.name.lower()) if w in SPLIT_NAMES}
      if path.name.endswith(JSON_SUFFIXES) and len(named) == 1:
        files[named.pop()].append(path)
    if not files["train"] or not files["valid"]:
      raise FileNotFoundError(
        "`data.path` must hold files for train and validation, with these words in their names and"
        f" one of the endings {', '.join(JSON_SUFFIXES)}; got {folder}."
        " Give their folder."
      )
    return files

  def fingerprint(self) -> str:
    """Return a hash of the files (outlines of large ones), splits and the member."""
    parts = (part for split, fs in self._files().items() for part in (split, *map(outline, fs)))
    return content_hash([type(self).__name__, self.text, *parts])


def _json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
  """The lines that are not blank, with their numbers from 1 on."""
  with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
    try:
      yield from ((number, line) for number, line in enumerate(content, 1) if line.strip())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
      raise ValueError(f"{file} must be whole; got {error}. Fetch it again.") from None


END = "<|endoftext|>"
"""The separator of the stories of a file."""

LONG = 60
"""Characters from which on two equal paragraphs are copies, not a phrase that stories share."""


@dataclasses.dataclass(frozen=True)
class Stories(Source):
  """Stories from files that separate them by `END`.

  A file without `END` is one document. Of the held-out file, every second story is for validation
  and the others are for the test. A long paragraph that is also in a held-out story is left out of
  training.

  Attributes:
    train: files to train on, here or under $VQJAX_DATA.
    held_out: the file that is held out.
    most: stories of either held-out split that are read; None: all.
  """

  train: tuple[str, ...] = (
    "tinystories/gpt2_tokens_val.decoded.txt",
    "tinystories/stories_ajaykumar.txt",
    "tinystories/stories_val_yuninxia.txt",
  )
  held_out: str = "tinystories/gpt2_tokens_test.decoded.txt"
  most: int | None = None

  def _documents(self, split: str) -> Iterator[str]:
    held_out = list(_stories_of(data_path(self.held_out, kind="Stories.held_out")))
    if split != "train":
      chosen = held_out[split == "test" :: 2][: self.most]
      if not chosen:
        raise ValueError(
          f"`held_out` must have a story for {split!r}; got {self.held_out}. Give a file with at"
          " least two stories, and a `most` above 0."
        )
      yield from chosen
      return
    known = {normalised_hash(part) for story in held_out for part in _long_paragraphs(story)}
    for name in self.train:
      for story in _stories_of(data_path(name, kind="Stories.train")):
        copied = [part for part in _long_paragraphs(story) if normalised_hash(part) in known]
        for part in copied:
          story = story.replace(part, "")
        if story.strip():
          yield re.sub(r"\n{3,}", "\n\n", story).strip() if copied else story

  def fingerprint(self) -> str:
    """Return a hash of the files and of how many stories are held out."""
    files = [data_path(name, kind="Stories") for name in (*self.train, self.held_out)]
    return content_hash([type(self).__name__, str(self.most), *files])


def _long_paragraphs(story: str) -> list[str]:
  return [part for part in story.split("\n") if len(part.strip()) >= LONG]


def _stories_of(path: Path) -> Iterator[str]:
  """Yield the stories of a file, read line by line: TinyStories has two gigabytes."""
  lines: list[str] = []
  for line in read_lines(path):
    first, *others = line.split(END)
    lines.append(first)
    for part in others:
      yield from filter(None, ["\n".join(lines).strip()])
      lines = [part]
  yield from filter(None, ["\n".join(lines).strip()])
