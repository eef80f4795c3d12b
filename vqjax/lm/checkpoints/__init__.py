"""Models that people have: read from safetensors, GGUF and llama2.c, and written for others."""

from vqjax.lm.checkpoints.inspection import Inspection, inspect
from vqjax.lm.checkpoints.loading import Loaded, decoder, load, read_variables, save
from vqjax.lm.checkpoints.memories import Memory, load_memories
from vqjax.lm.checkpoints.resizing import (
  NewRow,
  mean_of_all,
  mean_of_parts,
  mean_of_parts_at_length,
  resize,
  sampled,
)
from vqjax.lm.checkpoints.runtime import RUNTIMES, Runtime

__all__ = [
  "RUNTIMES",
  "Inspection",
  "Loaded",
  "Memory",
  "NewRow",
  "Runtime",
  "decoder",
  "inspect",
  "load",
  "load_memories",
  "mean_of_all",
  "mean_of_parts",
  "mean_of_parts_at_length",
  "read_variables",
  "resize",
  "sampled",
  "save",
]
