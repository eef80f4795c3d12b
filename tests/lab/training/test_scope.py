"""Does a run train the parameters that it names, and leave all others exactly as they are?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vqjax import CodebookHead, DenseEmbedding
from vqjax.lab.config import Experiment, Train, config_hash, override
from vqjax.lab.data import Windows
from vqjax.lab.training import init_state, make_step, optimizer
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.optimizer import combine, partition, trainable_mask
from vqjax.lab.training.program import Program, keys
from vqjax.models import Transformer
from vqjax.sharding import MeshShape, make_mesh

PARAMS = {"head": {"codebook": 1, "token_bias": 2}, "headline": 3, "blocks": {"mlp": {"kernel": 4}}}


@pytest.mark.parametrize(
  ("prefixes", "expected"),
  [
    ((), {1, 2, 3, 4}),
    (("head",), {1, 2}),
    (("head.codebook",), {1}),
    (("head.token_bias", "blocks.mlp"), {2, 4}),
    (("head", "head.codebook"), {1, 2}),
  ],
)
def test_a_prefix_marks_what_is_below_it_and_split_and_joined_are_inverse(prefixes, expected):
  own, others = partition(PARAMS, prefixes)
  assert set(jax.tree.leaves(own)) == expected
  assert set(jax.tree.leaves(others)) == {1, 2, 3, 4} - expected
  assert combine(own, others) == PARAMS


@pytest.mark.parametrize(
  ("prefix", "near"),
  [("head.codebok", "head.codebook"), ("hed", "head"), ("", "blocks"), ("zzz", "headline")],
)
def test_a_prefix_of_no_parameter_names_the_near_ones(prefix, near):
  with pytest.raises(ValueError, match=f"got '{prefix}'. Similar names are .*{near}"):
    trainable_mask(PARAMS, ("head", prefix))


def small(**train):
  model = Transformer(
    embedding=DenseEmbedding(13, 16),
    head=CodebookHead(13, 16, codes=8, token_bias=True),
    dim=16,
    layers=1,
    heads=2,
    context=8,
  )
  settings = {"batch": 8, "steps": 10, "warmup": 0} | train
  return Experiment("small", model, None, None, Windows(), Train(**settings))


def text():
  tokens = np.random.default_rng(0).integers(0, 13, (8, 9)).astype(np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def changed(before, after):
  differ = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
  return {".".join(k.key for k in path) for path, d in jax.tree.leaves_with_path(differ) if d}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_the_named_parameters_change_and_only_they_have_moments(accumulate):
  on = Program(
    small(trainable=("head", "final_norm"), accumulate=accumulate), make_mesh(MeshShape(data=1))
  )
  state = on.init(keys(0)[0])
  before = jax.device_get(state.params)
  for _ in range(3):
    state, _ = on.step(state, on.place(text()))
  named = {"head.codebook", "head.token_bias", "final_norm.scale", "final_norm.bias"}
  assert changed(before, jax.device_get(state.params)) == named
  arrays = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sum(x.size for x in arrays) == 2 * (8 * 16 + 13 + 16 + 16)


def test_the_norm_and_the_clipping_are_of_the_trained_gradient_alone():
  experiment = small(trainable=("head",), clip=1e-3, weight_decay=0.0)
  batch = jax.tree.map(jnp.asarray, text())
  model, key = experiment.model, jax.random.key(0)
  transform = optimizer(experiment.train)
  state = init_state(model, transform, key)

  def loss(params):
    variables = {"params": params, **state.model_state}
    return -model.apply(variables, *batch.values(), method="log_prob").mean()

  whole = jax.grad(loss)(state.params)
  expected = jax.device_get(optax.tree.norm(whole["head"]))
  assert expected < 0.9 * optax.tree.norm(whole)
  step = make_step(model, transform, lambda _: 1.0, key, 1, experiment.train.trainable)
  after, metrics = step(state, batch)
  np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-6)
  moments = optax.tree.get(after.opt_state, "mu")["head"]
  np.testing.assert_allclose(optax.tree.norm(moments), 0.1 * 1e-3, rtol=1e-5)


def test_frozen_tables_get_no_gradient_at_all():
  flops = {}
  for trained in ((), ("blocks",), ("head.token_bias",)):
    on = Program(small(trainable=trained), make_mesh(MeshShape(data=1)))
    compiled = on.step.lower(on.abstract_state, on.abstract_batch).compile()
    flops[trained] = compiled.cost_analysis()["flops"]
  assert flops[("head.token_bias",)] < 0.6 * flops[()]
  assert flops[("blocks",)] < flops[()]


def test_training_a_part_on_a_mesh_is_saved_and_restored_with_its_shardings(tmp_path):
  experiment = small(trainable=("head.codebook", "embedding"))
  on = Program(experiment, make_mesh(MeshShape(2, 2, 2)))
  state, _ = on.step(on.init(keys(0)[0]), on.place(text()))
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(state, {})
  checkpoints.wait()
  found = checkpoints.restore(on.abstract_state).state
  checkpoints.close()
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state))
  assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, found, on.abstract_state))


def test_an_unknown_parameter_is_refused_before_anything_is_made():
  with pytest.raises(ValueError, match=r"train\.trainable` .*'head\.codebok'.*head\.codebook"):
    Program(small(trainable=("head.codebok",)), make_mesh(MeshShape(data=1)))


def test_the_command_line_sets_what_is_trained():
  experiment = small()
  found = override(experiment, ["train.trainable=(head, final_norm)"])
  assert found.train.trainable == ("head", "final_norm")
  assert override(experiment, ["train.trainable=head"]).train.trainable == ("head",)
  assert override(found, ["train.trainable=()"]) == experiment
  assert config_hash(found) != config_hash(experiment)
