"""Lossy compression of trained tables [V, D] in the metric of their use, beyond 16-fold.

`Moments` says which errors cost how much, `quantize` turns a table into a `QuantizedTable` of
integers, and `ideal_bits` counts the bits that an entropy coder needs for them.
"""

from vqjax.compression.moments import Moments
from vqjax.compression.table import (
  QuantizedTable,
  Transform,
  ideal_bits,
  probabilities,
  quantize,
  transform,
)

__all__ = [
  "Moments",
  "QuantizedTable",
  "Transform",
  "ideal_bits",
  "probabilities",
  "quantize",
  "transform",
]
