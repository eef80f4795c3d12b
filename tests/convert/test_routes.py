"""Trained centroids choose the clusters that hidden states want."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import DenseHead, RoutedHead, assign
from vqjax.convert import likely_tokens, train_routes

V, D, C, BUDGET = 256, 8, 32, 2


@pytest.fixture(scope="module")
def trained():
  head = DenseHead(V, D, use_bias=True)
  keys = jax.random.split(jax.random.key(0), 4)
  weight, bias = jax.random.normal(keys[0], (V, D)), jax.random.normal(keys[1], (V,))
  variables = {"params": {"weight": weight, "bias": bias}}
  own, given = RoutedHead.from_dense(head, variables, assign.bisected(weight, C), C, BUDGET)
  hidden = np.asarray(3 * jax.random.normal(keys[2], (2000, D)))
  likely = likely_tokens(head, variables, hidden[:1600], k=8)
  losses = []
  after = train_routes(
    own, given, hidden[:1600], likely, key=keys[3], epochs=3, batch=64, learning_rate=0.05,
    decay=0.01, report=lambda epoch, loss: losses.append(loss),
  )  # fmt: skip
  return head, variables, own, given, after, hidden, likely, losses


def test_likely_tokens_are_those_of_the_dense_head(trained):
  head, variables, _, _, _, hidden, likely, _ = trained
  logits = np.asarray(head.apply(variables, jnp.asarray(hidden[:1600])), np.float64)
  np.testing.assert_array_equal(likely.tokens, np.argsort(-logits, axis=-1)[:, :8])
  log_z = np.log(np.exp(logits).sum(axis=-1))
  own = np.take_along_axis(logits, likely.tokens, axis=-1) - log_z[:, None]
  np.testing.assert_allclose(likely.log_probs, own, atol=1e-5)


def test_training_chooses_more_of_the_best_clusters_and_lowers_the_divergence(trained):
  head, variables, own, before, after, hidden, _, losses = trained
  held = jnp.asarray(hidden[1600:])
  dense = jax.nn.log_softmax(head.apply(variables, held))
  best = jnp.argmax(dense, axis=-1)
  agreement, divergence = [], []
  for given in (before, after):
    found = jax.nn.log_softmax(own.apply(given, held))
    agreement.append(float((jnp.argmax(found, axis=-1) == best).mean()))
    divergence.append(float((jnp.exp(dense) * (dense - found)).sum(axis=-1).mean()))
  assert losses[-1] < losses[0]
  assert agreement[1] > agreement[0]
  assert divergence[1] < divergence[0]


def test_rows_biases_and_order_stay(trained):
  _, _, _, before, after, _, _, _ = trained
  assert jnp.any(after["params"]["centroids"] != before["params"]["centroids"])
  same = lambda variables: variables | {"params": variables["params"] | {"centroids": 0}}
  jax.tree.map(np.testing.assert_array_equal, same(before), same(after))


def test_too_few_states_are_refused(trained):
  _, _, own, before, _, hidden, likely, _ = trained
  with pytest.raises(ValueError, match=r"at least `batch` states.* got 5 and 1600"):
    train_routes(own, before, hidden[:5], likely, key=jax.random.key(0))
