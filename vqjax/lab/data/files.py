"""Files: find, read and hash those of corpora, and write files atomically."""

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

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


def import_extra(module: str) -> ModuleType:
  """Import a module of the `lab` extra; the error says how to install it."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name != module:
      raise
    raise ImportError(f"{module} must be installed. Run pip install 'vqjax[lab]'.") from None


def data_path(path: str, kind: str = "path") -> Path:
  """Return the existing file or folder `path`, here or under `$VQJAX_DATA`.

  Raises:
    ValueError: `path` is empty.
    FileNotFoundError: it exists neither here nor under `$VQJAX_DATA`.
  """
  if not path:
    raise ValueError(f"`{kind}` must name a file or folder; got an empty path. Give one.")
  here = Path(path).expanduser()
  if here.exists():
    return here
  root = os.environ.get("VQJAX_DATA")
  if root and not here.is_absolute() and (Path(root) / here).exists():
    return Path(root) / here
  where = f"VQJAX_DATA={root}" if root else "VQJAX_DATA, which is not set"
  raise FileNotFoundError(
    f"`{kind}` must exist here or under {where}; got {path!r}. Give an existing path, or set"
    " VQJAX_DATA to the folder that holds it."
  )


def read_text(path: Path) -> str:
  """Return a file's text with `\\n` line ends and without a byte-order mark.

  Raises:
    ValueError: the file is not UTF-8; the message names the file and the byte offset.
  """
  return _decoded(path.read_bytes(), path).removeprefix("\ufeff").replace("\r\n", "\n")


def read_lines(path: Path) -> Iterator[str]:
  """Yield the lines of a file; only `\\n` ends a line, not a form feed or U+2028.

  Raises:
    ValueError: the file is not UTF-8; the message names the file and the byte offset.
  """
  offset = 0
  with path.open("rb") as file:
    for line in file:
      text = _decoded(line, path, offset)
      text = text if offset else text.removeprefix("\ufeff")
      yield text.removesuffix("\n").removesuffix("\r")
      offset += len(line)


def _decoded(content: bytes, path: Path, offset: int = 0) -> str:
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} must be UTF-8; got byte 0x{content[error.start]:02x} at offset"
      f" {offset + error.start}. Convert it with `iconv -t utf-8`, or leave it out."
    ) from None


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


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
  """Open a file for writing that appears at `path` complete, or not at all.

  It is written beside `path` under another name and renamed at the end, so that neither a killed
  process nor two concurrent processes leave a part of it.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
  try:
    with file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(file.name, path)
  except BaseException:
    Path(file.name).unlink(missing_ok=True)
    raise
