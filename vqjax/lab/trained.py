"""Models of run folders, to generate and score text with."""

from __future__ import annotations

import pathlib

from vqjax.lab.config import Experiment, config_hash, describe, difference, with_vocab
from vqjax.lab.data import fit_tokenizer
from vqjax.lab.run_files import read_config
from vqjax.lab.starting_points import Distilled, student_of
from vqjax.lab.training import read_run_variables
from vqjax.lm.checkpoints import Loaded

__all__ = []


def load_run(folder: pathlib.Path, experiment: Experiment) -> Loaded:
  """The model of a run folder, with its tokenizer.

  Args:
    folder: the run folder.
    experiment: the experiment of the run.

  Raises:
    ValueError: the folder has another config, or the data of the run are not text.
  """
  variables, _ = read_run_variables(folder)
  theirs = read_config(folder)
  if theirs is not None and theirs["hash"] != config_hash(experiment):
    lines = "\n  ".join(difference(describe(experiment), theirs["config"]))
    raise ValueError(
      f"{folder} belongs to another config:\n  {lines}\nGive the config file and the overrides of"
      " the run."
    )
  if experiment.tokenizer is None:
    raise ValueError(
      f"`model` must be the run of a language model; got {folder}, whose data are not text. Give"
      " another."
    )
  tokenizer = fit_tokenizer(experiment.data, experiment.tokenizer)
  model = with_vocab(experiment, tokenizer.vocab).model
  if isinstance(model, Distilled):
    model, variables = model.student, student_of(variables)
  return Loaded(model, variables, tokenizer)
