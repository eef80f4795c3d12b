"""Trained centroids choose the clusters that hidden states want."""

import jax
import numpy as np
import pytest

from tests import jitted, reference
from vqjax import DenseHead, RoutedHead, assign
from vqjax.convert import likely_tokens, train_routes

V, D, C, BUDGET = 256, 8, 32, 2


@pytest.fixture(scope="module")
def trained():
  head = DenseHead(V, D, use_bias=True)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  rng = np.random.default_rng(0)
  weight, bias, hidden = draw(V, D), draw(V), 3 * draw(2000, D)
  variables = {"params": {"weight": weight, "bias": bias}}
  own, given = RoutedHead.from_dense(head, variables, assign.bisected(weight, C), C, BUDGET)
  likely = likely_tokens(head, variables, hidden[:1600], k=8)
  losses = []
  options = {"epochs": 3, "batch": 64, "learning_rate": 0.05, "decay": 0.01}
  report = lambda epoch, loss: losses.append(loss)
  key = jax.random.key(3)
  after = train_routes(own, given, hidden[:1600], likely, key=key, report=report, **options)
  return head, variables, own, given, after, hidden, likely, losses


def test_likely_tokens_are_those_of_the_dense_head(trained):
  head, variables, _, _, _, hidden, likely, _ = trained
  logits = np.asarray(jitted.apply(head, variables, hidden[:1600]), np.float64)
  np.testing.assert_array_equal(likely.tokens, np.argsort(-logits, axis=-1)[:, :8])
  log_z = np.log(np.exp(logits).sum(axis=-1))
  own = np.take_along_axis(logits, likely.tokens, axis=-1) - log_z[:, None]
  np.testing.assert_allclose(likely.log_probs, own, atol=1e-5)


def test_training_chooses_more_of_the_best_clusters_and_lowers_the_divergence(trained):
  head, variables, own, before, after, hidden, _, losses = trained
  log_softmax = lambda *module: reference.log_softmax(jitted.apply(*module, hidden[1600:]))
  dense = log_softmax(head, variables)
  agreement, divergence = [], []
  for given in (before, after):
    found = log_softmax(own, given)
    agreement.append((found.argmax(axis=-1) == dense.argmax(axis=-1)).mean())
    divergence.append((np.exp(dense) * (dense - found)).sum(axis=-1).mean())
  assert losses[-1] < losses[0]
  assert agreement[1] > agreement[0]
  assert divergence[1] < divergence[0]


def test_rows_biases_and_order_stay(trained):
  _, _, _, before, after, _, _, _ = trained
  centroids = [np.asarray(x["params"]["centroids"]) for x in (before, after)]
  assert (centroids[0] != centroids[1]).any()
  same = lambda variables: variables | {"params": variables["params"] | {"centroids": 0}}
  jax.tree.map(np.testing.assert_array_equal, same(before), same(after))


def test_too_few_states_are_refused(trained):
  _, _, own, before, _, hidden, likely, _ = trained
  with pytest.raises(ValueError, match=r"at least `batch` states.* got 5 and 1600"):
    train_routes(own, before, hidden[:5], likely, key=jax.random.key(0))
