"""Tables that are trained and read in the host's memory, or in files of any size."""

# A table on disk is a folder:
#
#   weight.safetensors   weight [V, D]: what `vqjax compress` takes
#   moment.safetensors   moment [V], the state of the row-wise optimiser
#   undo-STEP            the rows that changed since step STEP, as they were then
#   undone-STEP          the same of a later step than that at which the table is being opened
#
# An update first appends the rows that it changes to the newest undo file, and then changes them in
# the mapped files. To open the table at a step is to put back what the undo files of that step and
# of later ones have, the newest first. A process that is killed leaves all files as it wrote them.
# The last record of an undo file may lack its end: the rows of that record had not been changed.
#
#   record               count of rows and CRC-32 of the rest (uint64 each), ids (int64), moments,
#                        rows

from __future__ import annotations

import concurrent.futures
import io
import math
import mmap
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import ml_dtypes
import numpy as np
from jaxtyping import Float, Integer

from vqjax import outputs
from vqjax.ops.vocabulary import host_array, is_count
from vqjax.row_updates import check_decay, check_step, step_of
from vqjax.tables import tensor_files

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None

__all__ = ["HostTable"]

BLOCK = 2**24
"""Numbers of the blocks of rows in which a table is initialised."""

AROUND = 2**16
"""Bytes of a mapped file that Linux may map where one of them is read."""


class HostTable:
  """A table [V, D] in the memory of the host, or in files that are read and changed in place.

    with HostTable.create("table", rows=of.rows, dim=32) as table:
      for step, tokens in enumerate(texts, start=1):
        ids = of(tokens)
        gradients = train(table.rows(ids), tokens)  # of the rows, [*B, T, H, D]
        table.update(ids, gradients, learning_rate=0.03)
        if step % 1000 == 0:
          table.flush(step)

  A step reads and writes its rows alone. `prefetch` begins to read those of the next step from the
  disk meanwhile. Results do not depend on it.

  A process that is killed loses what was done after the last `flush`, and nothing else: `open`
  gives the rows of that step, or of the one before it, bit for bit, so that the checkpoint of the
  rest of the model may be written before or after. Undo files have the rows that changed since the
  last two, at most twice the table's bytes. This is not so if the machine itself fails: then rows
  that were changed since a `flush` may be those of any later step.

  Attributes:
    weight: [V, D], float32 or bfloat16.
    moment: [V] float32, the state of a row-wise optimiser; None: the table is only read.
    resident: bytes of mapped files that may count as memory of the process, about. A table that
      fits is read as fast as one in memory; otherwise reading a row costs some microseconds more.
  """

  def __init__(
    self,
    weight: Float[np.ndarray, "V D"],
    moment: Float[np.ndarray, "V"] | None = None,
    *,
    resident: int = 2**30,
  ):
    if weight.ndim != 2 or weight.dtype not in (np.float32, ml_dtypes.bfloat16):
      raise ValueError(
        f"`weight` must be a float32 or bfloat16 table [V, D]; got {weight.dtype} {weight.shape}."
        " Convert it."
      )
    if moment is not None and (moment.shape != weight.shape[:1] or moment.dtype != np.float32):
      raise ValueError(
        f"`moment` must be float32 {weight.shape[:1]}, a number for each row of `weight`; got"
        f" {moment.dtype} {moment.shape}. Begin with zeros."
      )
    self.weight, self.moment, self.resident = weight, moment, resident
    self._parts = [x for x in (weight, moment) if isinstance(x, np.memmap)]
    if hasattr(mmap, "MADV_RANDOM"):
      for part in self._parts:
        tensor_files.map_of(part).madvise(mmap.MADV_RANDOM)
    self._mapped = 0
    self._threads = concurrent.futures.ThreadPoolExecutor(1)
    self._folder: pathlib.Path | None = None
    self._undo: io.FileIO | None = None
    self._lock: io.BufferedReader | None = None
    self._is_closed = False

  @classmethod
  def create(
    cls,
    folder: str | os.PathLike[str],
    rows: int,
    dim: int,
    *,
    dtype: Any = np.float32,
    init: Callable[[int, int], Any] | None = None,
    resident: int = 2**30,
  ) -> Self:
    """Make the files of a table at step 0, and open it.

    Args:
      folder: a folder that does not exist, or an empty one.
      rows: V, such as `rows` of a hash.
      dim: D.
      dtype: float32 or bfloat16.
      init: (first, last) -> the rows [last - first, D]; None: zeros, which take no space on the
        disk until they are trained.
      resident: as of the class.

    Raises:
      FileExistsError: the folder has files; `open` goes on with a table.
      ValueError: `rows`, `dim`, `dtype` or the shape of what `init` returns is wrong.
    """
    if not all(is_count(size) and size >= 1 for size in (rows, dim)):
      raise ValueError(
        f"`rows` and `dim` must be integers of at least 1; got {rows} and {dim}. Give `rows` of the"
        " hash."
      )
    if np.dtype(dtype) not in (np.float32, ml_dtypes.bfloat16):
      raise ValueError(f"`dtype` must be float32 or bfloat16; got {dtype}. Leave it out.")
    blocks = () if init is None else _initial(init, rows, dim)
    with outputs.new_output(folder, "folder", folder=True) as made:
      made.mkdir()
      save = tensor_files.save_blocks
      save(made / "weight.safetensors", "weight", (rows, dim), dtype, blocks)
      save(made / "moment.safetensors", "moment", (rows,), np.float32)
      _undo_file(made, 0).touch()
    return cls.open(folder, resident=resident)

  @classmethod
  def open(
    cls,
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    rows: int | None = None,
    resident: int = 2**30,
  ) -> Self:
    """Open the table of a folder as it was at a step; what was done after it is lost.

    Args:
      folder: a folder of `create`, which nothing else has open.
      step: one of the last two that `flush` was given; None: the last.
      rows: rows that the table must have at least, such as `rows` of the hash that reads it.
      resident: as of the class.

    Raises:
      FileNotFoundError: the folder has no table.
      ValueError: a file is truncated, or the step is another one, or the table has too few rows, or
        it is open already, here or in another process.
    """
    folder = pathlib.Path(folder)
    arrays = {}
    for name in ("weight", "moment"):
      path = folder / f"{name}.safetensors"
      tensors, _ = tensor_files.open_file(path, writable=True)
      if tensors.keys() != {name}:
        raise ValueError(
          f"{path} must have one tensor, {name}; got {', '.join(tensors)}. Give a folder of"
          " HostTable.create."
        )
      arrays[name] = tensors[name].array
    table = cls(**arrays, resident=resident)
    if rows is not None and len(table.weight) < rows:
      raise ValueError(
        f"the table of {folder} must have a row for each of the hash, {rows}; got"
        f" {len(table.weight)}. Use its own hash, or HostTable.create(..., rows={rows},"
        f" dim={table.weight.shape[1]})."
      )
    table._lock = _locked(folder)
    try:
      table._go_back(folder, step)
    except BaseException:
      # A traceback may be kept, and the table with it.
      table.close()
      raise
    return table

  def _go_back(self, folder: pathlib.Path, step: int | None) -> None:
    """Put back the rows of a step, from which the table goes on."""
    kept = _steps(folder)
    if not kept:
      raise FileNotFoundError(
        f"{folder} must have a table of HostTable.create; got no undo-STEP. Give another folder."
      )
    if step not in (None, *kept):
      raise ValueError(
        f"`step` must be one that {folder} was flushed at and that is kept, such as"
        f" {' or '.join(map(str, kept[-2:]))}; got {step}. Load the checkpoint of such a step."
      )
    step = kept[-1] if step is None else step
    # Before any row is put back: if this process is killed, no later step can be opened.
    for later in reversed(kept[kept.index(step) + 1 :]):
      _undo_file(folder, later).rename(folder / f"undone-{later}")
    number = lambda path: int(path.name.removeprefix("undone-"))
    undone = sorted(folder.glob("undone-*"), key=number, reverse=True)
    for path in (*undone, _undo_file(folder, step)):
      for index, moments, old in _records(path, self.weight):
        self._put(index, old, moments)
    self._written()
    for path in undone:
      path.unlink()
    self._folder = folder
    self._begin(step)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def close(self) -> None:
    """End the thread and close the files; what was done after the last `flush` will be lost."""
    self._threads.shutdown()
    self._is_closed = True
    for file in (self._undo, self._lock):
      if file is not None:
        file.close()

  def rows(self, ids: Integer[Any, "*B"]) -> Float[np.ndarray, "*B D"]:
    """The rows of ids, in the dtype of the table.

    Raises:
      IndexError: an id is outside [0, V).
    """
    ids = self._checked(ids)
    return self._taken(_bits(self.weight), ids).view(self.weight.dtype)

  def prefetch(self, ids: Integer[Any, "*B"]) -> None:
    """Begin to read the rows of ids from the disk, in a thread.

    It returns at once. It does nothing for tables in memory, and on systems other than Linux.

    Raises:
      IndexError: an id is outside [0, V).
    """
    ids = self._checked(ids)
    self._check_open()
    if self._parts and hasattr(os, "posix_fadvise"):
      self._threads.submit(self._read_ahead, ids)

  def update(
    self,
    ids: Integer[Any, "*B"],
    gradients: Float[Any, "*B D"],
    learning_rate: float,
    *,
    decay: float | None = None,
    epsilon: float = 1e-8,
  ) -> None:
    """Change the rows of a step, as `vqjax.row_updates.update_rows` does.

    Args:
      ids: [*B]; the gradients of equal ids are added up.
      gradients: [*B, D], those of `rows(ids)`.
      learning_rate: a number.
      decay: the part of a moment that is kept; None: all of it, as in Adagrad.
      epsilon: added to the root of a moment.

    Raises:
      IndexError: an id is outside [0, V).
      ValueError: shapes do not fit, `decay` is out of range, or the table is only read or closed.
    """
    if self.moment is None:
      raise ValueError("a table without moments must only be read; got an update. Give `moment`.")
    self._check_open()
    check_decay(decay)
    ids, gradients = self._checked(ids), host_array("gradients", gradients)
    check_step(self.weight.shape, ids, gradients)
    if not ids.size:
      return
    order = np.argsort(ids, axis=None, kind="stable")
    index, starts = np.unique(ids.ravel()[order], return_index=True)
    flat = gradients.reshape(ids.size, -1).astype(np.float32)
    summed = np.add.reduceat(flat[order], starts, axis=0)
    rows, before = self.rows(index), self._taken(self.moment, index)
    step, moments = step_of(summed, before, decay, epsilon, np)
    if self._undo is not None:
      self._remember(index, before, rows)
    moved = rows.astype(np.float32) + step * -np.float32(learning_rate)
    self._put(index, moved.astype(rows.dtype), moments)

  def flush(self, step: int) -> None:
    """Write all rows to the disk, as those of a step to which `open` can go back.

    Args:
      step: a number above that of the last call; 0 is that of `create`.

    Raises:
      ValueError: the step is not above the last one, or the table has no folder or is closed.
    """
    if self._folder is None:
      raise ValueError("a table in memory must be kept by its owner; got no folder. Use create.")
    self._check_open()
    kept = _steps(self._folder)
    if not is_count(step) or step <= kept[-1]:
      raise ValueError(
        f"`step` must be an integer above the last one, {kept[-1]}; got {step}. Count the steps."
      )
    self._written()
    self._begin(step)
    for old in kept[:-1]:
      _undo_file(self._folder, old).unlink()

  def _begin(self, step: int) -> None:
    """Begin the undo file of a step, whose rows the disk has."""
    if self._undo is not None:
      self._undo.close()
    self._undo = _undo_file(self._folder, step).open("wb", buffering=0)
    os.fsync(self._undo.fileno())
    # Rows that the undo file has: their first change since the step is enough.
    self._remembered = np.zeros(len(self.weight), bool)

  def _remember(self, index, moments, rows):
    new = ~self._remembered[index]
    index = index[new].astype(np.int64)
    body = b"".join(x.tobytes() for x in (index, moments[new], rows[new]))
    rest = memoryview(np.array([len(index), zlib.crc32(body)], np.uint64).tobytes() + body)
    size = self._undo.tell()
    try:
      while rest:  # the system may write less than it is given
        rest = rest[self._undo.write(rest) :]
    except BaseException:
      # What comes after a record without its end would not be read.
      self._undo.seek(size)
      self._undo.truncate()
      raise
    self._remembered[index] = True

  def _written(self):
    for part in self._parts:
      part.flush()

  def _check_open(self) -> None:
    # Without the lock, the files may be those of another process by now.
    if self._is_closed:
      raise ValueError(
        f"the table of {self._folder} must be open; got one that was closed. Use HostTable.open."
      )

  def _checked(self, ids) -> np.ndarray:
    ids, count = host_array("ids", ids), len(self.weight)
    if ids.dtype.kind not in "iu":
      raise IndexError(f"`ids` must be integers; got {ids.dtype}. Use those of the hash.")
    if ids.size and (ids.min() < 0 or ids.max() >= count):
      raise IndexError(
        f"`ids` must be in [0, {count}), the rows of the table; got {ids.min()} to {ids.max()}. Use"
        " the hash that the table was made for."
      )
    return ids.astype(np.int64, copy=False)

  def _taken(self, array, ids) -> np.ndarray:
    """`array[ids]`, by so many at once that their pages do not exceed `resident`."""
    found = np.empty((ids.size, *array.shape[1:]), array.dtype)
    flat, size = ids.ravel(), max(1, self.resident // AROUND)
    for first in range(0, ids.size, size):
      part = slice(first, min(first + size, ids.size))
      # The ids are checked, and without a mode NumPy would buffer the result.
      array.take(flat[part], axis=0, out=found[part], mode="clip")
      self._maps((part.stop - first) * AROUND)
    return found.reshape(*ids.shape, *array.shape[1:])

  def _put(self, index, rows, moments) -> None:
    _bits(self.weight)[index] = _bits(rows)
    self.moment[index] = moments
    self._maps(2 * len(index) * mmap.PAGESIZE)

  def _maps(self, count: int) -> None:
    """Give the mapped pages back if they are too many after at most `count` bytes more."""
    self._mapped += count
    if not self._parts or self._mapped <= self.resident:
      return
    # The count is a bound that pages which were mapped before also raise.
    self._mapped = min(self._mapped, _mapped_bytes())
    if self._mapped > self.resident:
      for part in self._parts:
        tensor_files.release(part)
      self._mapped = 0

  def _read_ahead(self, ids):
    for part in self._parts:
      width, start = part.nbytes // len(part), tensor_files.offset_of(part)
      first = start + np.unique(ids) * width
      pages = np.unique(np.concatenate([first, first + width - 1]) // mmap.PAGESIZE)
      with open(part.filename, "rb") as file:
        for page in (pages * mmap.PAGESIZE).tolist():
          os.posix_fadvise(file.fileno(), page, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)


def _locked(folder: pathlib.Path) -> io.BufferedReader:
  """Return an open file that nothing else has locked; the kernel unlocks it when it is closed."""
  file = (folder / "weight.safetensors").open("rb")
  if fcntl is not None:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.close()
      raise ValueError(
        f"`folder` must be of a table that is not open; got {folder}, which is, here or in another"
        " process. Close it, or wait."
      ) from None
  return file


def _initial(
  init: Callable[[int, int], Any], rows: int, dim: int
) -> Iterator[Float[np.ndarray, "n D"]]:
  """The first rows of a table, in blocks."""
  size = max(1, BLOCK // dim)
  for first in range(0, rows, size):
    last = min(first + size, rows)
    block = np.asarray(init(first, last))
    if block.shape != (last - first, dim):
      raise ValueError(
        f"`init` must return the rows {(last - first, dim)} for ({first}, {last}); got"
        f" {block.shape}. Change it."
      )
    yield block


def _mapped_bytes() -> float:
  """Memory of this process that shows files, on Linux; infinite on other systems."""
  statm = pathlib.Path("/proc/self/statm")
  return int(statm.read_text().split()[2]) * mmap.PAGESIZE if statm.exists() else math.inf


def _bits(weight: np.ndarray) -> np.ndarray:
  """The table as integers, whose rows NumPy copies without a look at the numbers."""
  return np.asarray(weight).view(f"u{weight.dtype.itemsize}")


def _undo_file(folder: pathlib.Path, step: int) -> pathlib.Path:
  return folder / f"undo-{step}"


def _steps(folder: pathlib.Path) -> list[int]:
  """The steps that a table can be opened at, in their order."""
  names = (path.name.removeprefix("undo-") for path in folder.glob("undo-*"))
  return sorted(int(name) for name in names if name.isdecimal())


def _records(
  path: pathlib.Path, weight: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """(ids, moments, rows) of each whole record of an undo file."""
  dim = weight.shape[1]
  width = 8 + 4 + dim * weight.dtype.itemsize
  with path.open("rb") as file:
    while len(head := file.read(16)) == 16:
      count, checksum = np.frombuffer(head, np.uint64).tolist()
      body = file.read(count * width)
      if len(body) < count * width or zlib.crc32(body) != checksum:
        return  # killed while it was written
      index = np.frombuffer(body, np.int64, count)
      moments = np.frombuffer(body, np.float32, count, 8 * count)
      yield index, moments, np.frombuffer(body, weight.dtype, -1, 12 * count).reshape(count, dim)
