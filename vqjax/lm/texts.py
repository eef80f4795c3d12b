"""Texts: files by their paths, tokens in windows, and counts of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


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
