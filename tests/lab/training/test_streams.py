"""A recurrent model trains on streams, and resumes with its carry."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.studies.lstm import LSTM
from tests import tiny
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.data import Streams
from vqjax.lab.training import SGD, fit, read_run_variables
from vqjax.lab.training.program import Program
from vqjax.sharding import MeshShape, make_mesh


@pytest.fixture
def recurrent(experiment):
  model = LSTM(
    embedding=DenseEmbedding(FROM_TOKENIZER, 16),
    head=DenseHead(FROM_TOKENIZER, 16, use_bias=True),
    dim=16,
    context=8,
    dropout=0.1,
  )
  train = dataclasses.replace(
    experiment.train, optimizer=SGD(hold=10, every=5, factor=0.5), learning_rate=2.0
  )
  return dataclasses.replace(experiment, model=model, loader=Streams(), train=train)


@pytest.mark.slow
def test_a_recurrent_model_resumes_with_its_carry(recurrent, tmp_path):
  """A run that is stopped in the middle of its streams ends bitwise as if it had not been."""
  whole = fit(recurrent, tmp_path / "whole")
  tiny.fit_and_interrupt(recurrent, tmp_path / "parts", 13)
  resumed = fit(recurrent, tmp_path / "parts")
  assert resumed["test"] == whole["test"]
  states = [read_run_variables(tmp_path / name)[0] for name in ("whole", "parts")]
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert np.abs(states[0]["carry"]["state"]).max() > 0


def test_micro_batches_of_a_model_with_a_carry_are_refused(recurrent):
  train = dataclasses.replace(recurrent.train, accumulate=2)
  experiment = dataclasses.replace(recurrent, train=train)
  model = experiment.model.clone(
    embedding=DenseEmbedding(61, 16), head=DenseHead(61, 16, use_bias=True)
  )
  with pytest.raises(ValueError, match=r"`train.accumulate` must be 1 .* got 2"):
    Program(dataclasses.replace(experiment, model=model), make_mesh(MeshShape(data=1)))
