"""Drafters for speculative decoding: their blocks, files and training."""

from vqjax.lm.drafting.eagle import Eagle, load_eagle, save_eagle
from vqjax.lm.drafting.medusa import (
  Medusa,
  MedusaBlocks,
  load_drafter,
  load_medusa,
  medusa_loss,
  medusa_ranks,
  save_medusa,
)

__all__ = [
  "Eagle",
  "Medusa",
  "MedusaBlocks",
  "load_drafter",
  "load_eagle",
  "load_medusa",
  "medusa_loss",
  "medusa_ranks",
  "save_eagle",
  "save_medusa",
]
