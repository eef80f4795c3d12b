"""Models by their paths, for commands: pretrained ones, and those of run folders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax.numpy as jnp

from vqjax.commands.console import option
from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.checkpoints import Loaded
from vqjax.lm.texts import data_path

__all__ = ["load_model"]

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""Number formats in which pretrained models are loaded."""


def load_model(
  path: str,
  config: str | None = None,
  overrides: Sequence[str] = (),
  dtype: str = "float32",
  runtime: checkpoints.Runtime | None = None,
) -> Loaded:
  """A model with its tokenizer.

  Args:
    path: a pretrained model, here or under $VQJAX_DATA, or a run folder.
    config: config file of the run; None: the model is a pretrained one.
    overrides: the overrides of the run.
    dtype: number format of a pretrained model, one of `DTYPES`.
    runtime: form of the tables of a pretrained model in memory; None: that which its file names.

  Raises:
    FileNotFoundError: there is no such model, or it has no tokenizer.
    ValueError: a run folder has another config, or none is given for it.
  """
  folder = data_path(path, kind="model")
  if config is None:
    if (folder / "checkpoints").is_dir():
      raise ValueError(
        f"`--config` must be given for a run folder; got {path} alone. Its config.json describes"
        " the objects of the run, which only a Python file can make: give the config file that the"
        " run was started with, and its overrides."
      )
    if overrides:
      raise ValueError(
        f"FIELD=VALUE must be given with --config only; got {' '.join(overrides)} for the"
        f" pretrained model {path}. Leave it out."
      )
    loaded = checkpoints.load(folder, dtype=DTYPES[dtype], runtime=runtime)
    return Loaded(
      loaded.model, loaded.variables, loaded.tokenizer or tokenizers.load_tokenizer(folder)
    )
  # Not at the top: a pretrained model needs neither a trainer nor its libraries.
  from vqjax.lab.trained import load_run

  return load_run(folder, config, overrides)


PRETRAINED = "folder of safetensors, a GGUF, or a .bin file of llama2.c"
"""Help of an argument that is the path of a pretrained model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments that say which model a command reads."""
  parser.add_argument("model", help=f"{PRETRAINED}, or a run folder")
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="the overrides of a run folder"
  )
  option(parser, "--config", "config file of a run folder", metavar="FILE")
  option(
    parser, "--dtype", "number format of a pretrained model", default="float32", choices=DTYPES
  )
