"""BERT: the encoder sees all tokens except masked ones and padding, and its tasks learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from experiments.studies.dpq.models.bert import (
  MASKED,
  BertEncoder,
  MaskedLanguageModel,
  PairClassifier,
)
from tests.jitted import apply, init, make_step
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.training.step import state_maker

V, D, T = 19, 16, 6
NONE = -1


def encoder(**options):
  fields = {"dim": D, "layers": 2, "heads": 2, "context": T, "hidden": 32}
  # As BERT's: the position embeddings that are added to the vectors have the same scale.
  embedding = DenseEmbedding(V, D, weight_init=nn.initializers.normal(0.02))
  return BertEncoder(embedding=embedding, **(fields | options))


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
def test_a_masked_position_and_a_segment_have_vectors_of_their_own():
  model = encoder()
  tokens = jnp.array([[[3, MASKED, 5]]])
  variables = init(model, jax.random.key(0), tokens)
  see = lambda tokens: apply(model, variables, tokens)[0][0, 0]
  shown = see(tokens.at[0, 0, 1].set(4))
  assert np.isfinite(see(tokens)).all()
  assert np.abs(see(tokens) - shown).max() > 1e-3
  assert np.abs(see(tokens)[0] - see(tokens.at[0, 0, 1].set(NONE))[0]).max() > 1e-4
  pair = jnp.array([[[3, 4, 9], [5, 6, 9]]])
  found, turned = (apply(model, variables, x)[0] for x in (pair, pair[:, ::-1]))
  assert found.shape == (1, 2, 3, D)
  assert np.abs(found[0, 0] - turned[0, 1]).max() > 1e-3


def counting(draw):
  """Each token is one more than the one before: a neighbour determines a masked one."""
  tokens = (draw.integers(0, V, (32, 1)) + np.arange(T)) % V
  chosen = draw.random(tokens.shape) < 0.2
  return np.where(chosen, MASKED, tokens), np.where(chosen, tokens, NONE)


def equal_pairs(draw):
  """Two texts of a token, of which half are equal."""
  first, second = draw.integers(0, 8, (2, 64))
  second = np.where(draw.random(64) < 0.5, first, second)
  tokens = np.full((64, 2, T), NONE)
  tokens[:, 0, 0], tokens[:, 1, 0] = first, second
  return tokens, first == second


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "make", "steps"),
  [
    (MaskedLanguageModel(encoder(), DenseHead(V, D)), counting, 300),
    (PairClassifier(encoder(), 2, dropout=0.0), equal_pairs, 400),
  ],
)
def test_each_task_learns(model, make, steps):
  draw, rule = np.random.default_rng(0), optax.adam(3e-3)
  batch = lambda: {k: x.astype(np.int32) for k, x in zip(("inputs", "targets"), make(draw))}
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: 3e-3, jax.random.key(1))
  for _ in range(steps):
    state, metrics = step(state, batch())
  if make is counting:
    assert metrics["loss"] < 0.5
  else:
    right = apply(model, state.variables, *batch().values(), method="hits")["accuracy"]
    assert right.shape == (64,)
    assert right.mean() > 0.9


def test_fields_that_do_not_fit_are_named():
  for options, message in (
    ({"heads": 3}, "`heads` must divide dim 16; got 3"),
    ({"dim": 8}, "`embedding` must have the model's dim 8; got 16"),
  ):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(encoder(**options).init, jax.random.key(0), np.zeros((1, 1, T), np.int32))
