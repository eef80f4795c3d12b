"""Conversions of trained runs: starting points of runs with compressed layers, and distillation."""

from vqjax.lab.conversion.compress import CODEBOOK, FULL, HEAD, compress, converted
from vqjax.lab.conversion.distilled import Distilled, FromTeacher
from vqjax.lab.conversion.starts import (
  FromDense,
  FromStudent,
  Frozen,
  Mapped,
  MappedProduct,
  Regrouped,
)
from vqjax.lab.conversion.tables import ClusteredCentroids, Codes, FromTable, Guide, clustered

__all__ = [
  "CODEBOOK",
  "FULL",
  "HEAD",
  "ClusteredCentroids",
  "Codes",
  "Distilled",
  "FromDense",
  "FromStudent",
  "FromTable",
  "FromTeacher",
  "Frozen",
  "Guide",
  "Mapped",
  "MappedProduct",
  "Regrouped",
  "clustered",
  "compress",
  "converted",
]
