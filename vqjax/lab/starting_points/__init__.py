"""Initial variables of runs with compressed layers, and distillation."""

from vqjax.lab.starting_points.distilled import Distilled, FromTeacher
from vqjax.lab.starting_points.fine_tuning import (
  CODEBOOK,
  FULL,
  HEAD,
  converted,
  fine_tuned_codebook,
)
from vqjax.lab.starting_points.starts import (
  Checkpoint,
  FromDense,
  FromText,
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
  "FromTeacher",
  "FromText",
  "FromVectors",
  "Mapped",
  "Regrouped",
  "Unigrams",
  "converted",
  "fine_tuned_codebook",
  "student_of",
]
