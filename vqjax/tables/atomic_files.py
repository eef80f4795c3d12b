"""Files and folders that are whole or not there, and mapped files."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping

import numpy as np
import safetensors.numpy

__all__ = []


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


def save_file(
  tensors: Mapping[str, np.ndarray],
  path: str | os.PathLike[str],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write a file of safetensors that those may read who may read other new files.

  The library writes files that only their owner may read.
  """
  path = pathlib.Path(path)
  is_new = not path.exists()
  try:
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    safetensors.numpy.save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)
  except BaseException:
    if is_new:
      path.unlink(missing_ok=True)
    raise


def release(array: np.ndarray) -> None:
  """Give back the pages of a mapped file that a view shows; they are read again when needed.

  They would count as memory of the process for as long as the file is mapped.
  """
  base = array
  while isinstance(base, np.ndarray):
    base = base.base
  if not (isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and array.size):
    return
  # The pages of a map that may be written may be the only place of what was written.
  with memoryview(base) as view:
    is_read_only = view.readonly
  if is_read_only:
    first, last = np.lib.array_utils.byte_bounds(array)
    origin = np.frombuffer(base, np.uint8).ctypes.data
    start = (first - origin) // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, last - origin - start)
