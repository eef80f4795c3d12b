"""Experiments and runs for the tests of training."""

import pytest

from tests import tiny
from tests.lab.training.launcher import Launcher
from vqjax import CodebookHead
from vqjax.lab.config import FROM_TOKENIZER


@pytest.fixture
def text_folder(tmp_path):
  """Folder of a text that a test may change."""
  return tiny.write_text(tmp_path / "text")


@pytest.fixture
def experiment(text_folder):
  """Forty steps of a codebook decoder, on a text that the test may change."""
  return tiny.experiment(text_folder, CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
  made = Launcher(tmp_path_factory.mktemp("processes"))
  with made.stack:
    yield made
