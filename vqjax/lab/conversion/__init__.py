"""Initial variables of runs with compressed layers, and distillation."""

from vqjax.lab.conversion.compress import CODEBOOK, FULL, HEAD, compress, converted
from vqjax.lab.conversion.distilled import Distilled, FromTeacher
from vqjax.lab.conversion.starts import (
  Checkpoint,
  FromDense,
  FromTable,
  FromVectors,
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
  "Distilled",
  "FromDense",
  "FromTable",
  "FromTeacher",
  "FromVectors",
  "Mapped",
  "Regrouped",
  "Unigrams",
  "compress",
  "converted",
  "student_of",
]
