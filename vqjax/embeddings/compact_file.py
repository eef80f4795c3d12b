"""A memory-mapped reader of compact embeddings that needs only NumPy.

This file imports only NumPy and the standard library, so it may be copied to a machine without JAX:

  table = open_compact("embedding.safetensors")
  vectors = table[[17, 4, 17]]            # float32 [3, d]; only the pages of these tokens are read
"""

# The file is one of safetensors, with three tensors at most:
#
#   8 bytes    length of the header
#   header     JSON: where each tensor lies, and `__metadata__`, strings only: V, d, K, M, ...
#   tensors    codes (bytes), values (float32), bias (float32, if there is one)
#
# Everything in the header is checked before a tensor is mapped, because the file may come from
# anywhere: a wrong shape must not become a read outside of it.

from __future__ import annotations

import itertools
import json
import operator
import os
import zlib

import numpy as np

__all__ = ["open_compact"]

FORMAT = "vqjax-compact-embedding"
VERSION = "2"

# Bytes of the largest header that is parsed.
HEADER_LIMIT = 2**20

DTYPES = ("float32", "bfloat16", "float16")

# Bytes that the checksum reads at a time.
CHUNK = 2**22


class _CompactFile:
  """The vectors of a compact embedding, read from the file on access.

  It has the attributes of `CompactEmbedding`, whose arrays are memory maps. The vectors are float32
  and not rounded to `dtype`.
  """

  def __init__(self, data, values, *, vocab, dim, codes, subspaces, additive, dtype, bias=None):
    self.data, self.values, self.bias = data, values, bias
    self.vocab, self.dim, self.codes, self.subspaces = vocab, dim, codes, subspaces
    self.additive, self.dtype = additive, dtype
    self.bits = (codes - 1).bit_length()

  def __len__(self):
    return self.vocab

  def codes_of(self, tokens):
    """The codes of tokens: int64 [*B, M].

    Raises:
      IndexError: a token is outside [0, V) or not an integer.
    """
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
    # Bit by bit, lowest first, whatever byte a code begins in: only pages of these tokens are read.
    row_bits = self.subspaces * self.bits
    first = tokens.astype(np.int64)[..., None] * row_bits + np.arange(row_bits)
    bit = self.data[first // 8] >> (first % 8).astype(np.uint8) & 1
    bit = bit.reshape(*tokens.shape, self.subspaces, self.bits).astype(np.int64)
    return bit @ (np.int64(1) << np.arange(self.bits))

  def __getitem__(self, tokens):
    """The vectors of tokens: float32 [*B, d]."""
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
    return parts.reshape(*codes.shape[:-1], self.dim)


def open_compact(path, verify=True):
  """Open the embedding of a file.

  Args:
    path: the file.
    verify: whether to read the whole file once and compare its checksum; False: only the pages of
      tokens that are looked up are read, and damage of numbers is not noticed.

  Raises:
    ValueError: the file is truncated or damaged, has another format or version, or contradicts
      itself.
  """
  path = os.fspath(path)
  size = os.path.getsize(path)
  header, start = _header(path, size)
  meta = header["__metadata__"]
  if meta.get("format") != FORMAT:
    raise ValueError(
      f"`format` of {path} must be {FORMAT!r}; got {meta.get('format')!r}. Write the file with"
      " CompactEmbedding.save."
    )
  if meta.get("version") != VERSION:
    raise ValueError(
      f"`version` of {path} must be {VERSION!r}; got {meta.get('version')!r}. Read it with the"
      " vqjax that wrote it, or save it again."
    )
  if meta.get("dtype") not in DTYPES:
    raise ValueError(
      f"`dtype` of {path} must be one of {', '.join(DTYPES)}; got {meta.get('dtype')!r}. Save it"
      " again."
    )
  vocab, dim, codes, subspaces = (_count(path, meta, k) for k in ("V", "d", "K", "M"))
  has_bias = meta.get("bias") == "true"
  if has_bias != ("bias" in header):
    raise ValueError(f"{path} must have a bias just where its header says so. Save it again.")
  table = _CompactFile(
    _array(path, header, "codes", np.uint8, start, size),
    _array(path, header, "values", np.float32, start, size),
    vocab=vocab,
    dim=dim,
    codes=codes,
    subspaces=subspaces,
    additive=meta.get("additive") == "true",
    dtype=meta.get("dtype"),
    bias=_array(path, header, "bias", np.float32, start, size) if has_bias else None,
  )
  _check(path, table)
  if verify and meta.get("checksum") != compact_checksum(path):
    raise ValueError(
      f"{path} is damaged: it does not have the checksum that it was saved with. Copy it again, or"
      " save it again."
    )
  return table


def compact_checksum(path):
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
    raise ValueError(f"{path} is not a compact embedding: its header has no strings by name.")
  return header, 8 + length


def _count(path, meta, key):
  text = meta.get(key, "")
  # Python refuses to read thousands of digits, with an error of its own.
  if not text.isdecimal() or len(text) > 18 or not int(text):
    raise ValueError(
      f"`{key}` of {path} must be a positive number; got {text[:40]!r}. Save it again."
    )
  return int(text)


def _array(path, header, name, dtype, start, size):
  kind = {np.uint8: "U8", np.float32: "F32"}[dtype]
  try:
    entry = header[name]
    # `index` refuses what is not an integer, such as 1.0.
    first, last, *shape = map(operator.index, (*entry["data_offsets"], *entry["shape"]))
    right = entry["dtype"] == kind and 0 <= first <= last and min(shape, default=0) >= 0
  except (KeyError, TypeError, ValueError):
    right = False
  if not right:
    raise ValueError(f"the header of {path} must describe a {kind} tensor {name!r}; it does not.")
  shape = tuple(shape)
  wanted = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
  if last - first != wanted or start + last > size:
    raise ValueError(
      f"{path} is truncated: tensor {name!r} ends at byte {start + last} of {size}. Copy it again."
    )
  return np.memmap(path, dtype, "r", start + first, shape)


def _check(path, table):
  arrays = [x for x in (table.data, table.values, table.bias) if x is not None]
  parts = sorted((x.offset, x.offset + x.nbytes) for x in arrays)
  if any(first[1] > second[0] for first, second in itertools.pairwise(parts)):
    raise ValueError(f"the tensors of {path} overlap. The file is damaged: save it again.")
  bits = table.vocab * table.subspaces * table.bits
  if table.data.shape != (-(-bits // 8),):
    raise ValueError(
      f"the codes of {path} must have {-(-bits // 8)} bytes for V={table.vocab} M={table.subspaces}"
      f" K={table.codes}; got shape {table.data.shape}. Save it again."
    )
  width = table.dim if table.additive else table.dim // table.subspaces
  shapes = [(q, table.codes, width) for q in (1, table.subspaces)]
  if table.values.shape not in shapes or (table.dim % table.subspaces and not table.additive):
    raise ValueError(
      f"the values of {path} must have one of the shapes {shapes}; got {table.values.shape}."
      " Save it again."
    )
  if table.bias is not None and table.bias.shape != (table.vocab,):
    raise ValueError(
      f"the bias of {path} must have shape ({table.vocab},); got {table.bias.shape}. Save it again."
    )
