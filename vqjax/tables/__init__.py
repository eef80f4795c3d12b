"""Lossy compression of trained tables [V, D] in the metric of their use, beyond 16-fold.

`Moments` says which errors cost how much, `coded_table` turns a table into a `CodedTable` of
integers, and `ideal_bits` counts the bits that an entropy coder needs for them. `pack` encodes a
table in bits that a `PackedHead` scores and a `PackedEmbedding` looks up where they lie.
"""

from vqjax.tables.coded import (
  CodedTable,
  Transform,
  coded_table,
  ideal_bits,
  probabilities,
  transform,
)
from vqjax.tables.moments import Moments
from vqjax.tables.packing import PackedTable, pack, units_of

__all__ = [
  "CodedTable",
  "Moments",
  "PackedTable",
  "Transform",
  "coded_table",
  "ideal_bits",
  "pack",
  "probabilities",
  "transform",
  "units_of",
]
