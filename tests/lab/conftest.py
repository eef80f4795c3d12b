"""A trained decoder for the tests of the lab."""

import pytest

from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
  """(experiment, run folder, result) of a dense decoder; tests do not change the folder."""
  root = tmp_path_factory.mktemp("finished")
  made = tiny.experiment(tiny.write_text(root / "text"), DenseHead(FROM_TOKENIZER, 16))
  with tiny.own_cache(root / "cache"):
    return made, root / "run", fit(made, root / "run")
