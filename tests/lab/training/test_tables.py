"""May a model keep tables of its own while it trains, and are the others left where they are?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vqjax import CodebookHead, DenseEmbedding
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Windows
from vqjax.lab.training import evaluate, init_state, make_scorer, make_step
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.program import Program, keys
from vqjax.models import Transformer
from vqjax.sharding import MeshShape, make_mesh


class Counting(CodebookHead):
  """Counts the passes of training, and the tokens in them, in the collection `counts`."""

  def setup(self):
    super().setup()
    self.passes = self.variable("counts", "passes", lambda: jnp.int32(0))
    self.seen = self.variable("counts", "seen", jnp.zeros, (self.vocab,))

  def loss_terms(self, hidden, tokens):
    if not self.is_initializing():
      self.passes.value += 1
      self.seen.value = self.seen.value.at[tokens].add(1.0)
    return super().loss_terms(hidden, tokens)

  def logical_axes(self):
    return super().logical_axes() | {"counts": {"passes": (), "seen": ("vocab",)}}


def model():
  head = Counting(16, 16, codes=8)
  fields = {"dim": 16, "layers": 1, "heads": 2, "context": 8}
  return Transformer(embedding=DenseEmbedding(16, 16), head=head, **fields)


def text():
  tokens = np.random.default_rng(0).integers(0, 16, (8, 9)).astype(np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_the_model_writes_passes_from_micro_batch_to_micro_batch_and_step_to_step(accumulate):
  state = init_state(model(), optax.sgd(0.1), jax.random.key(0))
  assert int(state.model_state["counts"]["head"]["passes"]) == 0
  codes = np.asarray(state.model_state["codes"]["head"]["assignment"])
  step = make_step(model(), optax.sgd(0.1), lambda _: 0.1, jax.random.key(1), accumulate)
  for _ in range(3):
    state, metrics = step(state, text())
  counts = state.model_state["counts"]["head"]
  assert int(counts["passes"]) == 3 * accumulate
  np.testing.assert_array_equal(
    counts["seen"], 3 * np.bincount(text()["targets"].ravel(), None, 16)
  )
  np.testing.assert_array_equal(state.model_state["codes"]["head"]["assignment"], codes)
  assert jnp.isfinite(metrics["loss"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_table_that_is_not_written_is_not_copied(accumulate):
  state = init_state(model(), optax.sgd(0.1), jax.random.key(0))
  where = state.model_state["codes"]["head"]["assignment"].unsafe_buffer_pointer()
  step = make_step(model(), optax.sgd(0.1), lambda _: 0.1, jax.random.key(1), accumulate)
  state, _ = step(state, text())
  assert state.model_state["codes"]["head"]["assignment"].unsafe_buffer_pointer() == where


def test_an_evaluation_writes_nothing():
  state = init_state(model(), optax.sgd(0.1), jax.random.key(0))
  before = jax.device_get(state.variables)
  score = evaluate(make_scorer(model()), state.variables, [text()], 100)
  assert score.tokens == 64
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.variables))


def test_tables_that_change_are_spread_over_a_mesh_and_saved(tmp_path):
  experiment = Experiment("counting", model(), None, None, Windows(), Train(batch=8, steps=2))
  on = Program(experiment, make_mesh(MeshShape(2, 2, 2)))
  state, _ = on.step(on.init(keys(0)[0]), on.place(text()))
  counts = state.model_state["counts"]["head"]
  assert int(counts["passes"]) == 1
  assert float(counts["seen"].sum()) == 64
  assert counts["seen"].addressable_shards[0].data.shape == (8,)
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(state, {})
  checkpoints.wait()
  found = checkpoints.restore(on.abstract_state).state.model_state
  checkpoints.close()
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state.model_state)
  )
