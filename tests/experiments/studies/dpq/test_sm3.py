"""SM3: its rate, its range, and a run on a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.studies.dpq.sm3 import SM3
from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER, Train
from vqjax.lab.training import fit, learning_rate
from vqjax.sharding import MeshShape


def test_the_rate_climbs_with_the_square_of_the_step():
  train = Train(learning_rate=0.3, warmup=10, optimizer=SM3())
  expected = {0: 0.3 * 0.01, 4: 0.3 * 0.25, 9: 0.3, 10: 0.3, 500: 0.3}
  found = jax.jit(jax.vmap(learning_rate(train)))(np.array([*expected]))
  np.testing.assert_allclose(found, [*expected.values()], rtol=1e-6)


def test_a_momentum_outside_its_range_is_refused():
  with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\); got 1.0"):
    SM3(momentum=1.0)


@pytest.mark.slow
def test_moments_of_rows_and_columns_learn_on_a_mesh(tmp_path):
  mesh = MeshShape(data=2, fsdp=2, model=2)
  text = tiny.write_text(tmp_path / "text")
  settings = {"optimizer": SM3(), "learning_rate": 0.05, "warmup": 5, "clip": 1e6, "mesh": mesh}
  run = tiny.experiment(text, DenseHead(FROM_TOKENIZER, 16), **settings)
  result = fit(dataclasses.replace(run, name="sm3"), tmp_path / "run")
  assert result["status"] == "finished"
  losses = [row["loss"] for row in tiny.rows(tmp_path / "run") if "loss" in row]
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
