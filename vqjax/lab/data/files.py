"""How are text files found, read, hashed and written so that nothing is ever half there?"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
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
"""What a file may call each split."""

LARGE = 64 * 2**20
"""Bytes above which a file of a corpus is known by its outline."""


def data_path(path: str, kind: str = "path") -> Path:
  """The file or folder that `path` names, here or under `$VQJAX_DATA`.

  A relative path that does not exist here is looked for under `$VQJAX_DATA`, so that a config names
  its data the same way on every machine.

  Raises:
    FileNotFoundError: it is in neither place.
  """
  if not path:
    raise ValueError(f"{kind} is empty; give a file or folder, or leave it out for the default")
  found = Path(path).expanduser()
  if found.exists():
    return found
  root = os.environ.get("VQJAX_DATA")
  if root and not found.is_absolute() and (Path(root) / found).exists():
    return Path(root) / found
  where = f"VQJAX_DATA={root}" if root else "VQJAX_DATA, which is not set"
  raise FileNotFoundError(
    f"{kind} {path!r} does not exist, neither here nor under {where}; give an existing path or "
    "set VQJAX_DATA to the folder that holds it"
  )


def read_text(path: Path) -> str:
  """The file's text, with `\\n` line ends and no byte-order mark.

  Raises:
    ValueError: the file is not UTF-8; names the file and the byte offset.
  """
  return _decoded(path.read_bytes(), path).removeprefix("\ufeff").replace("\r\n", "\n")


def read_lines(path: Path) -> Iterator[str]:
  """The file's lines without their ends; only `\\n` ends a line, not form feeds or U+2028.

  Raises:
    ValueError: the file is not UTF-8; names the file and the byte offset.
  """
  offset = 0
  with path.open("rb") as file:
    for line in file:
      text = _decoded(line, path, offset)
      text = text if offset else text.removeprefix("\ufeff")
      yield text.removesuffix("\n").removesuffix("\r")
      offset += len(line)


def _decoded(content: bytes, path: Path, offset: int = 0) -> str:
  """The text of a file's bytes from `offset`."""
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {offset + error.start};"
      " convert it with `iconv -t utf-8`, or leave it out"
    ) from None


def split_files(folder: Path) -> dict[str, Path]:
  """The files of `folder` itself that are named for a split: `train.txt`, `ptb.valid.txt`, ...

  Raises:
    ValueError: two files claim the same split.
  """
  found: dict[str, Path] = {}
  for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
    split = SPLIT_NAMES.get(path.stem.split(".")[-1].lower())
    if split:
      if split in found:
        raise ValueError(
          f"{folder} has two files for the split {split!r}: {found[split].name} and {path.name}; "
          "keep one, or name a file instead of the folder"
        )
      found[split] = path
  return found


def content_hash(parts: Iterable[str | bytes | Path]) -> str:
  """32 hex digits that change with any part, or with the content of any file among the parts."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    content = part.read_bytes() if isinstance(part, Path) else part
    content = content.encode() if isinstance(content, str) else content
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)
  return digest.hexdigest()


def outline(path: Path) -> bytes:
  """The bytes of a file, or of a large one its size and the first and the last MiB.

  Compressed formats end in a checksum or in a table of places, so that a change shows at the end:
  enough to know a corpus again whose files take hours to read.
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
  """A file to write that appears at `path` complete, or not at all.

  It is written under another name beside `path` and renamed at the end, so neither a killed process
  nor two processes at once leave a part of it.
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
