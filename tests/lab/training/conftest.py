"""Experiments and runs for the tests of training."""

import pytest

from tests import tiny
from vqjax import CodebookHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit


@pytest.fixture
def text_folder(tmp_path):
  """Folder of a text that a test may change."""
  return tiny.write_text(tmp_path / "text")


def codebook_experiment(text):
  """Returns forty steps of a codebook decoder."""
  return tiny.experiment(text, CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True))


@pytest.fixture
def experiment(text_folder):
  """Forty steps of a codebook decoder, on a text that the test may change."""
  return codebook_experiment(text_folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(experiment, run folder, result) of a finished run; tests do not change the folder."""
  root = tmp_path_factory.mktemp("finished")
  made = codebook_experiment(tiny.write_text(root / "text"))
  with tiny.own_cache(root / "cache"):
    return made, root / "run", fit(made, root / "run")
