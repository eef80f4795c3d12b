"""Models that people have: read from safetensors, GGUF and llama2.c, and written for others."""

from vqjax.lm.checkpoints.inspection import Inspection, inspect
from vqjax.lm.checkpoints.loading import Loaded, decoder, load, read_variables, save
from vqjax.lm.checkpoints.runtime import RUNTIMES, Runtime

__all__ = [
  "RUNTIMES",
  "Inspection",
  "Loaded",
  "Runtime",
  "decoder",
  "inspect",
  "load",
  "read_variables",
  "save",
]
