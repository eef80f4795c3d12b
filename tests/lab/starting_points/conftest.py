"""The dense decoder that the tests of this folder convert."""

import dataclasses

import pytest


@pytest.fixture
def dense(finished):
  """A dense experiment and the folder of its finished run."""
  return finished[:2]


@pytest.fixture
def short(dense):
  """The settings of a fine-tuning of two steps."""
  return dataclasses.replace(dense[0].train, steps=2, warmup=1, eval_every=2, save_every=2)
