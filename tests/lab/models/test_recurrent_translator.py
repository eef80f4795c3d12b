"""Does the recurrent encoder-decoder read what it may, decode as it trains, and learn?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.lab.models.test_translator import EOS, NONE, D, T, V, _mirrored
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


def test_a_target_sees_the_tokens_before_it_and_none_after(inputs):
  model = translator()
  variables = initialised(model, inputs)
  later = {**inputs, "target": inputs["target"].at[0, 4].set(9)}
  before, after = (hidden(model, variables, x)[0] for x in (inputs, later))
  np.testing.assert_array_equal(before[:4], after[:4])
  assert (np.asarray(before[4:]) != np.asarray(after[4:])).any(axis=-1).all()


def test_padding_of_the_source_is_not_seen(inputs):
  model = translator()
  variables = initialised(model, inputs)
  short = {"source": inputs["source"][1:2, :4], "target": inputs["target"][1:2]}
  found = hidden(model, variables, inputs)[1, :5]
  np.testing.assert_allclose(found, hidden(model, variables, short)[0, :5], atol=1e-5)


def test_a_step_at_a_time_gives_the_hidden_vectors_of_training(inputs):
  model = translator()
  variables = initialised(model, inputs)
  whole = hidden(model, variables, inputs)
  state = model.apply(variables, inputs["source"], 1, method="begin")
  for at in range(5):
    one, state = model.apply(variables, inputs["target"][:, at], state, method="step")
    np.testing.assert_allclose(one, whole[:, at], atol=1e-5)


def test_every_variable_has_its_axes(inputs):
  model = translator(layers=3, target_embedding=DenseEmbedding(V, D))
  variables = initialised(model, inputs)
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(jnp.ndim, variables)


def test_inputs_of_layers_are_dropped_in_training_alone(inputs):
  model = translator(dropout=0.5)
  variables = initialised(model, inputs)
  drop = lambda seed: model.apply(
    variables, inputs, False, method="hidden_and_terms", rngs={"dropout": jax.random.key(seed)}
  )[0]
  assert np.abs(drop(1) - drop(2)).max() > 1e-4
  still = translator()
  np.testing.assert_array_equal(hidden(model, variables, inputs), hidden(still, variables, inputs))


def test_it_learns_to_mirror_and_the_beam_says_it():
  model = translator(dim=32).clone(embedding=DenseEmbedding(V, 32), head=DenseHead(V, 32))
  rule = optax.adam(5e-3)
  row = jax.ShapeDtypeStruct((32, T), jnp.int32)
  shapes = {"inputs": {"source": row, "target": row}, "targets": row}
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: 5e-3, jax.random.key(1))
  draw = np.random.default_rng(0)
  for _ in range(500):
    state, metrics = step(state, _mirrored(draw, 32))
  assert metrics["loss"] < 0.3
  batch = jax.tree.map(jnp.asarray, _mirrored(draw, 20))
  found = translate(model, state.variables, batch["inputs"]["source"], EOS, beams=3)
  wanted = np.where(batch["targets"] == EOS, NONE, batch["targets"])
  assert (np.asarray(found.tokens) == wanted).all(axis=1).mean() > 0.8


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"dim": 15}, "dim 15 must be even"),
    ({"layers": 0}, "layers 0"),
    ({"dropout": 1.0}, r"dropout 1.0 is outside \[0, 1\)"),
    ({"head": DenseHead(V, 8)}, "head has dim 8 in a model of dim 16"),
  ],
)
def test_what_does_not_fit_is_named(inputs, options, said):
  with pytest.raises(ValueError, match=said):
    initialised(translator().clone(**options), inputs)
