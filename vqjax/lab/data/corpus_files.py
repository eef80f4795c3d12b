"""Files of corpora: splits by their names, and hashes."""

import hashlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

__all__ = ["content_hash", "normalised_hash"]

SPLIT_NAMES = {
  "train": "train",
  "training": "train",
  "valid": "valid",
  "validation": "valid",
  "val": "valid",
  "dev": "valid",
  "test": "test",
}
"""Name of a split in a file's name -> the split."""

LARGE = 64 * 2**20
"""Size in bytes above which `outline` hashes only the ends of a file."""


def import_extra(module: str, extra: str = "lab") -> ModuleType:
  """Import a module of an extra of vqjax; the error says how to install it."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name != module:
      raise
    raise ImportError(f"{module} must be installed. Run pip install 'vqjax[{extra}]'.") from None


def split_files(folder: Path) -> dict[str, Path]:
  """Return the files directly in `folder` that are named for splits.

  Raises:
    ValueError: two files are named for the same split.
  """
  files: dict[str, Path] = {}
  for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
    split = SPLIT_NAMES.get(path.stem.split(".")[-1].lower())
    if split in files:
      raise ValueError(
        f"{folder} must have one file for the split {split!r}; got {files[split].name} and"
        f" {path.name}. Keep one, or name a file instead of the folder."
      )
    if split:
      files[split] = path
  return files


def content_hash(parts: Iterable[str | bytes | Path]) -> str:
  """Return 32 hexadecimal digits that change with any part or content of a file."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    content = part.read_bytes() if isinstance(part, Path) else part
    content = content.encode() if isinstance(content, str) else content
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)
  return digest.hexdigest()


def normalised_hash(document: str) -> int:
  """Return 64 bits that are equal for documents that differ only in case and blanks.

  The expected number of collisions among n different documents is n² / 2^65: 0.004 for 365 million.
  """
  words = " ".join(document.casefold().split())
  return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def outline(path: Path) -> bytes:
  """Return the bytes of a file; for a large one its size, first and last MiB.

  Compressed formats end in a checksum or an index, so that a change shows at the end. This
  identifies a corpus without reading files for hours.
  """
  size = path.stat().st_size
  if size <= LARGE:
    return path.read_bytes()
  with path.open("rb") as file:
    first = file.read(2**20)
    file.seek(-(2**20), os.SEEK_END)
    return size.to_bytes(8, "little") + first + file.read()
