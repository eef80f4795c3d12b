"""The recurrent translator: causal, equal in decoding and training, and able to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.lab.models.test_translator import EOS, NONE, D, T, V, reversed_pairs
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.models import RecurrentTranslator, translate
from vqjax.lab.training.step import make_step, state_maker


def translator(**options):
  fields = {"dim": D, "layers": 2, "context": T, "dropout": 0.0}
  return RecurrentTranslator(DenseEmbedding(V, D), DenseHead(V, D), **(fields | options))


@pytest.fixture
def inputs():
  source, target = jax.random.randint(jax.random.key(1), (2, 3, T), 1, V)
  source = source.at[1, 4:].set(NONE).at[2, 1:].set(NONE)
  return {"source": source, "target": target.at[:, 0].set(EOS).at[1, 5:].set(NONE)}


def initialised(model, inputs):
  return model.init(jax.random.key(0), inputs, inputs["target"], method="loss_terms")


def hidden(model, variables, inputs):
  return model.apply(variables, inputs, method="hidden_and_terms")[0]


@pytest.mark.slow
def test_a_position_of_the_target_depends_on_no_later_token(inputs):
  model = translator()
  variables = initialised(model, inputs)
  later = {**inputs, "target": inputs["target"].at[0, 4].set(9)}
  before, after = (hidden(model, variables, x)[0] for x in (inputs, later))
  np.testing.assert_array_equal(before[:4], after[:4])
  assert (np.asarray(before[4:]) != np.asarray(after[4:])).any(axis=-1).all()


@pytest.mark.slow
def test_padding_of_the_source_changes_nothing(inputs):
  model = translator()
  variables = initialised(model, inputs)
  short = {"source": inputs["source"][1:2, :4], "target": inputs["target"][1:2]}
  found = hidden(model, variables, inputs)[1, :5]
  np.testing.assert_allclose(found, hidden(model, variables, short)[0, :5], atol=1e-5)


@pytest.mark.slow
def test_decoding_step_by_step_gives_the_hidden_vectors_of_training(inputs):
  model = translator()
  variables = initialised(model, inputs)
  whole = hidden(model, variables, inputs)
  state = model.apply(variables, inputs["source"], 1, method="begin")
  for at in range(5):
    one, state = model.apply(variables, inputs["target"][:, at], state, method="step")
    np.testing.assert_allclose(one, whole[:, at], atol=1e-5)


@pytest.mark.slow
def test_every_variable_has_its_axes(inputs):
  model = translator(layers=3, target_embedding=DenseEmbedding(V, D))
  variables = initialised(model, inputs)
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(jnp.ndim, variables)


@pytest.mark.slow
def test_dropout_is_applied_in_training_only(inputs):
  model = translator(dropout=0.5)
  variables = initialised(model, inputs)
  drop = lambda seed: model.apply(
    variables, inputs, False, method="hidden_and_terms", rngs={"dropout": jax.random.key(seed)}
  )[0]
  assert np.abs(drop(1) - drop(2)).max() > 1e-4
  still = translator()
  np.testing.assert_array_equal(hidden(model, variables, inputs), hidden(still, variables, inputs))


@pytest.mark.slow
def test_it_learns_to_reverse_and_beam_search_finds_the_reversed_source():
  model = translator(dim=32).clone(embedding=DenseEmbedding(V, 32), head=DenseHead(V, 32))
  rule = optax.adam(5e-3)
  row = jax.ShapeDtypeStruct((32, T), jnp.int32)
  shapes = {"inputs": {"source": row, "target": row}, "targets": row}
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: 5e-3, jax.random.key(1))
  draw = np.random.default_rng(0)
  for _ in range(500):
    state, metrics = step(state, reversed_pairs(draw, 32))
  assert metrics["loss"] < 0.3
  batch = jax.tree.map(jnp.asarray, reversed_pairs(draw, 20))
  found = translate(model, state.variables, batch["inputs"]["source"], EOS, beams=3)
  wanted = np.where(batch["targets"] == EOS, NONE, batch["targets"])
  assert (np.asarray(found.tokens) == wanted).all(axis=1).mean() > 0.8


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"dim": 15}, "`dim` must be even, .*; got 15"),
    ({"layers": 0}, "`layers` must be at least 1; got 0"),
    ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
    ({"head": DenseHead(V, 8)}, "`head` must have the model's dim 16; got 8"),
  ],
)
def test_fields_that_do_not_fit_are_named(inputs, options, message):
  with pytest.raises(ValueError, match=message):
    initialised(translator().clone(**options), inputs)
