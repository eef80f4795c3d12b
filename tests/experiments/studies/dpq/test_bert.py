"""BERT: the encoder sees all tokens except masked ones and padding, and its tasks learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from experiments.studies.dpq.models import (
  BertEncoder,
  MaskedLanguageModel,
  PairClassifier,
  SpanFinder,
)
from experiments.studies.dpq.models.bert import MASKED
from tests.jitted import apply, init, make_step
from vqjax import DenseEmbedding, DenseHead, DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.training.step import state_maker

V, D, T = 19, 16, 6
NONE = -1


def encoder(**options):
  fields = {"dim": D, "layers": 2, "heads": 2, "context": T, "hidden": 32}
  # As BERT's: the position embeddings that are added to the vectors have the same scale.
  embedding = DenseEmbedding(V, D, weight_init=nn.initializers.normal(0.02))
  return BertEncoder(embedding=embedding, **(fields | options))


def tasks(**options):
  own = encoder(**options)
  return {
    "masked": (MaskedLanguageModel(own, DenseHead(V, D)), (3, T), (3, T)),
    "pairs": (PairClassifier(own, 2), (3, 2, T), (3,)),
    "spans": (SpanFinder(own), (3, T), (3, 2)),
  }


@pytest.mark.parametrize("name", tasks())
def test_every_variable_has_its_axes(name):
  quantized = DPQEmbedding(V, D, SoftmaxQuantizer(4, 4, D))
  model, *shapes = tasks()[name]
  model = model.clone(encoder=model.encoder.clone(embedding=quantized))
  batch = [jnp.zeros(shape, jnp.int32) for shape in shapes]
  variables = jax.eval_shape(lambda: init(model, jax.random.key(0), *batch, method="loss_terms"))
  ranks = jax.tree.map(len, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(lambda x: x.ndim, variables)
  assert model.embedding is quantized
  assert model.context == T


@pytest.mark.slow
def test_every_position_depends_on_every_token_and_on_no_padding():
  model = encoder()
  tokens = jnp.array([[[3, 4, 5, 6, NONE, NONE]]])
  variables = init(model, jax.random.key(0), tokens)
  see = lambda tokens: apply(model, variables, tokens)[0][0, 0]
  whole = see(tokens)
  for position in range(4):
    changed = see(tokens.at[0, 0, position].set(11))
    assert (np.abs(changed[:4] - whole[:4]).max(axis=-1) > 0).all()
  np.testing.assert_allclose(see(tokens[..., :4]), whole[:4], atol=1e-5)


@pytest.mark.slow
def test_a_masked_position_is_neither_its_token_nor_padding():
  model = encoder()
  tokens = jnp.array([[[3, MASKED, 5]]])
  variables = init(model, jax.random.key(0), tokens)
  see = lambda tokens: apply(model, variables, tokens)[0][0, 0]
  shown = see(tokens.at[0, 0, 1].set(4))
  assert np.isfinite(see(tokens)).all()
  assert np.abs(see(tokens) - shown).max() > 1e-3
  assert np.abs(see(tokens)[0] - see(tokens.at[0, 0, 1].set(NONE))[0]).max() > 1e-4


@pytest.mark.slow
def test_segments_have_different_vectors():
  model = encoder()
  tokens = jnp.array([[[3, 4], [5, 6]]])
  variables = init(model, jax.random.key(0), tokens)
  found = apply(model, variables, tokens)[0]
  turned = apply(model, variables, tokens[:, ::-1])[0]
  assert found.shape == (1, 2, 2, D)
  assert np.abs(found[0, 0] - turned[0, 1]).max() > 1e-3


def learned(model, batches, steps, rate=3e-3):
  rule = optax.adam(rate)
  first = next(batches)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: rate, jax.random.key(1))
  for _ in range(steps):
    state, metrics = step(state, next(batches))
  return state, metrics


@pytest.mark.slow
def test_masked_tokens_of_a_counting_text_are_predicted():
  """Each token is one more than the one before, so that a neighbour determines a masked one."""

  def batches():
    draw = np.random.default_rng(0)
    while True:
      tokens = (draw.integers(0, V, (32, 1)) + np.arange(T)) % V
      chosen = draw.random(tokens.shape) < 0.2
      yield {
        "inputs": np.where(chosen, MASKED, tokens).astype(np.int32),
        "targets": np.where(chosen, tokens, NONE).astype(np.int32),
      }

  _, metrics = learned(MaskedLanguageModel(encoder(), DenseHead(V, D)), batches(), 300)
  assert metrics["loss"] < 0.5


@pytest.mark.slow
def test_pairs_of_equal_tokens_are_classified():
  def batches():
    draw = np.random.default_rng(0)
    while True:
      first, second = draw.integers(0, 8, (2, 64))
      second = np.where(draw.random(64) < 0.5, first, second)
      tokens = np.full((64, 2, T), NONE, np.int32)
      tokens[:, 0, 0], tokens[:, 1, 0] = first, second
      yield {"inputs": tokens, "targets": (first == second).astype(np.int32)}

  model = PairClassifier(encoder(), 2, dropout=0.0)
  state, _ = learned(model, batches(), 400)
  batch = jax.tree.map(jnp.asarray, next(batches()))
  right = apply(model, state.variables, *batch.values(), method="hits")["accuracy"]
  assert right.mean() > 0.9


@pytest.mark.slow
def test_a_span_of_large_tokens_is_predicted():
  def batches():
    draw = np.random.default_rng(0)
    while True:
      tokens = draw.integers(0, 5, (64, T)).astype(np.int32)
      first = draw.integers(0, T - 1, 64)
      position = np.arange(T)
      inside = (position >= first[:, None]) & (position < first[:, None] + 2)
      yield {
        "inputs": np.where(inside, tokens + 10, tokens).astype(np.int32),
        "targets": np.stack([first, first + 1], axis=1).astype(np.int32),
      }

  model = SpanFinder(encoder())
  state, _ = learned(model, batches(), 200)
  batch = jax.tree.map(jnp.asarray, next(batches()))
  right = apply(model, state.variables, *batch.values(), method="hits")["accuracy"]
  assert right.shape == (64, 2)
  assert right.mean() > 0.9


@pytest.mark.parametrize(
  ("options", "shape", "message"),
  [
    ({"heads": 3}, (1, 1, T), "`heads` must divide dim 16; got 3"),
    ({"dim": 8}, (1, 1, T), "`embedding` must have the model's dim 8; got 16"),
    ({}, (1, 3, T), "`tokens` must have at most segments 2 x context 6 .* got 3 x 6"),
    ({}, (1, 1, T + 1), "got 1 x 7"),
  ],
)
def test_fields_and_tokens_that_do_not_fit_are_named(options, shape, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(encoder(**options).init, jax.random.key(0), np.zeros(shape, np.int32))
