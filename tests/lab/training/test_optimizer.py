"""Optimisers have the stated rates and layouts, and leave frozen parameters as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.jitted import make_step
from vqjax import CodebookHead, DenseEmbedding, GroupedHead
from vqjax.lab.config import Experiment, Train, config_hash, override
from vqjax.lab.data import Windows
from vqjax.lab.training import SGD, NewRows, init_state, learning_rate, optimizer
from vqjax.lab.training.optimizer import combine, decayed, partition, trainable_mask
from vqjax.lab.training.program import Program, keys
from vqjax.lm.models import Transformer
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
def test_a_prefix_marks_the_parameters_below_it_and_combine_inverts_partition(prefixes, expected):
  trained, frozen = partition(PARAMS, prefixes)
  assert set(jax.tree.leaves(trained)) == expected
  assert set(jax.tree.leaves(frozen)) == {1, 2, 3, 4} - expected
  assert combine(trained, frozen) == PARAMS


@pytest.mark.parametrize(
  ("prefix", "similar"),
  [("head.codebok", "head.codebook"), ("hed", "head"), ("", "blocks"), ("zzz", "headline")],
)
def test_a_prefix_of_no_parameter_is_refused_with_similar_names(prefix, similar):
  with pytest.raises(ValueError, match=f"got '{prefix}'. Similar names are .*{similar}"):
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_frozen_parameters_cost_no_gradient():
  flops = {}
  for trainable in ((), ("blocks",), ("head.token_bias",)):
    on = Program(small(trainable=trainable), make_mesh(MeshShape(data=1)))
    compiled = on.step.lower(on.abstract_state, on.abstract_batch).compile()
    flops[trainable] = compiled.cost_analysis()["flops"]
  assert flops[("head.token_bias",)] < 0.6 * flops[()]
  assert flops[("blocks",)] < flops[()]


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


def test_weight_decay_leaves_biases_norms_scales_and_shifts_alone():
  model = small().model.clone(head=GroupedHead(13, 16, use_bias=True))
  state = jax.eval_shape(lambda: init_state(model, optax.sgd(1.0), jax.random.key(0)))
  flags = jax.tree_util.tree_flatten_with_path(decayed(state.params))[0]
  names = {("/".join(k.key for k in path)): flag for path, flag in flags}
  assert names["embedding/weight"]
  assert names["head/group_weight"]
  assert names["blocks/mlp_in/kernel"]
  spared = {name.split("/")[-1] for name, flag in names.items() if not flag}
  assert spared == {"bias", "scale", "shift", "group_bias", "slot_bias"}


RATES = {
  # Climbs, then falls along a cosine to its fraction.
  "cosine": (
    Train(steps=100, warmup=10, learning_rate=2.0, final_fraction=0.1),
    {0: 0, 5: 1, 10: 2, 55: 0.2 + 1.8 * 0.5, 100: 0.2},
  ),
  # Falls by its factor from `hold` on.
  "sgd": (
    Train(learning_rate=1.0, optimizer=SGD(hold=4, every=3, factor=0.5)),
    {0: 1, 3: 1, 4: 0.5, 6: 0.5, 7: 0.25, 9: 0.25, 10: 0.125},
  ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_learning_rate_is_that_of_its_schedule(name):
  train, expected = RATES[name]
  found = jax.jit(jax.vmap(learning_rate(train)))(np.array([*expected]))
  np.testing.assert_allclose(found, [*expected.values()], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 7])
def test_rates_without_warmup_or_decay_are_finite(warmup):
  rate = learning_rate(Train(steps=7, warmup=warmup))
  assert np.isfinite(jax.jit(jax.vmap(rate))(np.arange(8))).all()


def test_fields_outside_their_range_are_refused():
  for fields in ((-1, 1, 0.5), (0, 0, 0.5), (0, 1, 0.0), (0, 1, 1.5)):
    with pytest.raises(ValueError, match=r"SGD: .* got hold="):
      SGD(*fields)


def test_only_the_rows_of_new_tokens_change():
  draw = np.random.default_rng(0)
  params = {
    "embedding": {"weight": draw.normal(size=(7, 3)).astype(np.float32)},
    "head": {"weight": draw.normal(size=(7, 3)).astype(np.float32)},
    "final_norm": {"scale": draw.normal(size=3).astype(np.float32)},
  }
  train = Train(
    steps=5, warmup=0, trainable=("embedding", "head"), optimizer=NewRows(5), weight_decay=0.5
  )
  rule = optimizer(train)
  state, changed, update = jax.jit(rule.init)(params), params, jax.jit(rule.update)
  for _ in range(2):
    gradient = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), params)
    updates, state = update(gradient, state, changed)
    changed = optax.apply_updates(changed, updates)
  np.testing.assert_array_equal(changed["final_norm"]["scale"], params["final_norm"]["scale"])
  for name in ("embedding", "head"):
    before, after = params[name]["weight"], np.asarray(changed[name]["weight"])
    np.testing.assert_array_equal(after[:5], before[:5])
    assert (after[5:] != before[5:]).all()
  with pytest.raises(ValueError, match="`first` must be at least 1; got 0"):
    NewRows(0)
