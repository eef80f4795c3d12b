"""How are documents read from lines of JSON, compressed or not, as C4 is published?"""

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vqjax.lab.data.files import SPLIT_NAMES, content_hash, data_path, outline
from vqjax.lab.data.source import Source

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""Ends of the names of files that are read."""


@dataclasses.dataclass(frozen=True)
class JSONLines(Source):
  """A folder of files with a JSON object a line; their names say their splits.

  So is C4 published by AllenAI: c4-train.00000-of-01024.json.gz and so on. Any of its files will
  do, since its documents are in random order; some 70 hold the paper's 10 billion tokens. A corpus
  without files for the test, such as C4, gives every second document of validation to it.

  Attributes:
    path: the folder, here or under $VQJAX_DATA.
    text: the member of an object that holds the document.
  """

  path: str = "c4/en"
  text: str = "text"

  def _documents(self, split: str) -> Iterator[str]:
    files = self._files()
    if files[split]:
      halves = split == "valid" and not files["test"]
      yield from self._every(files[split], first=0, step=2 if halves else 1)
    else:
      yield from self._every(files["valid"], first=1, step=2)

  def _every(self, files: list[Path], first: int, step: int) -> Iterator[str]:
    number = 0
    for file in files:
      for place, line in _lines(file):
        if number % step == first:
          yield self._document(line, f"{file}, line {place}")
        number += 1

  def _document(self, line: bytes, place: str) -> str:
    try:
      found = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{place} is no JSON ({error}); repair it or fetch the file again") from None
    if not isinstance(found, dict) or not isinstance(found.get(self.text), str):
      raise ValueError(
        f"{place} {_members(found)}, no text {self.text!r}; set data.text to the member's name"
      )
    try:
      found[self.text].encode()
    except UnicodeEncodeError:  # JSON can spell what no text holds
      raise ValueError(f"{place} has half of a surrogate pair; remove the line") from None
    return found[self.text]

  def _files(self) -> dict[str, list[Path]]:
    """The files of each split, by name; only the test's may be missing."""
    folder = data_path(self.path, kind="data.path")
    files = {"train": [], "valid": [], "test": []}
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
      named = {SPLIT_NAMES[w] for w in re.split(r"[^a-z]+", path.name.lower()) if w in SPLIT_NAMES}
      if path.name.endswith(SUFFIXES) and len(named) == 1:
        files[named.pop()].append(path)
    missing = [split for split in ("train", "valid") if not files[split]]
    if missing:
      raise FileNotFoundError(
        f"{folder} has no file for {' nor '.join(missing)}; it needs files that end in"
        f" {', '.join(SUFFIXES)} and have train or validation in their names"
      )
    return files

  def fingerprint(self) -> str:
    """A hash of the files (the outlines of large ones), their splits and the member."""
    parts = (part for split, fs in self._files().items() for part in (split, *map(outline, fs)))
    return content_hash([type(self).__name__, self.text, *parts])


def _members(found: Any) -> str:
  if not isinstance(found, dict):
    return "is no object"
  kinds = (f"{name} ({type(member).__name__})" for name, member in found.items())
  return f"has {', '.join(kinds) or 'nothing'}"


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
  """The lines that are not blank, with their numbers from 1 on."""
  with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
    try:
      yield from ((place, line) for place, line in enumerate(content, 1) if line.strip())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
      raise ValueError(f"{file} is damaged ({error}); fetch it again") from None
