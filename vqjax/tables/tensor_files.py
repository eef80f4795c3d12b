"""Files of tensors: written whole and for all who may read, and mapped without their memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from vqjax import outputs

__all__ = []


def save_file(
  tensors: Mapping[str, np.ndarray],
  path: str | os.PathLike[str],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write a file of safetensors, whole or not at all, that may be read as other new files are.

  The library writes files that only their owner may read.
  """
  with outputs.atomic_path(path) as partial:
    safetensors.numpy.save_file(
      dict(tensors), partial, None if metadata is None else dict(metadata)
    )


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
