"""Does the encoder-decoder see what it may, decode as it trains, and learn to translate?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vqjax import CodebookHead, DenseEmbedding, DenseHead, DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.models import Translator, translate
from vqjax.lab.models.attention import sinusoids
from vqjax.lab.training.step import make_step, state_maker

V, D, T, EOS = 17, 16, 7, 0


def translator(**options):
  fields = {
    "embedding": DenseEmbedding(V, D),
    "head": DenseHead(V, D),
    "dim": D,
    "layers": 2,
    "heads": 2,
    "context": T,
    "hidden": 32,
  }
  return Translator(**(fields | options))


@pytest.fixture
def inputs():
  key = jax.random.key(1)
  source, target = jax.random.randint(key, (2, 3, T), 1, V)
  source = source.at[1, 4:].set(NONE).at[2, 1:].set(NONE)
  target = target.at[:, 0].set(EOS).at[1, 5:].set(NONE)
  return {"source": source, "target": target}


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
  changed = {**inputs, "source": inputs["source"].at[0, 6].set(3)}
  assert np.any(hidden(model, variables, changed)[0] != hidden(model, variables, inputs)[0])


def test_a_step_at_a_time_gives_the_hidden_vectors_of_training(inputs):
  model = translator()
  variables = initialised(model, inputs)
  whole = hidden(model, variables, inputs)
  state = model.apply(variables, inputs["source"], 1, method="begin")
  for at in range(5):
    one, state = model.apply(variables, inputs["target"][:, at], state, method="step")
    np.testing.assert_allclose(one, whole[:, at], atol=1e-5)


def test_the_target_may_have_an_embedding_of_its_own(inputs):
  shared, own = translator(), translator(target_embedding=DenseEmbedding(V, D))
  assert "target_embedding" not in initialised(shared, inputs)["params"]
  assert initialised(own, inputs)["params"]["target_embedding"]["weight"].shape == (V, D)


@pytest.mark.parametrize("options", [{}, {"target_embedding": DenseEmbedding(V, D)}])
def test_every_variable_has_its_axes(inputs, options):
  quantized = DPQEmbedding(V, D, SoftmaxQuantizer(4, 4, D))
  model = translator(embedding=quantized, head=CodebookHead(V, D, 5), **options)
  variables = initialised(model, inputs)
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(jnp.ndim, variables)


def test_it_learns_to_mirror_and_the_beam_says_it():
  """A tied quantised embedding, padded rows, label smoothing: what an experiment has."""
  embedding = DPQEmbedding(V, D, SoftmaxQuantizer(8, 4, D))
  model = translator(
    embedding=embedding, head=DenseHead(V, D, label_smoothing=0.05), heads=4, hidden=64
  )
  rule = optax.adam(3e-3)
  row = jax.ShapeDtypeStruct((32, T), jnp.int32)
  shapes = {"inputs": {"source": row, "target": row}, "targets": row}
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: 3e-3, jax.random.key(1))
  draw = np.random.default_rng(0)
  for _ in range(700):
    state, metrics = step(state, _mirrored(draw, 32))
  assert metrics["loss"] < 0.3
  batch = jax.tree.map(jnp.asarray, _mirrored(draw, 20))
  search = jax.jit(lambda v, source: translate(model, v, source, EOS, beams=3))
  found = search(state.variables, batch["inputs"]["source"])
  wanted = np.where(batch["targets"] == EOS, NONE, batch["targets"])
  assert (np.asarray(found.tokens) == wanted).all(axis=1).mean() > 0.8
  # Its log-probability is that of the whole sequence, with the end.
  log_prob = model.apply(state.variables, batch["inputs"], batch["targets"], method="log_prob")
  total = np.where(batch["targets"] >= 0, log_prob, 0).sum(axis=1)
  same = (np.asarray(found.tokens) == wanted).all(axis=1)
  np.testing.assert_allclose(found.log_prob[same], total[same], atol=1e-3)


def _mirrored(draw, rows):
  source = np.full((rows, T), NONE, np.int32)
  target, targets = source.copy(), source.copy()
  for row in range(rows):
    words = draw.integers(1, V, draw.integers(1, 4))
    n = len(words)
    source[row, : n + 1] = [*words, EOS]
    targets[row, : n + 1] = [*words[::-1], EOS]
    target[row, : n + 1] = [EOS, *words[::-1]]
  return {"inputs": {"source": source, "target": target}, "targets": targets}


def test_positions_are_those_of_the_paper():
  found = sinusoids(5, 6)
  np.testing.assert_allclose(found[3, 0], np.sin(3.0), rtol=1e-6)
  np.testing.assert_allclose(found[3, 5], np.cos(3.0 / 10_000), rtol=1e-6)
  assert sinusoids(4, 5).shape == (4, 5)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"heads": 3}, "heads 3 do not divide dim 16"),
    ({"layers": 0}, "layers 0"),
    ({"dropout": 1.0}, r"dropout 1.0 is outside \[0, 1\)"),
    ({"context": 3}, "tokens in a model of context 3"),
    ({"heads": 0}, "heads 0 do not divide"),
    ({"head": DenseHead(V, 8)}, "head has dim 8 in a model of dim 16"),
    ({"target_embedding": DenseEmbedding(V, 8)}, "target_embedding has dim 8"),
  ],
)
def test_what_does_not_fit_is_named(inputs, options, said):
  with pytest.raises(ValueError, match=said):
    initialised(translator(**options), inputs)
