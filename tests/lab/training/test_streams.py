"""Does a recurrent model train on streams, and resume with what it remembers?"""

import contextlib
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.config import FROM_TOKENIZER, Train, config_hash
from vqjax.lab.data import Streams
from vqjax.lab.models import LSTM
from vqjax.lab.training import SGD, Interrupted, fit, learning_rate, loop, read_variables
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


def test_it_learns_and_resumes_with_what_it_remembers(recurrent, tmp_path, monkeypatch):
  """A run that is stopped in the middle of its streams ends bit by bit as if it had not been."""
  train = dataclasses.replace(
    recurrent.train, optimizer=None, learning_rate=2e-2, steps=240, eval_every=240, save_every=60
  )
  recurrent = dataclasses.replace(recurrent, train=train)
  whole = fit(recurrent, tmp_path / "whole")
  assert whole["train"]["loss"] < 3.75  # the uniform distribution has 4
  with monkeypatch.context() as patch:
    patch.setattr(loop, "deferred_signals", stopping_after(13))
    with pytest.raises(Interrupted):
      fit(recurrent, tmp_path / "parts")
  resumed = fit(recurrent, tmp_path / "parts")
  assert resumed["test"] == whole["test"]
  states = [read_variables(tmp_path / name)[0] for name in ("whole", "parts")]
  jax.tree.map(np.testing.assert_array_equal, *states)
  assert np.abs(states[0]["carry"]["state"]).max() > 0


def test_plain_descent_is_run(recurrent, tmp_path):
  assert fit(recurrent, tmp_path / "run")["status"] == "finished"


def stopping_after(step):
  """A stand-in for the signal handler that asks to stop after so many steps."""
  calls = itertools.count(1)

  @contextlib.contextmanager
  def signals():
    yield lambda: 2 if next(calls) == step else None

  return signals


def test_micro_batches_would_mix_the_rows(recurrent):
  train = dataclasses.replace(recurrent.train, accumulate=2)
  experiment = dataclasses.replace(recurrent, train=train)
  model = experiment.model.clone(
    embedding=DenseEmbedding(61, 16), head=DenseHead(61, 16, use_bias=True)
  )
  with pytest.raises(ValueError, match=r"`train.accumulate` must be 1 .* got 2"):
    Program(dataclasses.replace(experiment, model=model), make_mesh(MeshShape(data=1)))


def test_the_rate_falls_by_its_factor_from_hold_on():
  train = Train(learning_rate=1.0, optimizer=SGD(hold=4, every=3, factor=0.5))
  rate = learning_rate(train)
  found = [float(rate(step)) for step in range(11)]
  assert found == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize("fields", [(-1, 1, 0.5), (0, 0, 0.5), (0, 1, 0.0), (0, 1, 1.5)])
def test_a_schedule_that_cannot_be_is_refused(fields):
  with pytest.raises(ValueError, match=r"SGD: .* got hold="):
    SGD(*fields)


def test_an_optimiser_that_is_not_given_leaves_the_identity_of_runs(experiment):
  before = config_hash(experiment)
  other = dataclasses.replace(experiment.train, optimizer=SGD(1, 1, 0.5))
  assert config_hash(dataclasses.replace(experiment, train=other)) != before
