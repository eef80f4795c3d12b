"""Outputs that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

from vqjax.checkpoints.files import Source
from vqjax.checkpoints.table_file import SEPARATOR


def check_output(path: str | pathlib.Path, name: str = "out") -> pathlib.Path:
  """A path at which nothing is, or an empty folder.

  Raises:
    FileExistsError: something is there.
    FileNotFoundError: there is no folder above it.
  """
  path = pathlib.Path(path)
  # What is written gets the name at the end, and "." has none.
  if path.exists() and not (path.name and path.is_dir() and not any(path.iterdir())):
    raise FileExistsError(f"`{name}` must be new; got {path}, which exists. Give another one.")
  if not path.absolute().parent.is_dir():
    raise FileNotFoundError(
      f"`{name}` must be in a folder that exists; got {path}. Make the folder first."
    )
  return path


@contextlib.contextmanager
def whole(path: str | pathlib.Path, name: str = "out") -> Iterator[pathlib.Path]:
  """A path beside `path` for a file or a folder, which gets the name `path` at the end.

  After an exception it is removed, and nothing is at `path`.
  """
  path = check_output(path, name)
  partial = path.absolute().with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
  try:
    yield partial
    publish(partial, path)
  finally:
    if partial.is_dir():
      shutil.rmtree(partial, ignore_errors=True)
    else:
      partial.unlink(missing_ok=True)


def publish(partial: pathlib.Path, path: pathlib.Path) -> None:
  """Give a finished file or folder its name, once the disk has all of it."""
  for own in [*partial.rglob("*"), partial, partial.parent]:
    _sync(own)
  if path.is_dir():
    path.rmdir()
  partial.rename(path)
  _sync(path.absolute().parent)


def _sync(path):
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def check_not_compressed(source: Source) -> None:
  """Raise ValueError for a model that has compressed tables."""
  coded = [n for n, t in source.tensors.items() if t.table is not None or SEPARATOR in n]
  if coded:
    raise ValueError(
      f"`model` must not be compressed already; got {source.path} with the table"
      f" {coded[0].partition(SEPARATOR)[0]} compressed. Give the model that it was made of."
    )
