"""Is the decoder causal, the size that its sum says, and indifferent to how it is computed?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import CodebookHead, DenseEmbedding, DenseHead, GroupedHead
from vqjax.models import Transformer


def decoder(**changes):
  fields = {
    "embedding": DenseEmbedding(31, 8),
    "head": DenseHead(31, 8),
    "dim": 8,
    "layers": 2,
    "heads": 2,
    "context": 16,
  }
  return Transformer(**(fields | changes))


def init(model, length=16):
  tokens = jnp.zeros((1, length), jnp.int32)
  return model.init(jax.random.key(0), tokens, tokens, method="loss_terms")


@pytest.fixture
def tokens():
  return jax.random.randint(jax.random.key(1), (3, 16), 0, 31)


def test_a_position_sees_no_later_token(tokens):
  model = decoder()
  variables = init(model)
  changed = tokens.at[:, 9:].set((tokens[:, 9:] + 1) % 31)
  before, after = (model.apply(variables, t) for t in (tokens, changed))
  np.testing.assert_array_equal(before[:, :9], after[:, :9])
  assert (before[:, 9:] != after[:, 9:]).any()


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_add_up(tied):
  embedding = DenseEmbedding(31, 8)
  head = DenseHead(31, 8, embedding=embedding) if tied else DenseHead(31, 8)
  variables = init(decoder(embedding=embedding, head=head))
  block = 2 * 2 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
  expected = embedding.size().params + head.size().params + 16 * 8 + 2 * block + 2 * 8
  assert sum(x.size for x in jax.tree.leaves(variables)) == expected


def test_recomputing_activations_changes_neither_loss_nor_gradient(tokens):
  def gradient(model):
    loss = lambda v: (
      -model.apply(
        v, tokens, tokens, False, method="log_prob", rngs={"dropout": jax.random.key(2)}
      ).mean()
    )
    return jax.value_and_grad(loss)(init(model))

  kept, again = gradient(decoder(dropout=0.5)), gradient(decoder(dropout=0.5, remat=True))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, again)


def test_bfloat16_computes_with_float32_parameters(tokens):
  model = decoder(dtype=jnp.bfloat16)
  variables = init(model)
  assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
  assert model.apply(variables, tokens, method="hidden").dtype == jnp.bfloat16
  close = decoder().apply(variables, tokens, tokens, method="log_prob")
  found = model.apply(variables, tokens, tokens, method="log_prob")
  assert found.dtype == jnp.float32
  # bfloat16 keeps 8 bits; the scores here are of order one.
  np.testing.assert_allclose(found, close, atol=0.05)


@pytest.mark.parametrize("head", [CodebookHead(31, 8, 5), GroupedHead(31, 8)])
def test_any_head_fits_and_its_logits_and_log_prob_agree(head, tokens):
  model = decoder(head=head)
  variables = init(model)
  log_prob = model.apply(variables, tokens, tokens, method="log_prob")
  logits = jax.nn.log_softmax(model.apply(variables, tokens))
  expected = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(log_prob, expected, atol=1e-5)


def test_dropout_is_off_unless_asked_for(tokens):
  model = decoder(dropout=0.5)
  variables = init(model)
  first, second = (model.apply(variables, tokens, method="hidden") for _ in range(2))
  np.testing.assert_array_equal(first, second)


def test_a_batch_shorter_than_the_context_is_fine(tokens):
  model = decoder()
  variables = init(model)
  whole, part = model.apply(variables, tokens), model.apply(variables, tokens[:1, :1])
  np.testing.assert_allclose(whole[:1, :1], part, atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"heads": 3}, "heads 3 do not divide dim 8"),
    ({"layers": 0}, "layers 0 make no decoder"),
    ({"head": DenseHead(31, 9)}, "head has dim 9 in a model of dim 8"),
    ({"head": DenseHead(30, 8)}, "embedding has 31 tokens and the head 30"),
  ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    init(decoder(**changes))


def test_a_sequence_longer_than_the_context_is_refused(tokens):
  model = decoder(context=15)
  with pytest.raises(ValueError, match="16 tokens exceed the model's context of 15"):
    model.apply(init(model, 15), tokens)
