"""The translators: causal, equal in decoding and training, and able to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.studies.dpq.models import RecurrentTranslator, Translator, translate
from experiments.studies.dpq.models.attention import sinusoids
from tests.jitted import apply, init, make_step
from vqjax import CodebookHead, DenseEmbedding, DenseHead, DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.training.step import state_maker

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


def recurrent(**options):
  fields = {"dim": D, "layers": 2, "context": T, "dropout": 0.0}
  fields |= {"embedding": DenseEmbedding(V, D), "head": DenseHead(V, D)}
  return RecurrentTranslator(**(fields | options))


both = pytest.mark.parametrize("translator", [translator, recurrent])


@pytest.fixture
def inputs():
  source, target = np.random.default_rng(1).integers(1, V, (2, 3, T)).astype(np.int32)
  source[1, 4:] = source[2, 1:] = target[1, 5:] = NONE
  target[:, 0] = EOS
  return {"source": source, "target": target}


def initialised(model, inputs):
  return init(model, jax.random.key(0), inputs, inputs["target"], method="loss_terms")


def hidden(model, variables, inputs):
  return apply(model, variables, inputs, method="hidden_and_terms")[0]


@pytest.mark.slow
@both
def test_a_position_of_the_target_depends_on_no_later_token(inputs, translator):
  model = translator()
  variables = initialised(model, inputs)
  later = {**inputs, "target": inputs["target"].copy()}
  later["target"][0, 4] = 9
  before, after = (hidden(model, variables, x)[0] for x in (inputs, later))
  np.testing.assert_array_equal(before[:4], after[:4])
  assert (np.asarray(before[4:]) != np.asarray(after[4:])).any(axis=-1).all()


@pytest.mark.slow
@both
def test_padding_of_the_source_changes_nothing(inputs, translator):
  model = translator()
  variables = initialised(model, inputs)
  short = {"source": inputs["source"][1:2, :4], "target": inputs["target"][1:2]}
  found = hidden(model, variables, inputs)[1, :5]
  np.testing.assert_allclose(found, hidden(model, variables, short)[0, :5], atol=1e-5)
  changed = {**inputs, "source": inputs["source"].copy()}
  changed["source"][0, 6] = 3
  assert np.any(hidden(model, variables, changed)[0] != hidden(model, variables, inputs)[0])


@pytest.mark.slow
@both
def test_decoding_step_by_step_gives_the_hidden_vectors_of_training(inputs, translator):
  model = translator()
  variables = initialised(model, inputs)
  whole = hidden(model, variables, inputs)
  state = jax.jit(lambda v, s: model.apply(v, s, 1, method="begin"))(variables, inputs["source"])
  for at in range(5):
    one, state = apply(model, variables, inputs["target"][:, at], state, method="step")
    np.testing.assert_allclose(one, whole[:, at], atol=1e-5)


@both
@pytest.mark.parametrize("options", [{}, {"target_embedding": DenseEmbedding(V, D)}])
def test_every_variable_has_its_axes(inputs, translator, options):
  quantized = DPQEmbedding(V, D, SoftmaxQuantizer(4, 4, D))
  model = translator(layers=3, **options).clone(embedding=quantized, head=CodebookHead(V, D, 5))
  variables = jax.eval_shape(lambda: initialised(model, inputs))
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(lambda x: x.ndim, variables)


@pytest.mark.slow
def test_dropout_of_the_recurrent_translator_is_applied_in_training_only(inputs):
  model = recurrent(dropout=0.5)
  variables = initialised(model, inputs)
  drop = jax.jit(
    lambda key: model.apply(
      variables, inputs, False, method="hidden_and_terms", rngs={"dropout": key}
    )[0]
  )
  assert np.abs(drop(jax.random.key(1)) - drop(jax.random.key(2))).max() > 1e-4
  still = recurrent()
  np.testing.assert_array_equal(hidden(model, variables, inputs), hidden(still, variables, inputs))


SHARED = translator(
  embedding=DPQEmbedding(V, D, SoftmaxQuantizer(8, 4, D)),
  head=DenseHead(V, D, label_smoothing=0.05),
  heads=4,
  hidden=64,
)
"""A model with a shared quantised embedding and label smoothing, as in an experiment."""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "steps", "rate"),
  [
    (SHARED, 400, 3e-3),
    (recurrent(dim=32).clone(embedding=DenseEmbedding(V, 32), head=DenseHead(V, 32)), 300, 5e-3),
  ],
)
def test_it_learns_to_reverse_and_beam_search_finds_the_reversed_source(model, steps, rate):
  rule = optax.adam(rate)
  row = jax.ShapeDtypeStruct((32, T), jnp.int32)
  shapes = {"inputs": {"source": row, "target": row}, "targets": row}
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: rate, jax.random.key(1))
  draw = np.random.default_rng(0)
  for _ in range(steps):
    state, metrics = step(state, reversed_pairs(draw, 32))
  assert metrics["loss"] < 0.3
  batch = jax.tree.map(jnp.asarray, reversed_pairs(draw, 20))
  search = jax.jit(lambda v, source: translate(model, v, source, EOS, beams=3))
  found = search(state.variables, batch["inputs"]["source"])
  wanted = np.where(batch["targets"] == EOS, NONE, batch["targets"])
  same = (np.asarray(found.tokens) == wanted).all(axis=1)
  assert same.mean() > 0.8
  # The log-probability is that of the whole sequence, with the token that ends it.
  log_prob = apply(model, state.variables, *batch.values(), method="log_prob")
  total = np.where(batch["targets"] >= 0, log_prob, 0).sum(axis=1)
  np.testing.assert_allclose(found.log_prob[same], total[same], atol=1e-3)


def reversed_pairs(draw, rows):
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
  table = sinusoids(5, 6)
  np.testing.assert_allclose(table[3, 0], np.sin(3.0), rtol=1e-6)
  np.testing.assert_allclose(table[3, 5], np.cos(3.0 / 10_000), rtol=1e-6)
  assert sinusoids(4, 5).shape == (4, 5)


@pytest.mark.parametrize(
  ("translator", "options", "message"),
  [
    (translator, {"heads": 3}, "`heads` must divide dim 16; got 3"),
    (translator, {"layers": 0}, "`layers` must be at least 1; got 0"),
    (translator, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
    (translator, {"context": 3}, "`tokens` must have at most context 3 columns; got 7"),
    (translator, {"head": DenseHead(V, 8)}, "`head` must have the model's dim 16; got 8"),
    (translator, {"target_embedding": DenseEmbedding(V, 8)}, "`target_embedding` must .* got 8"),
    (recurrent, {"head": DenseHead(V, 8)}, "`head` must have the model's dim 16; got 8"),
    (recurrent, {"dim": 15}, "`dim` must be even, .*; got 15"),
    (recurrent, {"layers": 0}, "`layers` must be at least 1; got 0"),
    (recurrent, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
  ],
)
def test_fields_and_tokens_that_do_not_fit_are_named(inputs, translator, options, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: initialised(translator(**options), inputs))
