"""How is a compact embedding read with NumPy alone, without loading it?

This file imports nothing but NumPy, so it may be copied to where there is no JAX:

  table = open_compact("embedding.safetensors")
  vectors = table[[17, 4, 17]]            # float32 [3, d]; the system reads their pages alone
"""

import json
import operator
import os

import numpy as np

FORMAT = "vqjax-compact-embedding"
VERSION = "1"
HEADER_LIMIT = 2**20


class CompactTable:
  """The vectors of a compact embedding, looked up in the file.

  Attributes:
    data: uint8, the packed codes, a memory map.
    values: float32 [M or 1, K, C], a memory map.
    vocab: V.
    dim: d.
    codes: K.
    subspaces: M.
    additive: whether the mean of the chosen values is the vector, or they side by side.
    dtype: to which the embedding that was trained rounds its vectors; here they are float32.
  """

  def __init__(self, data, values, *, vocab, dim, codes, subspaces, additive, dtype):
    self.data, self.values = data, values
    self.vocab, self.dim, self.codes, self.subspaces = vocab, dim, codes, subspaces
    self.additive, self.dtype = additive, dtype
    self.bits = (codes - 1).bit_length()

  def __len__(self):
    return self.vocab

  def codes_of(self, tokens):
    """The codes of tokens: int64 [*B, M].

    Raises:
      IndexError: a token outside [0, V), or one that is no integer.
    """
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer) and tokens.size:
      raise IndexError(f"tokens of {tokens.dtype} name no rows: give integers")
    tokens = tokens.astype(np.int64)
    wrong = (tokens < 0) | (tokens >= self.vocab)
    if wrong.any():
      raise IndexError(f"token {tokens[wrong].flat[0]} is outside [0, {self.vocab})")
    row_bits = self.subspaces * self.bits
    first = tokens.astype(np.int64)[..., None] * row_bits + np.arange(row_bits)
    bit = self.data[first // 8] >> (first % 8).astype(np.uint8) & 1
    bit = bit.reshape(*tokens.shape, self.subspaces, self.bits).astype(np.int64)
    return bit @ (np.int64(1) << np.arange(self.bits))

  def __getitem__(self, tokens):
    """The vectors of tokens: float32 [*B, d]."""
    codes = self.codes_of(tokens)
    if (codes >= self.codes).any():
      raise ValueError(f"the file has codes of {self.codes} or above; it is damaged: save it anew")
    table = np.arange(self.subspaces) if len(self.values) > 1 else 0
    parts = self.values[table, codes]
    if self.additive:
      return parts.mean(axis=-2, dtype=np.float32)
    return parts.reshape(*codes.shape[:-1], self.dim)


def open_compact(path):
  """The embedding of a file.

  Raises:
    ValueError: the file is truncated, of another format or version, or contradicts itself.
  """
  path = os.fspath(path)
  size = os.path.getsize(path)
  header, start = _header(path, size)
  meta = header["__metadata__"]
  if meta.get("format") != FORMAT:
    raise ValueError(f"{path} is no compact embedding: its format is {meta.get('format')!r}")
  if meta.get("version") != VERSION:
    raise ValueError(
      f"{path} has version {meta.get('version')!r} and this reads {VERSION!r}; read it with the"
      " vqjax that wrote it, or save it anew"
    )
  vocab, dim, codes, subspaces = (_count(path, meta, k) for k in ("V", "d", "K", "M"))
  table = CompactTable(
    _array(path, header, "codes", np.uint8, start, size),
    _array(path, header, "values", np.float32, start, size),
    vocab=vocab,
    dim=dim,
    codes=codes,
    subspaces=subspaces,
    additive=meta.get("additive") == "true",
    dtype=meta.get("dtype"),
  )
  _check(path, table)
  return table


def _header(path, size):
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
      raise ValueError(f"{path} is truncated, or no safetensors file: {size} bytes")
    try:
      header = json.loads(file.read(length))
    except ValueError as error:
      raise ValueError(f"{path} is no safetensors file: its header is no JSON") from error
  texts = header.get("__metadata__") if isinstance(header, dict) else None
  if not isinstance(texts, dict) or not all(isinstance(x, str) for x in texts.values()):
    raise ValueError(f"{path} is no compact embedding: its header states no texts by name")
  return header, 8 + length


def _count(path, meta, key):
  text = meta.get(key, "")
  if not text.isdecimal() or not int(text):
    raise ValueError(f"{path} states {key} = {text!r}; it must be a positive number")
  return int(text)


def _array(path, header, name, dtype, start, size):
  kind = {np.uint8: "U8", np.float32: "F32"}[dtype]
  try:
    entry = header[name]
    first, last, *shape = map(operator.index, (*entry["data_offsets"], *entry["shape"]))
    right = entry["dtype"] == kind and 0 <= first <= last and min(shape, default=0) >= 0
  except (KeyError, TypeError, ValueError):
    right = False
  if not right:
    raise ValueError(f"{path} has no {kind} tensor {name!r} that its header describes")
  shape = tuple(shape)
  wanted = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
  if last - first != wanted or start + last > size:
    raise ValueError(
      f"{path} is truncated: tensor {name!r} ends at byte {start + last} of {size}; copy it again"
    )
  return np.memmap(path, dtype, "r", start + first, shape)


def _check(path, table):
  parts = sorted((x.offset, x.offset + x.nbytes) for x in (table.data, table.values))
  if parts[0][1] > parts[1][0]:
    raise ValueError(f"{path} has tensors that overlap; it is damaged: save it anew")
  bits = table.vocab * table.subspaces * table.bits
  if table.data.shape != (-(-bits // 8),):
    raise ValueError(
      f"{path} has {table.data.shape} bytes of codes where V={table.vocab} M={table.subspaces}"
      f" K={table.codes} need {-(-bits // 8)}"
    )
  width = table.dim if table.additive else table.dim // table.subspaces
  shapes = [(q, table.codes, width) for q in (1, table.subspaces)]
  if table.values.shape not in shapes or (table.dim % table.subspaces and not table.additive):
    raise ValueError(f"{path} has values of shape {table.values.shape}; one of {shapes} is right")
