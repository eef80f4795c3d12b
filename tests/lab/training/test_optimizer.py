"""Do the optimisers that a config may name have the rates and the layouts that they say?"""

import dataclasses
import json

import numpy as np
import pytest

from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER, Train
from vqjax.lab.training import SM3, fit, learning_rate
from vqjax.sharding import MeshShape


def test_the_rate_of_sm3_climbs_with_the_square_of_the_step():
  rate = learning_rate(Train(learning_rate=0.3, warmup=10, optimizer=SM3()))
  found = [float(rate(step)) for step in (0, 4, 9, 10, 500)]
  np.testing.assert_allclose(found, [0.3 * 0.01, 0.3 * 0.25, 0.3, 0.3, 0.3], rtol=1e-6)


def test_a_momentum_that_is_none_is_refused():
  with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\); got 1.0"):
    SM3(momentum=1.0)


@pytest.mark.parametrize("mesh", [MeshShape(data=1), MeshShape(data=2, fsdp=2, model=2)])
def test_moments_of_rows_and_columns_learn_on_any_mesh(tmp_path, mesh):
  text = tiny.write_text(tmp_path / "text")
  settings = {"optimizer": SM3(), "learning_rate": 0.05, "warmup": 5, "clip": 1e6, "mesh": mesh}
  run = tiny.experiment(text, DenseHead(FROM_TOKENIZER, 16), **settings)
  result = fit(dataclasses.replace(run, name="sm3"), tmp_path / "run")
  assert result["status"] == "finished"
  rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
  losses = [row["loss"] for row in rows if "loss" in row]
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
