"""Forms that the vocabulary tables of a loaded model take in memory.

A form makes the embedding and the head from the tables in the file. The files of compressed tables
say which form is theirs, and any other may be given to `load`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vqjax.convert.packed_table import PackedTable
from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import Embedding, Int8Embedding
from vqjax.embeddings.int8 import int8_levels
from vqjax.heads import Head, PackedHead
from vqjax.lm.models import Transformer
from vqjax.lm.sources.readers import Tensor
from vqjax.tables import container
from vqjax.tables.stored import KeptRows, StoredEmbedding

__all__ = ["RUNTIMES", "Runtime"]

BLOCK = 2**13
"""Rows that are rounded at a time."""

GROUP = 32
"""Numbers of a row that share a scale in the form int8, or a divisor of it."""


class Layers(NamedTuple):
  """The vocabulary layers of a model.

  Attributes:
    embedding: the embedding.
    head: the head.
    variables: those of their variables that are not read from a dense tensor, as NumPy arrays.
  """

  embedding: Embedding
  head: Head
  variables: Variables


@dataclasses.dataclass(frozen=True)
class Runtime:
  """A form of vocabulary tables in memory.

  Attributes:
    described: what the tables are, after "they are".
    layers: (the decoder of a file, its tables "embedding" and, where it is not tied, "head") -> the
      layers.
    check: raises ValueError for a decoder whose tables cannot have the form.
    rounded: rows [R, D] -> the rows that the form has of them.
  """

  described: str
  layers: Callable[[Transformer, Mapping[str, Tensor]], Layers]
  check: Callable[[Transformer], None] = lambda model: None
  rounded: Callable[[np.ndarray], np.ndarray] = lambda rows: rows


def _is_tied(model: Transformer) -> bool:
  return model.head.embedding is not None


def _unpacked(model, tables):
  del tables
  return Layers(model.embedding, model.head, {})


def _int8(model, tables):
  """Groups of 8-bit integers with a scale each, in place of dense rows."""
  vocab, dim = tables["embedding"].shape
  group = math.gcd(dim, GROUP)
  embedding = Int8Embedding(vocab, dim, group, dtype=model.dtype)
  made = {name: _int8_variables(tensor, group) for name, tensor in tables.items()}
  variables = {
    collection: {"embedding": made["embedding"][collection]} for collection in ("params", "codes")
  }
  own = embedding
  if not _is_tied(model):
    # Its dtype differs from the other's: models with equal fields are one program, tied or not.
    own = Int8Embedding(vocab, dim, group)
    for collection, tree in variables.items():
      tree["head"] = {"embedding": made["head"][collection]}
  return Layers(embedding, model.head.clone(embedding=own), variables)


def _int8_variables(tensor, group):
  vocab, dim = tensor.shape
  levels = np.empty((vocab, dim), np.int8)
  scale = np.empty((vocab, dim // group), np.float32)
  for first in range(0, vocab, BLOCK):
    some = slice(first, min(first + BLOCK, vocab))
    levels[some], scale[some] = int8_levels(tensor.read(some), group)
  return {"params": {"scale": scale}, "codes": {"levels": levels}}


def _rounded_to_int8(rows_RD):
  group = math.gcd(rows_RD.shape[1], GROUP)
  level_RD, scale_RG = int8_levels(rows_RD, group)
  return level_RD * np.repeat(scale_RG, group, axis=1)


def _packed(model, tables):
  """Rows as strings of bits, looked up and scored where they lie."""
  for name, tensor in tables.items():
    if not isinstance(tensor.table, PackedTable):
      raise ValueError(
        f"the form packed must be that of a folder that `vqjax compress --runtime packed` wrote;"
        f" got one whose {name} is {tensor.format}. Use another form."
      )
  embedding, own = tables["embedding"].table.embedding(dtype=model.dtype)
  fields = {"softcap": model.head.softcap, "dtype": model.head.dtype}
  if _is_tied(model):
    head, theirs = PackedHead(embedding.vocab, embedding.dim, embedding=embedding, **fields), {}
  else:
    head, theirs = tables["head"].table.head(**fields)
  parts = {"embedding": own, "head": theirs}
  variables = {
    collection: {name: part[collection] for name, part in parts.items() if part}
    for collection in own
  }
  return Layers(embedding, head, variables)


def _check_untied(model):
  if _is_tied(model):
    raise ValueError(
      "the form rows must be that of a model whose head has a table of its own; got a tied one,"
      " whose table is scored as a whole. Use packed or int8."
    )


def _rows(model, tables):
  """The input table is decoded on demand; that of the head is unpacked."""
  _check_untied(model)
  tensor = tables["embedding"]
  if not isinstance(tensor.table, container.CompressedTable):
    raise ValueError(
      f"the form rows must be that of a folder that `vqjax compress` wrote; got one whose embedding"
      f" is {tensor.format}. Use another form."
    )
  embedding = StoredEmbedding(*tensor.shape, KeptRows(tensor.table), dtype=model.dtype)
  return Layers(embedding, model.head, {})


RUNTIMES = {
  container.UNPACKED: Runtime("dense rows", _unpacked),
  "int8": Runtime("groups of 8-bit integers", _int8, rounded=_rounded_to_int8),
  container.PACKED: Runtime("bits that are scored and looked up where they lie", _packed),
  "rows": Runtime(
    "rows that are decoded when they are looked up, and for the head dense ones",
    _rows,
    check=_check_untied,
  ),
}
"""The forms by their names in files and commands."""


def runtime_of(name: str) -> Runtime:
  """The form of a name; ValueError for one that this version does not have."""
  if name not in RUNTIMES:
    raise ValueError(
      f"the form of the tables in memory must be one of {', '.join(RUNTIMES)}; got {name!r}. Read"
      " the folder with the version of vqjax that wrote it."
    )
  return RUNTIMES[name]
