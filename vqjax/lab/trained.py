"""Models by their paths: pretrained ones, and those of run folders."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from vqjax.lab.config import config_hash, describe, difference, load, override, with_vocab
from vqjax.lab.conversion import Distilled, student_of
from vqjax.lab.data import Encoder, fit_encoder
from vqjax.lab.data.files import data_path
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import read_config
from vqjax.lm import checkpoints
from vqjax.lm.generation import Tokenizer
from vqjax.lm.generation.cache import Variables
from vqjax.lm.models import LanguageModel

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""Number formats in which pretrained models are loaded."""


class Trained(NamedTuple):
  """A model that generates and scores text."""

  model: LanguageModel
  variables: Variables
  tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Documents:
  """The encoder of a run as a tokenizer; a text follows the end of another, as in training.

  Attributes:
    encoder: the encoder.
  """

  encoder: Encoder

  @property
  def vocab(self) -> int:
    """Number of tokens."""
    return self.encoder.vocab

  @property
  def eos(self) -> tuple[int, ...]:
    """The token that ends a document."""
    return (self.encoder.eos,)

  def encode(self, text: str) -> list[int]:
    """The end of a document, and the tokens of the text without an end."""
    return [self.encoder.eos, *self.encoder.encode(text).tolist()[:-1]]

  def decode(self, tokens: Iterable[int]) -> str:
    """The text of tokens."""
    return self.encoder.decode([token for token in tokens if token != self.encoder.eos])

  def piece(self, token: int) -> str:
    """The text of a token; the end of a document has a name."""
    return "<end>" if token == self.encoder.eos else self.decode([token])


def token_text(tokenizer: Any, token: int) -> str:
  """The text of one token with its spaces, or its name or number where it has none."""
  if not 0 <= token < tokenizer.vocab:
    return f"[{token}]"
  # Between two copies of itself, because tokenizers drop the space before a first token.
  whole, alone = tokenizer.decode([token, token]), tokenizer.decode([token])
  return whole[len(alone) :] or tokenizer.piece(token) or f"[{token}]"


def visible(text: str) -> str:
  """The text in one line, each character of which can be seen."""
  shown = text if text.strip(" ") else text.replace(" ", "␣")
  shown = shown.replace("\n", "⏎").replace("\t", "⇥")
  return "".join(
    char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
  )


def load_trained(
  path: str,
  config: str | None = None,
  overrides: Sequence[str] = (),
  dtype: str = "float32",
  runtime: checkpoints.Runtime | None = None,
) -> Trained:
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
    return Trained(
      loaded.model, loaded.variables, loaded.tokenizer or checkpoints.load_tokenizer(folder)
    )
  return _of_run(folder, config, overrides)


def _of_run(folder: pathlib.Path, config: str, overrides: Sequence[str]) -> Trained:
  experiment = override(load(config), list(overrides))
  variables, _ = read_variables(folder)
  theirs = read_config(folder)
  if theirs is not None and theirs["hash"] != config_hash(experiment):
    lines = "\n  ".join(difference(describe(experiment), theirs["config"]))
    raise ValueError(
      f"{folder} belongs to another config:\n  {lines}\nGive the config file and the overrides of"
      " the run."
    )
  if experiment.tokenizer is None:
    raise ValueError(
      f"`--config` must be that of a language model; got {config}, whose data are not text. Give"
      " another run."
    )
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  model = with_vocab(experiment, encoder.vocab).model
  if isinstance(model, Distilled):
    model, variables = model.student, student_of(variables)
  return Trained(model, variables, Documents(encoder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments that say which model a command reads."""
  parser.add_argument(
    "model", help="folder of safetensors, a GGUF, a .bin file of llama2.c, or a run folder"
  )
  parser.add_argument(
    "overrides", nargs="*", metavar="FIELD=VALUE", help="the overrides of a run folder"
  )
  parser.add_argument("--config", metavar="FILE", help="config file of a run folder")
  parser.add_argument(
    "--dtype",
    choices=DTYPES,
    default="float32",
    help="number format of a pretrained model (default: %(default)s)",
  )
  parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
