"""Files of safetensors: one writer, and one reader, of all that this library keeps in them.

Each tensor has a checksum in the header's metadata, of its bytes and of what the header says of it:
its name, number format and shape. Files of other libraries have none.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import mmap
import os
import pathlib
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from vqjax import outputs

__all__ = []

DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
"""Number formats of safetensors that NumPy has."""

NARROW = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
"""Number formats that are no numbers without a scale, which is another tensor, and of scales."""

CHECKSUMS = "checksums"
"""Key of the checksums in the metadata of the files that are written here."""

FORMATS = {np.dtype(dtype): name for name, dtype in (DTYPES | NARROW).items()}


class StoredTensor(NamedTuple):
  """A tensor of a file.

  Attributes:
    array: the numbers, a view of the mapped file.
    format: the number format, such as "BF16".
    named: CRC-32 of its name, format and shape.
    checksum: CRC-32 that follows from `named` and its bytes; None: unknown.
  """

  array: np.ndarray
  format: str
  named: int
  checksum: int | None


def _named(name: str, array: np.ndarray) -> int:
  return zlib.crc32(json.dumps([name, FORMATS[array.dtype], array.shape]).encode())


def _bytes(array: np.ndarray) -> np.ndarray:
  return array.reshape(-1).view(np.uint8)


def save_file(
  tensors: Mapping[str, np.ndarray],
  path: str | os.PathLike[str],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write a file of safetensors, whole or not at all; equal tensors make equal files.

  Not by the library, whose files only their owner may read and whose metadata are in any order.
  """
  # The widest first, so that each is aligned; by name among them.
  order = sorted(tensors, key=lambda name: (-np.asarray(tensors[name]).itemsize, name))
  # Vectors of one number are made of scalars otherwise.
  arrays = {n: np.ascontiguousarray(tensors[n]).reshape(np.shape(tensors[n])) for n in order}
  checksums = {name: zlib.crc32(_bytes(x), _named(name, x)) for name, x in arrays.items()}
  header = {"__metadata__": {**(metadata or {}), CHECKSUMS: json.dumps(checksums)}}
  first = 0
  for name, x in arrays.items():
    offsets = [first, first := first + x.nbytes]
    header[name] = {"dtype": FORMATS[x.dtype], "shape": x.shape, "data_offsets": offsets}
  with outputs.atomic_file(path) as file:
    file.write(_encoded(header))
    for x in arrays.values():
      file.write(_bytes(x))


def _encoded(header) -> bytes:
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  return len(text).to_bytes(8, "little") + text


def save_blocks(
  path: str | os.PathLike[str],
  name: str,
  shape: tuple[int, ...],
  dtype: Any,
  blocks: Iterable[np.ndarray] = (),
) -> None:
  """Write a file of one tensor, a block of rows at a time, whole or not at all.

  It has no checksum, so that it may be changed in place. Rows behind the blocks are zeros, which
  take no space on the disk until they are written.
  """
  size = math.prod(shape) * np.dtype(dtype).itemsize
  entry = {"dtype": FORMATS[np.dtype(dtype)], "shape": shape, "data_offsets": [0, size]}
  with outputs.atomic_file(path) as file:
    text = _encoded({name: entry})
    file.write(text)
    for block in blocks:
      file.write(_bytes(np.ascontiguousarray(block, dtype)))
    file.truncate(len(text) + size)


def open_file(
  path: str | os.PathLike[str], *, narrow: bool = False, writable: bool = False
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
  """The tensors of a file of safetensors, which are read when they are used, and its metadata.

  Args:
    path: the file.
    narrow: it may have formats of `NARROW` too.
    writable: whether what is written into the arrays is written into the file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is truncated, or its header damaged, or it has a format that NumPy lacks.
  """
  path = os.fspath(path)
  if not os.path.isfile(path):
    what = "a folder" if os.path.isdir(path) else "a device" if os.path.exists(path) else "no file"
    raise FileNotFoundError(f"{path} must be a safetensors file; got {what}. Give another path.")
  with open(path, "rb"):  # whose errors have the path, unlike those of the library
    pass
  try:
    # The library checks the header against the length of the file; its arrays would be copies.
    with safetensors.safe_open(path, framework="numpy"):
      pass
    data = np.memmap(path, np.uint8, "r+" if writable else "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    metadata = header.pop("__metadata__", None) or {}
    text = metadata.pop(CHECKSUMS, None)
    checksums = None if text is None else json.loads(text)
    if checksums is not None and (
      not isinstance(checksums, dict)
      or checksums.keys() != header.keys()
      or any(type(value) is not int for value in checksums.values())
    ):
      raise ValueError("checksums that are not those of its tensors")
  except OSError:
    raise
  except Exception as error:  # the library raises nothing narrower
    problem = ascii(str(error))[1:-1]  # it may quote the header
    raise ValueError(
      f"{path} must be a whole safetensors file; got {problem}. It is truncated or damaged: copy or"
      " download it again."
    ) from None
  tensors, known = {}, DTYPES | NARROW if narrow else DTYPES
  for name, entry in header.items():
    if entry["dtype"] not in known:
      raise ValueError(
        f"{name} of {path} must have one of the formats {', '.join(known)}; got {entry['dtype']}."
        " Convert it."
      )
    first, last = entry["data_offsets"]
    array = data[start + first : start + last].view(known[entry["dtype"]]).reshape(entry["shape"])
    own = None if checksums is None else checksums[name]
    tensors[name] = StoredTensor(array, entry["dtype"], _named(name, array), own)
  return tensors, metadata


class RowShards:
  """Tensors of one width, one behind the other, as one table that gives slices of rows.

  Attributes:
    shape: shape of the table, (V, D).
    dtype: dtype of its rows.
  """

  def __init__(self, shards: Sequence[np.ndarray]):
    self._shards, self.dtype = shards, shards[0].dtype
    self._ends = [0, *itertools.accumulate(map(len, shards))]
    self.shape = self._ends[-1], shards[0].shape[1]

  def __len__(self) -> int:
    return self.shape[0]

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.array(self[:], dtype, copy=copy)

  def __getitem__(self, rows: slice) -> np.ndarray:
    first, last, _ = rows.indices(len(self))
    begins = zip(self._shards, self._ends)
    parts = [x[max(first - begin, 0) : max(last - begin, 0)] for x, begin in begins]
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
      return parts[0]
    joined = np.concatenate(parts)
    for part in parts:
      release(part)
    return joined


def weight_files(
  folder: pathlib.Path, only: pathlib.Path | None = None
) -> tuple[list[pathlib.Path], list[str]]:
  """The files of a folder that transformers reads, and the tensors that its index names.

  They are the single file, or else the shards of the index, or else all files.

  Args:
    folder: the folder.
    only: the file that was given; None: the folder was.

  Raises:
    FileNotFoundError: a shard is missing.
    ValueError: the index is damaged, or names files elsewhere.
  """
  single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
  if only is not None and not (index.is_file() or only == single):
    return [only], []
  if single.is_file() and only in (None, single):
    if index.is_file():
      warnings.warn(
        f"{single} is read, as by transformers, and not the files of {index.name} beside it: remove"
        " those that are not of this model.",
        stacklevel=2,
      )
    return [single], []
  if not index.is_file():
    return sorted(folder.glob("*.safetensors")), []
  weights = _weight_map(index)
  names = sorted(set(weights.values()))
  absent = [name for name in names if not (folder / name).is_file()]
  if absent:
    more = "" if len(absent) == 1 else f" and of {len(absent) - 1} more"
    raise FileNotFoundError(
      f"{folder} must have the files of its index; got none of {ascii(absent[0])[1:-1]}{more}."
      " Download them too."
    )
  files = [folder / name for name in names]
  return ([only], []) if only not in (None, *files) else (files, list(weights))


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  """What an index holds: tensors -> files of its folder."""
  try:
    weights = json.loads(index.read_text("utf-8-sig"))["weight_map"]
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{index} must be JSON; got {error}. Download it again.") from None
  except (TypeError, LookupError):
    weights = None
  if not isinstance(weights, dict):
    got = "none" if weights is None else type(weights).__name__
    raise ValueError(f"{index}: `weight_map` must be a JSON object; got {got}. Download it again.")
  if not weights:
    raise ValueError(f"{index}: `weight_map` must have tensors; got none. Download it again.")
  for name in weights.values():
    # A name is a file of the folder, and nothing that leads elsewhere.
    is_name = isinstance(name, str) and name == pathlib.PurePath(name).name and "\\" not in name
    if not is_name or name in ("", ".."):
      raise ValueError(
        f"{index}: `weight_map` must name files of its folder; got {ascii(name)[:80]}. Download it"
        " again."
      )
  return weights


def open_rows(path: str | os.PathLike[str], name: str) -> np.ndarray | RowShards:
  """A tensor of a file or of a folder of safetensors, or what `NAME.shard_I.weight` are together.

  Raises:
    ValueError: there is no such tensor, or it is in two files, or a shard is missing.
  """
  path = pathlib.Path(path)
  files = weight_files(path)[0] if path.is_dir() else [path]
  opened = {file: open_file(file)[0] for file in files}
  tensors = {key: x.array for own in opened.values() for key, x in own.items()}
  if name in tensors:
    found = [file.name for file, own in opened.items() if name in own]
    if len(found) > 1:
      raise ValueError(
        f"{path} must hold {name} once; got it in {found[0]} and in {found[1]}. Give one of the"
        " files."
      )
    return tensors[name]
  pattern = re.escape(name.removesuffix(".weight")) + r"\.shard_(\d+)\.weight"
  shards = {int(m[1]): tensors[key] for key in tensors if (m := re.fullmatch(pattern, key))}
  if not shards:
    near = difflib.get_close_matches(name, tensors, 3, 0.0)
    raise ValueError(
      f"`model` must name a tensor of {path}; got {ascii(name)[1:-1]}. Similar names:"
      f" {', '.join(ascii(key)[1:-1] for key in near)}."
    )
  if missing := set(range(len(shards))) - set(shards):
    raise ValueError(
      f"{path} must have all shards of {name}; got {len(shards)} without shard {min(missing)}."
      " Download the other files."
    )
  return RowShards([shards[number] for number in range(len(shards))])


def load_file(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """The tensors of a file and its metadata, with the checksums compared.

  Raises:
    ValueError: as `open_file`, or a checksum differs.
  """
  tensors, metadata = open_file(path)
  for name, tensor in tensors.items():
    verify(tensor.array, name, path, tensor.named, tensor.checksum)
  return {name: tensor.array for name, tensor in tensors.items()}, metadata


def verify(
  array: np.ndarray, name: str, path: str | os.PathLike[str], named: int, checksum: int | None
) -> None:
  """Raise ValueError unless a tensor with a checksum has it."""
  if checksum is not None and zlib.crc32(_bytes(array), named) != checksum:
    raise ValueError(
      f"{name} of {os.fspath(path)} must have the checksum that it was saved with; got another one."
      " The file is damaged: copy it again."
    )


def release(array: np.ndarray) -> None:
  """Give back the pages of a mapped file that a view shows; they are read again when needed.

  They would count as memory of the process for as long as the file is mapped.
  """
  base = map_of(array)
  if base is None or not hasattr(mmap, "MADV_DONTNEED") or not array.size:
    return
  # The pages of a private map that may be written are the only place of what was written.
  with memoryview(base) as view:
    is_in_file = view.readonly or getattr(array, "mode", None) == "r+"
  if is_in_file:
    first, start = offset_of(array), offset_of(array) // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, first + array.nbytes - start)


def offset_of(array: np.ndarray) -> int:
  """The byte of its mapped file at which a contiguous view begins."""
  origin = np.frombuffer(map_of(array), np.uint8).ctypes.data
  return np.lib.array_utils.byte_bounds(array)[0] - origin


def map_of(array: np.ndarray) -> mmap.mmap | None:
  """The mapped file that an array is a view of; None for another array."""
  base = array
  while isinstance(base, np.ndarray):
    base = base.base
  return base if isinstance(base, mmap.mmap) else None
