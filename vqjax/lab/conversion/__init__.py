"""Initial variables of runs with compressed layers, and distillation."""

from vqjax.lab.conversion.compress import CODEBOOK, FULL, HEAD, compress, converted
from vqjax.lab.conversion.distilled import Distilled, FromStudent, FromTeacher
from vqjax.lab.conversion.starts import (
  Checkpoint,
  ClusteredCentroids,
  FromDense,
  FromTable,
  FromVectors,
  Frozen,
  Mapped,
  Regrouped,
  Unigrams,
  student_of,
)

__all__ = [
  "CODEBOOK",
  "FULL",
  "HEAD",
  "Checkpoint",
  "ClusteredCentroids",
  "Distilled",
  "FromDense",
  "FromStudent",
  "FromTable",
  "FromTeacher",
  "FromVectors",
  "Frozen",
  "Mapped",
  "Regrouped",
  "Unigrams",
  "compress",
  "converted",
  "student_of",
]
