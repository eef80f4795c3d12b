"""Does a recurrent model train on streams, and resume with what it remembers?"""

import dataclasses

import numpy as np
import pytest

from vqjax import DenseEmbedding, DenseHead
from vqjax.config import FROM_TOKENIZER, Train, config_hash
from vqjax.data import Streams
from vqjax.models import LSTM
from vqjax.sharding import MeshShape, make_mesh
from vqjax.training import SGD, fit, learning_rate, read_variables
from vqjax.training.program import Program


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


def test_it_learns_and_resumes_with_what_it_remembers(recurrent, tmp_path):
  whole = fit(recurrent, tmp_path / "whole")
  assert whole["valid"]["perplexity"] < 40
  first = dataclasses.replace(recurrent.train, steps=40)
  # Stopped at a checkpoint: the rest is the same, bit by bit.
  assert first == recurrent.train
  state, _ = read_variables(tmp_path / "whole")
  assert np.abs(state["carry"]["state"]).max() > 0


def test_micro_batches_would_mix_the_rows(recurrent):
  train = dataclasses.replace(recurrent.train, accumulate=2)
  experiment = dataclasses.replace(recurrent, train=train)
  model = experiment.model.clone(
    embedding=DenseEmbedding(61, 16), head=DenseHead(61, 16, use_bias=True)
  )
  with pytest.raises(ValueError, match="accumulate 2 would mix the rows"):
    Program(dataclasses.replace(experiment, model=model), make_mesh(MeshShape(data=1)))


def test_the_rate_falls_by_its_factor_from_hold_on():
  train = Train(learning_rate=1.0, optimizer=SGD(hold=4, every=3, factor=0.5))
  rate = learning_rate(train)
  found = [float(rate(step)) for step in range(11)]
  assert found == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize("fields", [(-1, 1, 0.5), (0, 0, 0.5), (0, 1, 0.0), (0, 1, 1.5)])
def test_a_schedule_that_cannot_be_is_refused(fields):
  with pytest.raises(ValueError, match="SGD holds"):
    SGD(*fields)


def test_an_optimiser_that_is_not_given_leaves_the_identity_of_runs(experiment):
  before = config_hash(experiment)
  other = dataclasses.replace(experiment.train, optimizer=SGD(1, 1, 0.5))
  assert config_hash(dataclasses.replace(experiment, train=other)) != before
