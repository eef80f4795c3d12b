"""Lenses: what a decoder would predict after each of its blocks."""

from vqjax.lm.lenses.tuned import (
  Lens,
  least_squares_lens,
  lens_divergence,
  lens_readings,
  load_lens,
  residual_streams,
  save_lens,
)
from vqjax.ops.distillation import Readings

__all__ = [
  "Lens",
  "Readings",
  "least_squares_lens",
  "lens_divergence",
  "lens_readings",
  "load_lens",
  "residual_streams",
  "save_lens",
]
