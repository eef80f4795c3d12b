"""Experiments as objects: load, override, describe, identify and explain them.

Fiddle was considered and not used. Its `Config` is a mutable graph of constructor calls; overrides
through `absl_flags` are Python literals or calls of registered functions, which the annotations
of the fields do not check, and a config is built only after its overrides. Here an experiment is
the built objects themselves:

- `override` parses each text by the annotation of the field that it sets, and says what is wrong;
- `config_hash` covers values and class names, without module paths and fields at their defaults,
  so that moved code resumes its runs; Fiddle serialises import paths;
- a module that two others share stays one object through overrides, as with Fiddle's graphs.
"""

from vqjax.lab.config.experiment import (
  FROM_TOKENIZER,
  Experiment,
  Train,
  load_config,
  load_function,
  with_vocab,
)
from vqjax.lab.config.help import help_text
from vqjax.lab.config.identity import config_hash, describe, difference
from vqjax.lab.config.override import override, with_fields

__all__ = [
  "FROM_TOKENIZER",
  "Experiment",
  "Train",
  "config_hash",
  "describe",
  "difference",
  "help_text",
  "load_config",
  "load_function",
  "override",
  "with_fields",
  "with_vocab",
]
