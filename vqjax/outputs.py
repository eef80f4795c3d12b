"""Outputs: the one way in which the library and its commands write files and folders.

An output is whole or not there: it is written beside its place under another name, and renamed once
the disk has all of it. A symbolic link is followed, so that the file it leads to is replaced and
not the link. What is not a regular file, such as a terminal, a pipe or /dev/null, is written into.

The module loads nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import BinaryIO

__all__ = []


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], name: str = "path") -> Iterator[BinaryIO]:
  """Open a file for writing that appears at `path` complete, or not at all.

  Neither a killed process nor several processes at once leave a part of it. The folders above it
  are made.

  Args:
    path: the file; an existing one is replaced, and keeps who may read it.
    name: what the caller calls it, for messages.

  Raises:
    IsADirectoryError: `path` is a folder.
    PermissionError: the file that is there may not be written.
  """
  if (stream := _stream(pathlib.Path(path))) is not None:
    with _named(path), stream:
      yield stream
    return
  with _named(path), _beside(path, name) as partial, partial.open("r+b") as file:
    yield file


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], name: str = "path") -> Iterator[pathlib.Path]:
  """Give the path of an empty file, which appears at `path` when it has been written.

  For libraries that write to a path; otherwise as `atomic_file`.
  """
  if (stream := _stream(pathlib.Path(path))) is not None:
    with _named(path), stream, tempfile.TemporaryDirectory() as folder:
      partial = pathlib.Path(folder, "output")
      partial.touch()
      yield partial
      with partial.open("rb") as written:
        shutil.copyfileobj(written, stream)
    return
  with _named(path), _beside(path, name) as partial:
    yield partial


def write_text(path: str | os.PathLike[str], text: str, name: str = "path") -> None:
  """Write a text file: a reader sees the old text or the new one."""
  with atomic_file(path, name) as file:
    file.write(text.encode())


@contextlib.contextmanager
def _named(path):
  """Name the file in an error of the system about writing it."""
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = os.fspath(path)
    raise


@contextlib.contextmanager
def _made(path, name):
  """Name an output that cannot be made in a folder of the system, such as /proc."""
  try:
    yield
  except FileNotFoundError:
    raise FileNotFoundError(
      f"`{name}` must be in a folder where files can be made; got {path}. Give another one."
    ) from None


@contextlib.contextmanager
def _beside(path, name):
  check_file(path, name)
  target = _followed(pathlib.Path(path), name)
  target.parent.mkdir(parents=True, exist_ok=True)
  # Not `tempfile`, whose files only their owner may read.
  partial = _partial(target)
  with _made(path, name):
    partial.open("xb").close()
  try:
    mode = stat.S_IMODE((target if target.exists() else partial).stat().st_mode)
    yield partial
    _sync(partial)
    partial.chmod(mode)
    partial.replace(target)
  except BaseException:
    with contextlib.suppress(OSError):
      partial.unlink(missing_ok=True)
    raise


def _partial(path: pathlib.Path) -> pathlib.Path:
  """A free name beside a path, short enough however long its own is."""
  return path.with_name(f".{path.name[:48]}.{uuid.uuid4().hex[:8]}")


def _followed(path: pathlib.Path, name: str) -> pathlib.Path:
  """What a path leads to through symbolic links, whether it exists or not."""
  target = pathlib.Path(os.path.realpath(path))
  if target.is_symlink():
    raise OSError(f"`{name}` must lead to a file; got {path}, a link in a circle. Remove it.")
  return target


def _stream(path: pathlib.Path) -> BinaryIO | None:
  """The opened device, pipe or descriptor that a path names; None for a file that is replaced."""
  descriptor = _descriptor(path)
  if descriptor is not None:
    for own in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):
        own.flush()
    return os.fdopen(os.dup(descriptor), "wb")
  try:
    mode = path.stat().st_mode
  except OSError:
    return None
  return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else path.open("wb")


def _descriptor(path: pathlib.Path) -> int | None:
  """The open file of this process that a path such as /dev/stdout leads to; None for another."""
  folders = {os.path.realpath("/proc/self/fd"), os.path.realpath("/dev/fd")}
  path = path.absolute()
  for _ in range(40):  # as many links as Linux follows
    parent = pathlib.Path(os.path.realpath(path.parent))
    if str(parent) in folders and path.name.isdecimal():
      return int(path.name)
    if not path.is_symlink():
      return None
    path = parent / path.readlink()
  return None


def check_file(path: str | os.PathLike[str], name: str = "path") -> None:
  """Raise OSError unless `atomic_file` can write a path, as far as is seen beforehand."""
  target = _followed(pathlib.Path(path), name)
  if target.is_dir():
    raise IsADirectoryError(
      f"`{name}` must be a file; got {path}, which is a folder. Name a file in it."
    )
  if target.exists():
    if not os.access(target, os.W_OK):
      raise PermissionError(
        f"`{name}` must be a file that may be written; got {path}, which is read-only. Give another"
        " one."
      )
    if not target.is_file():  # it is written into
      return
  above = next(folder for folder in target.parents if folder.exists())
  if not above.is_dir():
    raise NotADirectoryError(
      f"`{name}` must be in a folder; got {path}, and {above} is a file. Give another one."
    )
  if not os.access(above, os.W_OK | os.X_OK):
    raise PermissionError(
      f"`{name}` must be in a folder that may be written; got {path}. Give another one."
    )


def check_output(path: str | os.PathLike[str], name: str = "out", *, folder: bool) -> None:
  """Raise OSError unless nothing is at a path, or for a folder an empty one, and it can be made.

  Args:
    path: where the output shall be.
    name: what the caller calls it, for messages.
    folder: whether a folder will be written, not a file.

  Raises:
    FileExistsError: something is there.
    FileNotFoundError: there is no folder above it.
    PermissionError: the folder above it may not be written.
  """
  path = pathlib.Path(path)
  target = _followed(path, name)
  # What is written gets the name at the end, and "." has none.
  is_empty = path.name and target.is_dir() and not any(target.iterdir())
  if target.exists() and not (folder and is_empty):
    what = "a folder" if target.is_dir() else "a file" if target.is_file() else "a device"
    remedy = "Name a file in it" if target.is_dir() and not folder else "Give another one"
    raise FileExistsError(f"`{name}` must be new; got {path}, which exists as {what}. {remedy}.")
  parent = target if target.is_dir() else target.parent
  if not parent.is_dir():
    raise FileNotFoundError(
      f"`{name}` must be in a folder that exists; got {path}. Make the folder first."
    )
  if not os.access(parent, os.W_OK | os.X_OK):
    raise PermissionError(
      f"`{name}` must be in a folder that may be written; got {path}. Give another one."
    )


@contextlib.contextmanager
def new_output(
  path: str | os.PathLike[str], name: str = "out", *, folder: bool
) -> Iterator[pathlib.Path]:
  """A path that does not exist, for a file or a folder that is at `path` at the end.

  After an exception it is removed, and nothing is at `path`, or the empty folder that was there.
  """
  check_output(path, name, folder=folder)
  target = _followed(pathlib.Path(path), name)
  # In a folder that is there, which may be a disk of its own.
  partial = _partial(target / target.name if target.is_dir() else target)
  with _made(path, name):
    partial.touch(exist_ok=False)
    partial.unlink()
  try:
    yield partial
    publish(partial, target)
  finally:
    if partial.is_dir():
      shutil.rmtree(partial, ignore_errors=True)
    else:
      partial.unlink(missing_ok=True)


def publish(partial: pathlib.Path, path: pathlib.Path) -> None:
  """Give a finished file or folder its name, once the disk has all of it.

  An empty folder that is there stays, and gets the content; its config.json, without which no
  reader takes the folder for a model, comes last.
  """
  target = _followed(path, "out")
  for own in [*partial.rglob("*"), partial, partial.parent]:
    _sync(own)
  if not target.is_dir():
    partial.rename(target)
    _sync(target.parent)
    return
  moved = []
  try:
    for own in sorted(partial.iterdir(), key=lambda p: (p.name == "config.json", p.name)):
      moved.append(target / own.name)
      shutil.move(own, moved[-1])
  except BaseException:
    for own in moved:
      with contextlib.suppress(OSError):
        shutil.rmtree(own) if own.is_dir() else own.unlink(missing_ok=True)
    raise
  partial.rmdir()
  _sync(target)


def copied_file(source: pathlib.Path) -> pathlib.Path:
  """The file itself that is copied for a path in a model's folder.

  What is copied may be published with the copy. A link is therefore followed only to a file of the
  same folder, or in the cache of Hugging Face to the `blobs` of the same model.

  Raises:
    ValueError: it is a link that leads elsewhere.
  """
  folder, own = (pathlib.Path(os.path.realpath(path)) for path in (source.parent, source))
  cached = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
  if not own.is_relative_to(folder) and not own.is_relative_to(cached):
    raise ValueError(
      f"{source} must be a file of its folder; got a link to {own}. Put the file itself in its"
      " place if the copy shall have it, or remove the link."
    )
  return own


def copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copy a file of a model's folder; errors as of `copied_file`."""
  shutil.copy(copied_file(source), target)


def _sync(path):
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
