"""The header of a GGUF: metadata and the places of tensors, read from a mapped file.

Each size that the file names is compared with the bytes that are left before anything is made of
it, so that a damaged header cannot ask for memory.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

__all__ = []

SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Number of a type of values -> its letter in `struct`, and in NumPy."""

STRING, ARRAY = 8, 9
"""Numbers of the types of values that have lengths."""


class Entry(NamedTuple):
  """A tensor of a GGUF.

  Attributes:
    shape: its shape, the row's width last.
    kind: number of its block type.
    first: its first byte in the file.
    nbytes: its bytes.
  """

  shape: tuple[int, ...]
  kind: int
  first: int
  nbytes: int


class Header(NamedTuple):
  """What precedes the tensors of a GGUF.

  Attributes:
    data: the whole file, mapped.
    metadata: the values by their keys.
    spans: the bytes of each key with its value.
    entries: the tensors by their names.
    alignment: tensors begin at multiples of it.
  """

  data: np.ndarray
  metadata: dict[str, Any]
  spans: dict[str, slice]
  entries: dict[str, Entry]
  alignment: int

  def with_value(self, key: str, value: Any) -> bytes:
    """The bytes of a key with another value of its type; a new key has a text."""
    kinds = (STRING,)
    if key in self.spans:
      reader = _Reader(self.data[self.spans[key]])
      reader.text()
      kinds = reader.numbers("I")
      kinds += reader.numbers("I") if kinds == (ARRAY,) else ()
    text = lambda own: struct.pack("<Q", len(own.encode())) + own.encode()
    start = text(key) + struct.pack(f"<{len(kinds)}I", *kinds)
    if kinds[0] == ARRAY:
      start += struct.pack("<Q", len(value))
    values = value if kinds[0] == ARRAY else [value]
    if kinds[-1] == STRING:
      return start + b"".join(map(text, values))
    return start + np.asarray(values, np.dtype(SCALARS[kinds[-1]]).newbyteorder("<")).tobytes()


class _Reader:
  """Numbers and texts of a mapped file, one after another."""

  def __init__(self, data: np.ndarray):
    self.data, self.at = memoryview(data), 0

  def take(self, size: int) -> memoryview:
    """The next bytes."""
    if size > len(self.data) - self.at:
      raise ValueError(f"{size:,} bytes at {self.at:,}, behind the end of the file")
    self.at += size
    return self.data[self.at - size : self.at]

  def numbers(self, letters: str) -> tuple:
    """The next numbers, little-endian."""
    return struct.unpack("<" + letters, self.take(struct.calcsize("<" + letters)))

  def text(self) -> str:
    """The next text, behind its length."""
    return str(self.take(*self.numbers("Q")), "utf-8")

  def value(self, kind: int) -> Any:
    """The next value of a type."""
    if kind in SCALARS:
      return self.numbers(SCALARS[kind])[0]
    if kind == STRING:
      return self.text()
    if kind != ARRAY:
      raise ValueError(f"an unknown type of values, {kind}")
    of, count = self.numbers("IQ")
    if of in SCALARS:
      numbers = np.dtype(SCALARS[of]).newbyteorder("<")
      return np.frombuffer(self.take(count * numbers.itemsize), numbers).tolist()
    if of != STRING:
      raise ValueError(f"an array of the type {of}, neither numbers nor texts")
    if 8 * count > len(self.data) - self.at:
      raise ValueError(f"{count:,} texts at {self.at:,}, more than the file has")
    return [self.text() for _ in range(count)]


def read_header(path: pathlib.Path, sizes: dict[int, tuple[int, int]]) -> Header:
  """The header of a file.

  Args:
    path: the file.
    sizes: number of a block type -> numbers of a block, and its bytes.

  Raises:
    ValueError: the file is truncated or damaged, or of another version.
  """
  data = np.asarray(np.memmap(path, np.uint8, "r"))
  reader = _Reader(data)
  magic, version, tensors, keys = reader.numbers("4sIQQ")
  if magic != b"GGUF" or version not in (2, 3):
    swapped = version in (2 << 24, 3 << 24)
    remedy = ", of the other byte order: call gguf-convert-endian first" if swapped else ""
    raise ValueError(f"the magic {magic} and the version {version}{remedy}")
  metadata: dict[str, Any] = {}
  spans: dict[str, slice] = {}
  for _ in range(keys):
    first, key = reader.at, reader.text()
    if key in metadata:
      raise ValueError(f"{key!r} twice")
    metadata[key] = reader.value(*reader.numbers("I"))
    spans[key] = slice(first, reader.at)
  alignment = metadata.get("general.alignment", 32)
  if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
    raise ValueError(f"the alignment {alignment!r}, not a power of two")
  infos = {}
  for _ in range(tensors):
    name, (rank,) = reader.text(), reader.numbers("I")
    if name in infos:
      raise ValueError(f"the tensor {name!r} twice")
    lengths = np.frombuffer(reader.take(8 * rank), "<u8").tolist()
    infos[name] = tuple(reversed(lengths)), *reader.numbers("IQ")
  # Tensors follow each other, padded to the alignment, as llama.cpp demands: none overlap.
  start, entries, next_offset = -(-reader.at // alignment) * alignment, {}, 0
  for name, (shape, kind, offset) in infos.items():
    if kind not in sizes:
      raise ValueError(f"the tensor {name!r} in an unknown block type, {kind}")
    block, size = sizes[kind]
    if not shape or shape[-1] % block:
      raise ValueError(f"the tensor {name!r} of shape {shape} in blocks of {block}")
    entry = Entry(shape, kind, start + offset, math.prod(shape) // block * size)
    if offset != next_offset:
      raise ValueError(f"the tensor {name!r} at {offset:,}, not {next_offset:,} behind the others")
    next_offset += -(-entry.nbytes // alignment) * alignment
    if entry.first + entry.nbytes > len(data):
      raise ValueError(f"the tensor {name!r}, which ends behind the file")
    entries[name] = entry
  # The last one has no other behind it that would show a wrong size.
  if entries and len(data) - start >= next_offset + alignment:
    raise ValueError(f"{len(data) - start - next_offset:,} bytes behind the tensors")
  return Header(data, metadata, spans, entries, alignment)
