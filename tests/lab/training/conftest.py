"""What do the tests of training train?"""

import pytest

from tests import tiny
from vqjax import CodebookHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit


@pytest.fixture
def text_folder(tmp_path):
  """A text that a test may change."""
  return tiny.write_text(tmp_path / "text")


def codebook_experiment(text):
  """Forty steps of a codebook decoder."""
  return tiny.experiment(text, CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True))


@pytest.fixture
def experiment(text_folder):
  """Forty steps of a codebook decoder on a text of the test's own."""
  return codebook_experiment(text_folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(experiment, run folder, result) of such a run at its end; nobody may change the folder."""
  root = tmp_path_factory.mktemp("finished")
  made = codebook_experiment(tiny.write_text(root / "text"))
  with tiny.own_cache(root / "cache"):
    return made, root / "run", fit(made, root / "run")
