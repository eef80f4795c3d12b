"""The file of a small table, and a memory-mapped reader of it that needs only NumPy.

This file imports only NumPy and the standard library, so it may be copied to a machine without JAX:

  table = open_table("embedding.safetensors")
  vectors = table[[17, 4, 17]]            # float32 [3, d]; only the pages of these tokens are read

It reads the codecs "codes", "int8" and "packed"; `vqjax/tables/container.py` reads "integers".
"""

# The file is one of safetensors:
#
#   8 bytes    length of the header
#   header     JSON: where each tensor lies, and `__metadata__`, strings only: codec, V, d, ...
#   tensors    those of the codec, and bias (float16 or float32 [V]) if there is one
#
#   codec      tensors
#   codes      codes (bytes), values (float32 [M or 1, K, C]), and basis (float16 or float32
#              [M C, d]) if concatenated values are multiplied by one
#   int8       levels (int8 [V, d]), scale (float32 [V, d / group])
#   packed     the arrays of `vqjax.tables.PackedTable`
#   integers   table.vqjax.PART, which `vqjax.tables.container` reads; with the metadata `pages`
#              their checksums stand for that of the file
#
# Everything in the header is checked before a tensor is mapped, because the file may come from
# anywhere: a wrong shape must not become a read outside of it.

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import statistics
import zlib

import numpy as np

__all__ = ["open_table"]

FORMAT = "vqjax-table"
VERSION = "1"

# Bytes of the largest header that is parsed.
HEADER_LIMIT = 2**20

DTYPES = ("float32", "bfloat16", "float16")

TYPES = {"U8": np.uint8, "I8": np.int8, "U16": np.uint16, "U32": np.uint32, "I32": np.int32}
TYPES |= {"F16": np.float16, "F32": np.float32}

# Bytes that the checksum reads at a time.
CHUNK = 2**22


def open_table(path, verify=True):
  """Open the table of a file, whose rows are read on access: `table[ids]`.

  Args:
    path: the file.
    verify: whether to read the whole file once and compare its checksum; False: only the pages of
      tokens that are looked up are read, and damage of numbers is not noticed.

  Raises:
    ValueError: the file is truncated or damaged, has another format or version, or contradicts
      itself.
  """
  meta, tensors = open_tensors(path, verify=False)
  codec = meta["codec"]
  if codec not in READERS:
    raise ValueError(
      f"`codec` of {os.fspath(path)} must be one of {', '.join(READERS)}; got {codec}. Read it with"
      " vqjax/tables/container.py: read_table(path)."
    )
  table = READERS[codec](os.fspath(path), meta, tensors)
  if verify:
    _verify(path, meta)
  return table


def open_tensors(path, verify=True):
  """The metadata of a file, and its tensors by name, memory-mapped; errors as of `open_table`."""
  path = os.fspath(path)
  size = os.path.getsize(path)
  header, start = _header(path, size)
  meta = header.pop("__metadata__")
  if meta.get("format") != FORMAT:
    raise ValueError(
      f"`format` of {path} must be {FORMAT!r}; got {meta.get('format')!r}. Write the file with"
      " vqjax.compress(...).save."
    )
  if meta.get("version") != VERSION:
    raise ValueError(
      f"`version` of {path} must be {VERSION!r}; got {meta.get('version')!r}. Read it with the"
      " vqjax that wrote it, or save it again."
    )
  if meta.get("codec") not in CODECS:
    raise ValueError(
      f"`codec` of {path} must be one of {', '.join(CODECS)}; got {meta.get('codec')!r}. Read it"
      " with the vqjax that wrote it."
    )
  if (meta.get("bias") == "true") != ("bias" in header):
    raise ValueError(f"{path} must have a bias just where its header says so. Save it again.")
  tensors = {name: _array(path, entry, name, start, size) for name, entry in header.items()}
  filled = [x for x in tensors.values() if isinstance(x, np.memmap)]
  parts = sorted((x.offset, x.offset + x.nbytes) for x in filled)
  if any(first[1] > second[0] for first, second in itertools.pairwise(parts)):
    raise ValueError(f"the tensors of {path} overlap. The file is damaged: save it again.")
  if verify:
    _verify(path, meta)
  return meta, tensors


def _verify(path, meta):
  if meta.get("pages") == "true":
    return  # they have checksums of their own, which are compared when they are read
  if meta.get("checksum") != table_checksum(path):
    raise ValueError(
      f"{path} is damaged: it does not have the checksum that it was saved with. Copy it again, or"
      " save it again."
    )


def table_checksum(path):
  """The CRC-32 of a file's header, without the checksum itself, and of its tensors."""
  with open(path, "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header["__metadata__"].pop("checksum", None)
    # In one spelling, whatever order of names and spaces the header was written with.
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    while part := file.read(CHUNK):
      value = zlib.crc32(part, value)
  return f"{value:08x}"


def _header(path, size):
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
      raise ValueError(f"{path} is truncated or not a safetensors file; it has {size} bytes.")
    try:
      header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path} is not a safetensors file: its header is not JSON.") from error
  texts = header.get("__metadata__") if isinstance(header, dict) else None
  if not isinstance(texts, dict) or not all(isinstance(x, str) for x in texts.values()):
    raise ValueError(f"{path} is not a small table: its header has no strings by name.")
  return header, 8 + length


def _count(path, meta, key):
  text = meta.get(key, "")
  # Python refuses to read thousands of digits, with an error of its own.
  if not text.isdecimal() or len(text) > 18 or not int(text):
    raise ValueError(
      f"`{key}` of {path} must be a positive number; got {text[:40]!r}. Save it again."
    )
  return int(text)


def _array(path, entry, name, start, size):
  try:
    dtype = TYPES[entry["dtype"]]
    # `index` refuses what is not an integer, such as 1.0.
    first, last, *shape = map(operator.index, (*entry["data_offsets"], *entry["shape"]))
    right = 0 <= first <= last and min(shape, default=0) >= 0
  except (KeyError, TypeError, ValueError):
    right = False
  if not right:
    raise ValueError(f"the header of {path} must describe a tensor {name!r}; it does not.")
  # Integers of Python: a product of large lengths must not wrap around.
  wanted = math.prod(shape) * np.dtype(dtype).itemsize
  if last - first != wanted or start + last > size:
    raise ValueError(
      f"{path} is truncated: tensor {name!r} ends at byte {start + last} of {size}. Copy it again."
    )
  # Nothing of no bytes can be mapped.
  if not wanted:
    return np.zeros(shape, dtype)
  return np.memmap(path, dtype, "r", start + first, tuple(shape))


def _tensor(path, tensors, name, dtype, shape):
  """A tensor that must have this dtype and one of these shapes."""
  found = tensors.get(name)
  if found is None or found.dtype != dtype or found.shape not in shape:
    got = "none" if found is None else f"{found.dtype} {found.shape}"
    raise ValueError(
      f"{name} of {path} must be {np.dtype(dtype).name} of shape {' or '.join(map(str, shape))};"
      f" got {got}. Save it again."
    )
  return found


class _Rows:
  """What the tables of all codecs have: `bias`, `len(table)` and checked `table[ids]`."""

  def __init__(self, path, meta, tensors):
    self.vocab, self.dim = (_count(path, meta, key) for key in ("V", "d"))
    self.bias = None
    if "bias" in tensors:
      dtype = np.float16 if tensors["bias"].dtype == np.float16 else np.float32
      self.bias = _tensor(path, tensors, "bias", dtype, [(self.vocab,)])

  def __len__(self):
    return self.vocab

  def __getitem__(self, tokens):
    """The vectors of tokens: float32 [*B, d]."""
    return self._rows(self._checked(tokens))

  def _checked(self, tokens):
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer) and tokens.size:
      raise IndexError(f"`tokens` must be integers; got {tokens.dtype}. Give token ids.")
    tokens = tokens.astype(np.int64)
    wrong = (tokens < 0) | (tokens >= self.vocab)
    if wrong.any():
      raise IndexError(
        f"`tokens` must be in [0, {self.vocab}); got {tokens[wrong].flat[0]}. Use the tokenizer of"
        " the table."
      )
    return tokens


class _Codes(_Rows):
  """Rows of vectors that bit-packed codes choose.

  It has the attributes of `CompactEmbedding`, whose arrays are memory maps. The vectors are float32
  and not rounded to `dtype`.
  """

  def __init__(self, path, meta, tensors):
    super().__init__(path, meta, tensors)
    self.codes, self.subspaces = (_count(path, meta, key) for key in ("K", "M"))
    self.additive, self.dtype = meta.get("additive") == "true", meta.get("dtype")
    self.bits = (self.codes - 1).bit_length()
    if self.dtype not in DTYPES:
      raise ValueError(
        f"`dtype` of {path} must be one of {', '.join(DTYPES)}; got {self.dtype!r}. Save it again."
      )
    size = -(-self.vocab * self.subspaces * self.bits // 8)
    self.data = _tensor(path, tensors, "codes", np.uint8, [(size,)])
    self.basis = tensors.get("basis")
    if self.dim % self.subspaces and not self.additive and self.basis is None:
      raise ValueError(f"`M` of {path} must divide d; got {self.subspaces}. Save it again.")
    width = self.dim if self.additive else -(-self.dim // self.subspaces)
    if self.basis is not None:
      dtype = np.float16 if self.basis.dtype == np.float16 else np.float32
      _tensor(path, tensors, "basis", dtype, [(self.subspaces * width, self.dim)])
    shapes = [(q, self.codes, width) for q in (1, self.subspaces)]
    self.values = _tensor(path, tensors, "values", np.float32, shapes)

  def codes_of(self, tokens):
    """The codes of tokens: int64 [*B, M].

    Raises:
      IndexError: a token is outside [0, V) or not an integer.
    """
    # Bit by bit, lowest first, whatever byte a code begins in: only pages of these tokens are read.
    row_bits = self.subspaces * self.bits
    first = self._checked(tokens)[..., None] * row_bits + np.arange(row_bits)
    bit = self.data[first // 8] >> (first % 8).astype(np.uint8) & 1
    bit = bit.reshape(*first.shape[:-1], self.subspaces, self.bits).astype(np.int64)
    return bit @ (np.int64(1) << np.arange(self.bits))

  def _rows(self, tokens):
    codes = self.codes_of(tokens)
    # Of these tokens alone: a check of all codes would read the whole file.
    if (codes >= self.codes).any():
      raise ValueError(
        f"the codes of the file must be below K={self.codes}; some are not. Save the file again."
      )
    table = np.arange(self.subspaces) if len(self.values) > 1 else 0
    parts = self.values[table, codes]
    if self.additive:
      return parts.mean(axis=-2, dtype=np.float32)
    rows = parts.reshape(*codes.shape[:-1], -1)
    return rows if self.basis is None else rows @ self.basis.astype(np.float32)


class _Int8(_Rows):
  """Rows of 8-bit levels, of which a few share a scale."""

  def __init__(self, path, meta, tensors):
    super().__init__(path, meta, tensors)
    group = _count(path, meta, "group")
    self.levels = _tensor(path, tensors, "levels", np.int8, [(self.vocab, self.dim)])
    groups = self.dim // group if self.dim % group == 0 else 0
    self.scale = _tensor(path, tensors, "scale", np.float32, [(self.vocab, groups)])

  def _rows(self, tokens):
    level, scale = self.levels[tokens], self.scale[tokens]
    return level * np.repeat(scale, self.dim // scale.shape[-1], axis=-1)


class _Packed(_Rows):
  """Rows of whole bits, in the coordinates of row groups; see `vqjax.tables.PackedTable`.

  A coordinate is read from the 12 bits of the row up to its own last one, or from its own bits.
  """

  def __init__(self, path, meta, tensors):
    super().__init__(path, meta, tensors)
    of = lambda name, dtype, *shape: _tensor(path, tensors, name, dtype, [shape])
    groups, units = (_count(path, meta, key) for key in ("groups", "units"))
    self.stream = of("stream", np.uint16, units)
    self.size = of("size", np.int32, groups).astype(np.int64)
    self.width = of("width", np.uint8, groups, self.dim).astype(np.int64)
    self.scale, self.center = (
      of(name, np.float16, groups, self.dim).astype(np.float32) for name in ("scale", "center")
    )
    self.inverse = of("inverse", np.float16, self.dim, self.dim).astype(np.float32)
    self.rank = tensors.get("rank")
    if self.rank is None or self.rank.shape != (self.vocab,) or self.rank.dtype.kind not in "iu":
      raise ValueError(f"rank of {path} must be {self.vocab} integers. Save it again.")
    self.is_trellis = bool(of("is_trellis", np.uint8, 1)[0])
    self.units_of_row = -(-self.width.sum(axis=1) // 16)
    fits = self.size.min() >= 0 and self.size.sum() == self.vocab and self.width.max() <= 8
    if not fits or 1 + (self.size * self.units_of_row).sum() > units:
      raise ValueError(f"the parts of {path} must be those of one table. Save it again.")
    # Wide numbers come first in a row.
    order = np.argsort(-self.width, axis=-1, kind="stable")
    ends = np.cumsum(np.take_along_axis(self.width, order, axis=-1), axis=-1)
    self.end = np.empty_like(ends)
    np.put_along_axis(self.end, order, ends, axis=-1)
    self.value = _trellis_values() if self.is_trellis else _level_values()

  def _rows(self, tokens):
    rank = self.rank[tokens].astype(np.int64)
    last = np.cumsum(self.size)
    group = np.searchsorted(last, rank, side="right")
    begin = np.cumsum(self.size * self.units_of_row) - self.size * self.units_of_row
    unit = 1 + begin[group] + (rank - last[group] + self.size[group]) * self.units_of_row[group]
    end, width = self.end[group], self.width[group]
    first = end - 12
    at = unit[..., None] + (first >> 4)
    stream = lambda i: self.stream[np.minimum(at + i, len(self.stream) - 1)].astype(np.uint32)
    window = (stream(0) << 16 | stream(1)) >> (20 - (first & 15)).astype(np.uint32)
    bits = np.minimum(end, 12) if self.is_trellis else width
    state = window.astype(np.int64) & (1 << bits) - 1
    value = self.value[state if self.is_trellis else state + (1 << width)]
    value = np.where(width > 0, value, 0)
    return (self.center[group] + self.scale[group] * value) @ self.inverse


def _trellis_values():
  """The value of each state of `vqjax.ops.trellis`."""
  state = np.arange(2**12)
  for factor in (3_077, 1_009, 2_221):
    state = (state * factor + 3_512) % 2**12
    state ^= state >> 6
  inverse = statistics.NormalDist().inv_cdf
  return np.array([inverse((rank + 0.5) / 2**12) for rank in range(2**12)], np.float32)[state]


def _level_values():
  """The value of each level of each width, at 2^width + level."""
  inverse, value = statistics.NormalDist().inv_cdf, [0.0]
  for width in range(9):
    value += [inverse((code + 0.5) / 2**width) for code in range(2**width)]
  return np.array(value, np.float32)


READERS = {"codes": _Codes, "int8": _Int8, "packed": _Packed}
CODECS = ("integers", *READERS)
