"""Trained tables made small: one result for every method, and one file for every codec."""

# A `SmallTable` has a form, which is what is kept in memory and in the file:
#
#   codec      form                  rows                        head, embedding
#   integers   CompressedTable       entropy-decoded             dense, float32
#              PagedTable            decoded when they are read  StoredEmbedding
#   packed     PackedTable           whole bits, read in place   PackedHead, PackedEmbedding
#   int8       Int8Table             8-bit levels times scales   DenseHead tied to an Int8Embedding
#   codes      CompactEmbedding      values that codes choose    ProductHead or CodebookHead
#
# The file is described in `vqjax.embeddings.table_file`.

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from jaxtyping import Float, Int, Int8

from vqjax import nnx
from vqjax.convert.packed_table import PackedTable
from vqjax.convert.trained_variables import Variables, to_head
from vqjax.embeddings import (
  CompactEmbedding,
  DenseEmbedding,
  Embedding,
  Int8Embedding,
  ProductEmbedding,
)
from vqjax.embeddings.compact import write_table
from vqjax.embeddings.int8 import int8_levels
from vqjax.embeddings.table_file import open_tensors
from vqjax.heads import DenseHead, Head
from vqjax.ops import bit_packing
from vqjax.ops.vocabulary import host_array
from vqjax.tables.container import SEPARATOR, CompressedTable, table_of
from vqjax.tables.stored import KeptRows, StoredEmbedding

__all__ = ["Int8Table", "SmallTable"]

BLOCK = 2**13
"""Rows that are read at a time, so that no second copy of a large table exists."""

NAME = "table" + SEPARATOR
"""What the names of the parts of integers begin with in a file."""


@dataclasses.dataclass(frozen=True)
class Int8Table:
  """Levels of 8 bits, of which a few neighbours share a scale.

  Attributes:
    levels: the levels, [V, D].
    scale: the scales, [V, D / group].
  """

  levels: Int8[np.ndarray, "V D"]
  scale: Float[np.ndarray, "V G"]

  @classmethod
  def of(cls, table: Float[np.ndarray, "V D"], group: int) -> "Int8Table":
    """The nearest levels of a table, a block of rows at a time."""
    levels = np.empty(table.shape, np.int8)
    scale = np.empty((len(table), table.shape[1] // group), np.float32)
    for first in range(0, len(table), BLOCK):
      some = slice(first, first + BLOCK)
      levels[some], scale[some] = int8_levels(np.asarray(table[some], np.float32), group)
    return cls(levels, scale)

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the table, (V, D)."""
    return self.levels.shape

  @property
  def group(self) -> int:
    """Neighbours that share a scale."""
    return self.shape[1] // self.scale.shape[1]

  def rows(self, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n D"]:
    """The rows of the given tokens, in float32."""
    return self.levels[ids] * np.repeat(self.scale[ids], self.group, axis=-1)


class _Integers:
  """What a small table does with entropy-coded integers."""

  form = CompressedTable

  @staticmethod
  def rows(table, ids):
    return table[ids]

  @staticmethod
  def nbytes(table):
    return table.nbytes

  @staticmethod
  def tensors(table):
    return {NAME + name: array for name, array in table.stored.items()}, {}

  @staticmethod
  def read(meta, tensors):
    del meta
    return table_of(
      {n.removeprefix(NAME): array for n, array in tensors.items() if n.startswith(NAME)}
    )

  @staticmethod
  def head(small, bias, fields):
    params = {"weight": jnp.asarray(small.table())}
    if bias is not None:
      params["bias"] = jnp.asarray(bias, jnp.float32)
    return DenseHead(*small.shape, use_bias=bias is not None, **fields), {"params": params}

  @staticmethod
  def embedding(small, fields):
    if small.form.is_paged:
      return StoredEmbedding(*small.shape, KeptRows(small.form), **fields), {}
    weight = jnp.asarray(small.table())
    return DenseEmbedding(*small.shape, **fields), {"params": {"weight": weight}}


class _Packed:
  """What a small table does with packed bits."""

  form = PackedTable

  @staticmethod
  def rows(table, ids):
    return table.rows_of(ids)

  @staticmethod
  def nbytes(table):
    return table.nbytes

  @staticmethod
  def tensors(table):
    return table.parts(), {"groups": len(table.size), "units": len(table.stream)}

  @staticmethod
  def read(meta, tensors):
    del meta
    return PackedTable.from_parts({n: array for n, array in tensors.items() if n != "bias"})

  @staticmethod
  def head(small, bias, fields):
    return small.form.head(bias, **fields)

  @staticmethod
  def embedding(small, fields):
    return small.form.embedding(**fields)


class _Int8:
  """What a small table does with 8-bit levels."""

  form = Int8Table

  @staticmethod
  def rows(table, ids):
    return table.rows(ids)

  @staticmethod
  def nbytes(table):
    return table.levels.nbytes + table.scale.nbytes

  @staticmethod
  def tensors(table):
    return vars(table), {"group": table.group}

  @staticmethod
  def read(meta, tensors):
    del meta
    return Int8Table(tensors["levels"], tensors["scale"])

  @staticmethod
  def head(small, bias, fields):
    embedding, variables = small.to_embedding()
    head = DenseHead(*small.shape, use_bias=bias is not None, embedding=embedding, **fields)
    made = {collection: {"embedding": tree} for collection, tree in variables.items()}
    if bias is not None:
      made["params"]["bias"] = jnp.asarray(bias, jnp.float32)
    return head, made

  @staticmethod
  def embedding(small, fields):
    levels, scale = jnp.asarray(small.form.levels), jnp.asarray(small.form.scale)
    embedding = Int8Embedding(*small.shape, small.form.group, **fields)
    return embedding, {"params": {"scale": scale}, "codes": {"levels": levels}}


@jax.jit
def _vectors(compact, ids):
  return compact(ids).astype(jnp.float32)


_unpacked = jax.jit(bit_packing.bit_unpacked_rows, static_argnums=(2, 3))


class _Codes:
  """What a small table does with codes of vectors."""

  form = CompactEmbedding

  @staticmethod
  def rows(table, ids):
    return np.asarray(_vectors(table, ids))

  @staticmethod
  def nbytes(table):
    return table.nbytes

  @staticmethod
  def head(small, bias, fields):
    return to_head(small.form, bias, **fields)

  @staticmethod
  def embedding(small, fields):
    form = small.form
    shared = len(form.values) == 1 and form.subspaces > 1
    params = {"values": jnp.asarray(form.values)}
    if form.basis is not None:
      params["basis"] = jnp.asarray(form.basis, jnp.float32)
      fields = {"rotated": True} | fields
    embedding = ProductEmbedding(
      *small.shape, form.codes, form.subspaces, shared, form.additive, **fields
    )
    codes = _unpacked(form.data, np.arange(form.vocab), form.subspaces, form.bits)
    codes = codes.astype(embedding.declare()["codes"].dtype)
    return embedding, {"params": params, "codes": {"codes": codes}}


CODECS = {"integers": _Integers, "packed": _Packed, "int8": _Int8, "codes": _Codes}


@dataclasses.dataclass(frozen=True)
class SmallTable:
  """A compressed table [V, D]: what `vqjax.compress` returns.

  Attributes:
    form: the table as it is kept, of one of the classes `CompressedTable`, `PackedTable`,
      `Int8Table` and `CompactEmbedding`.
    bias: float16 or float32 [V], the output bias that was trained with the table; None: there is
      none.
    report: the `Report` of the compression; None for a table that was loaded.
  """

  form: CompressedTable | PackedTable | Int8Table | CompactEmbedding
  bias: Float[np.ndarray, "V"] | None = None
  report: Any = None

  @property
  def codec(self) -> str:
    """Name of the form in files: "integers", "packed", "int8" or "codes"."""
    for name, codec in CODECS.items():
      if isinstance(self.form, codec.form):
        return name
    raise TypeError(
      f"`form` must be one of {', '.join(codec.form.__name__ for codec in CODECS.values())}; got"
      f" {type(self.form).__name__}. A method of `vqjax.compress` returns one."
    )

  @property
  def _codec(self):
    return CODECS[self.codec]

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the table, (V, D)."""
    if isinstance(self.form, CompactEmbedding):
      return self.form.vocab, self.form.dim
    return self.form.shape

  @property
  def nbytes(self) -> int:
    """Bytes of the form and the bias: the length of the file without its header."""
    return self._codec.nbytes(self.form) + (0 if self.bias is None else self.bias.nbytes)

  def rows(self, ids: Int[Any, "*B"]) -> Float[np.ndarray, "*B D"]:
    """The rows of tokens, float32.

    Raises:
      IndexError: a token is outside [0, V).
    """
    ids = host_array("ids", ids)
    vocab, dim = self.shape
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab):
      got = f"{ids.min()} to {ids.max()}" if ids.dtype.kind in "iu" else ids.dtype
      raise IndexError(
        f"`ids` must be integers in [0, {vocab}); got {got}. Use the tokenizer of the table."
      )
    if not ids.size:
      return np.zeros((*ids.shape, dim), np.float32)
    found = self._codec.rows(self.form, ids.astype(np.int64).ravel())
    return np.asarray(found, np.float32).reshape(*ids.shape, dim)

  def __call__(self, ids: Int[Any, "*B"]) -> Float[np.ndarray, "*B D"]:
    """The rows of tokens, as of an embedding; see `rows`."""
    return self.rows(ids)

  def table(self) -> Float[np.ndarray, "V D"]:
    """All rows, float32."""
    vocab, dim = self.shape
    table = np.empty((vocab, dim), np.float32)
    for first in range(0, vocab, BLOCK):
      # One shape for all blocks, so that one program is compiled.
      ids = np.minimum(np.arange(first, first + min(BLOCK, vocab)), vocab - 1)
      last = min(first + len(ids), vocab)
      table[first:last] = self.rows(ids)[: last - first]
    return table

  def to_head(self, bias: Float[Any, "V"] | None = None, **fields: Any) -> tuple[Head, Variables]:
    """The head that scores with these rows, and its variables.

    The pair is that of `flax.linen.Module.unbind`: `head.apply(variables, ...)`, or
    `head.bind(variables)`.

    Args:
      bias: the bias of the trained head; None: that of the table, if it has one.
      fields: further fields of the head, such as `dtype`.

    Raises:
      ValueError: the rows are means of codewords (`additive`), which no head scores.
    """
    return self._codec.head(self, self.bias if bias is None else bias, fields)

  def to_embedding(self, **fields: Any) -> tuple[Embedding, Variables]:
    """The embedding with these rows, and its variables; `fields` are further ones."""
    return self._codec.embedding(self, fields)

  def to_nnx(self, kind: str = "head", **fields: Any) -> flax_nnx.Module:
    """The head, or with `kind="embedding"` the embedding, as a module of NNX."""
    if kind not in ("head", "embedding"):
      raise ValueError(f"`kind` must be head or embedding; got {kind!r}. Give one of them.")
    return nnx.from_linen(*(self.to_head if kind == "head" else self.to_embedding)(**fields))

  def save(self, path: str | os.PathLike[str]) -> None:
    """Write a file of safetensors, whole or not at all, whose header names the codec.

    `SmallTable.load`, `vqjax.torch`, and with NumPy alone `vqjax.embeddings.table_file` and
    `vqjax.tables.container` read it.
    """
    if isinstance(self.form, CompactEmbedding):
      dataclasses.replace(self.form, bias=self.bias).save(path)
      return
    tensors, metadata = self._codec.tensors(self.form)
    sizes = dict(zip(("V", "d"), self.shape))
    write_table(path, self.codec, tensors, sizes | metadata, self.bias)

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "SmallTable":
    """Read the file of a small table, memory-mapped until it is used.

    Raises:
      ValueError: the file is damaged, or of another format or version.
    """
    meta, tensors = open_tensors(path)
    if meta["codec"] == "codes":
      form = CompactEmbedding.load(path)
      return cls(dataclasses.replace(form, bias=None), form.bias)
    bias = tensors.pop("bias", None)
    try:
      return cls(CODECS[meta["codec"]].read(meta, tensors), bias)
    except KeyError as error:
      raise ValueError(f"{path} must have the tensor {error}. Save it again.") from None
