"""A tiny dense decoder, trained for some steps, that the tests of this folder convert."""

import dataclasses

import pytest

from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
  """A dense experiment and the folder of its finished run."""
  root = tmp_path_factory.mktemp("dense")
  made = tiny.experiment(
    tiny.write_text(root / "text"),
    DenseHead(FROM_TOKENIZER, 16),
    dropout=0.0,
    log_every=10,
    eval_every=40,
    save_every=40,
  )
  made = dataclasses.replace(made, name="dense")
  with tiny.own_cache(root / "cache"):
    fit(made, root / "run")
  return made, root / "run"


@pytest.fixture
def short(dense):
  """The settings of a fine-tuning of two steps."""
  return dataclasses.replace(dense[0].train, steps=2, warmup=1, eval_every=2, save_every=2)
