"""Models of run folders, to generate and score text with."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

from vqjax.lab.config import config_hash, describe, difference, load, override, with_vocab
from vqjax.lab.conversion import Distilled, student_of
from vqjax.lab.data import Encoder, fit_encoder
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import read_config
from vqjax.lm.checkpoints import Loaded


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


def load_run(folder: pathlib.Path, config: str, overrides: Sequence[str] = ()) -> Loaded:
  """The model of a run folder, with its tokenizer.

  Args:
    folder: the run folder.
    config: config file of the run.
    overrides: the overrides of the run.

  Raises:
    ValueError: the folder has another config, or the data of the run are not text.
  """
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
  return Loaded(model, variables, Documents(encoder))
