"""Lossy compression of trained tables [V, D] in the metric of their use, beyond 16-fold.

`Moments` says which errors cost how much, `quantize` turns a table into a `QuantizedTable` of
integers, and `ideal_bits` counts the bits that an entropy coder needs for them. `pack` encodes a
table in bits that a `QuantizedHead` scores and a `QuantizedEmbedding` looks up where they lie.
"""

from vqjax.tables.integers import (
  QuantizedTable,
  Transform,
  ideal_bits,
  probabilities,
  quantize,
  transform,
)
from vqjax.tables.moments import Moments
from vqjax.tables.packed import PackedTable, pack, units_of

__all__ = [
  "Moments",
  "PackedTable",
  "QuantizedTable",
  "Transform",
  "ideal_bits",
  "pack",
  "probabilities",
  "quantize",
  "transform",
  "units_of",
]
