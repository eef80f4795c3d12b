"""How well does a trained model write, in the opinion of a judge?"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from experiments.studies.grouped import stories
from experiments.studies.grouped.judge import Judge, mean_grades
from vqjax.lab.config import Experiment
from vqjax.lab.conversion import Distilled
from vqjax.lab.conversion.starts import student_of
from vqjax.lab.data import fit_encoder
from vqjax.lab.training import read_variables
from vqjax.lab.training.run import load_text


@dataclasses.dataclass(frozen=True)
class Sheet:
  """What is graded.

  Attributes:
    stories: how many.
    tokens: most tokens of one.
    temperature: of the drawing.
  """

  stories: int = 30
  tokens: int = 200
  temperature: float = 1.0


def asked(sheet: Sheet, judge: Judge) -> dict[str, Any]:
  """What a grade depends on beside the model, as JSON has it."""
  return dataclasses.asdict(sheet) | {"model": judge.model}


def graded(
  experiment: Experiment, folder: pathlib.Path, asked: Mapping[str, Any], judge: Judge
) -> dict[str, Any]:
  """The model goes on with test stories from their middle, and the judge grades what it writes."""
  encoder = fit_encoder(experiment.data, experiment.tokenizer)
  model, variables = trained_model(experiment, folder)
  prompts = stories.beginnings(experiment.data.documents("test"), encoder, asked["stories"])
  key = jax.random.key(0)
  how = {"tokens": asked["tokens"], "temperature": asked["temperature"], "eos": encoder.eos}
  written = stories.write(model, variables, prompts, key, **how)
  texts = stories.texts(encoder, prompts, written)
  return {"result": {}, **mean_grades(judge, texts), "first": texts[0]}


def trained_model(experiment: Experiment, folder: pathlib.Path) -> tuple[nn.Module, dict[str, Any]]:
  """A run's model with its variables; of a distilled one the student."""
  model = load_text(experiment).experiment.model
  variables = read_variables(folder)[0]
  return (model.student if isinstance(model, Distilled) else model), student_of(variables)
