"""Models by their paths, for commands: pretrained ones, and those of run folders."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from vqjax.commands.console import option
from vqjax.lm import checkpoints, tokenizers
from vqjax.lm.checkpoints import Loaded
from vqjax.lm.texts import data_path

__all__ = ["add_arguments", "chosen_model", "load_model"]

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""Number formats in which pretrained models are loaded."""


def load_model(
  path: str,
  config: str | None = None,
  overrides: Sequence[str] = (),
  dtype: str = "float32",
  runtime: checkpoints.Runtime | None = None,
  memory_tables: Mapping[int, str] | None = None,
) -> Loaded:
  """A model with its tokenizer.

  Args:
    path: a pretrained model, here or under $VQJAX_DATA, or a run folder.
    config: config or study file of the run; None: the one that the run names, if it is a run.
    overrides: the overrides of the run.
    dtype: number format of a pretrained model, one of `DTYPES`.
    runtime: form of the tables of a pretrained model in memory; None: that which its file names.
    memory_tables: files of the tables of a pretrained model's memories of n-grams, by their blocks.

  Raises:
    FileNotFoundError: there is no such model, or it has no tokenizer.
    ValueError: a run folder has another config, or none is known for it.
  """
  folder = data_path(path, kind="model")
  if memory_tables and (config is not None or (folder / "checkpoints").is_dir()):
    raise ValueError(
      f"`--memory-table` must be given for a pretrained model; got it for the run {path}. Leave it"
      " out."
    )
  if config is None:
    if overrides:
      raise ValueError(
        f"FIELD=VALUE must be given with --config only; got {' '.join(overrides)} for {path}."
        " Leave it out."
      )
    if (folder / "checkpoints").is_dir():
      from vqjax.lab.trained import load_run

      return load_run(folder, _experiment_of_run(folder))
    loaded = checkpoints.load(
      folder, dtype=DTYPES[dtype], runtime=runtime, memory_tables=memory_tables
    )
    return Loaded(
      loaded.model, loaded.variables, loaded.tokenizer or tokenizers.load_tokenizer(folder)
    )
  # Not at the top: a pretrained model needs neither a trainer nor its libraries.
  from vqjax.lab.trained import load_run

  return load_run(folder, _experiment_of_run(folder, config, overrides))


def _experiment_of_run(
  folder: pathlib.Path, given: str | None = None, overrides: Sequence[str] = ()
) -> Any:
  """The experiment of a run folder, made again from a given file or the one it names."""
  from vqjax.lab.config import load_config, override, with_fields
  from vqjax.lab.run_files import read_config

  source = (read_config(folder) or {}).get("source") or {}
  if given and ("study" not in source or overrides):
    return override(load_config(given), list(overrides))
  file = given or source.get("study") or source.get("config")
  if file is None or not pathlib.Path(file).is_file():
    lost = "names no file" if file is None else f"names {file}, which is gone"
    raise ValueError(
      f"`--config` must be given for a run whose config.json {lost}; got {folder} alone. Only a"
      " Python file can make the objects of a run: give the config or study file that it was"
      " started with, and the overrides of a config."
    )
  if "config" in source:
    return override(load_config(file), source["overrides"])
  from vqjax.lab.study.declaration import Run, load_study

  study = load_study(file, source.get("function", "study"))
  runs, seed, scale = source["runs"], source["seed"], Fraction(source["scale"])
  tuned = lambda row, scale=Fraction(1): with_fields(
    study.experiment(row, seed, scale, run), runs[row]["fields"]
  )
  # Older runs name a folder in place of an identity, which is part of theirs.
  start = lambda of: of["folder"] if "folder" in of else of["identity"]
  run = functools.cache(lambda row: Run.of(tuned(row), start(runs[row])))
  return tuned(source["row"], scale)


PRETRAINED = "folder of safetensors, a GGUF, or a .bin file of llama2.c"
"""Help of an argument that is the path of a pretrained model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments that say which model a command reads."""
  parser.add_argument("model", help=f"{PRETRAINED}, or a run folder")
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="the overrides of a run folder"
  )
  text = "config or study file of a run folder, where it has moved"
  option(parser, "--config", text, metavar="FILE")
  option(
    parser, "--dtype", "number format of a pretrained model", default="float32", choices=DTYPES
  )
  option(
    parser,
    "--memory-table",
    "compressed table of n-grams in place of a block's own; blocks count from 0",
    _block_and_file,
    [],
    action="append",
    metavar="BLOCK=FILE",
  )


def _block_and_file(text: str) -> tuple[int, str]:
  block, _, file = text.partition("=")
  if not block.isdecimal() or not file:
    raise argparse.ArgumentTypeError(f"it must be BLOCK=FILE; got {text}. Give 1=table.safetensors")
  return int(block), file


def chosen_model(options: argparse.Namespace) -> Loaded:
  """The model of a command that has the arguments of `add_arguments`; see `load_model`."""
  return load_model(
    options.model,
    options.config,
    options.overrides,
    options.dtype,
    memory_tables=dict(options.memory_table),
  )
