"""The routed head is one distribution, whether a few rows of its weight are read or all."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import reference
from tests.contract_of_representatives import RepresentativeContract
from vqjax import CodebookHead, DenseEmbedding, DenseHead, RoutedHead, SigSoftmax
from vqjax.ops import routing

SHUFFLED = np.random.default_rng(0).permutation(101)


def routed_logits(head, variables, hidden):
  """Log-probabilities in float64, from the definition."""
  params, codes = variables["params"], variables["codes"]
  weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
  bias = np.asarray(params.get("bias", np.zeros(head.vocab)), np.float64)
  cluster = np.asarray(codes["assignment"])
  of_cluster = np.asarray(hidden) @ np.asarray(params["centroids"], np.float64).T
  log_size = np.array([np.log(np.exp(bias[cluster == c]).sum()) for c in range(head.clusters)])
  chosen = np.argsort(-(of_cluster + log_size), axis=-1, kind="stable")[..., : head.budget]
  exact = np.asarray(hidden) @ np.asarray(weight, np.float64).T + bias
  is_chosen = (cluster == chosen[..., None]).any(axis=-2)
  log_mass = of_cluster + log_size
  log_p = np.take_along_axis(reference.log_softmax(log_mass), chosen, axis=-1)
  log_rows = np.log(np.where(is_chosen, np.exp(exact), 0).sum(axis=-1, keepdims=True))
  log_chosen = np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
  spread = reference.log_softmax(log_mass)[..., cluster] + bias - log_size[cluster]
  return np.where(is_chosen, log_chosen + exact - log_rows, spread)


class TestRoutedHead(RepresentativeContract):
  cases: ClassVar = {
    # 15 vectors that choose 33 of 101 rows take all rows.
    "all rows": lambda v, d: RoutedHead(
      v, d, clusters=10, budget=3, use_bias=True, order_init=SHUFFLED if v == 101 else None
    ),
    "few rows": lambda v, d: RoutedHead(v, d, clusters=25, budget=1, use_bias=True),
    "tied": lambda v, d: RoutedHead(v, d, clusters=7, budget=2, embedding=DenseEmbedding(v, d)),
  }

  def reference_logits(self, head, variables, hidden):
    return routed_logits(head, variables, hidden)


def routed(vocab=1024, dim=16, clusters=32, budget=4, use_bias=False, **fields):
  head = DenseHead(vocab, dim, use_bias=use_bias, **fields)
  keys = jax.random.split(jax.random.key(0), 4)
  params = {"weight": jax.random.normal(keys[0], (vocab, dim))}
  if use_bias:
    params["bias"] = jax.random.normal(keys[1], (vocab,))
  order = np.random.default_rng(0).permutation(vocab)
  made = RoutedHead.from_dense(head, {"params": params}, order, clusters, budget)
  return head, {"params": params}, *made, jax.random.normal(keys[2], (2, 3, dim))


def test_centroids_of_a_dense_head_are_the_mean_rows():
  _, dense, _, variables, _ = routed()
  rows = np.asarray(dense["params"]["weight"], np.float64)
  means = rows[np.asarray(variables["codes"]["order"])].reshape(32, 32, 16).mean(axis=1)
  np.testing.assert_allclose(variables["params"]["centroids"], means, atol=1e-6)


def test_with_every_cluster_the_head_is_the_dense_head():
  dense, given, head, variables, hidden = routed(budget=32, use_bias=True)
  np.testing.assert_allclose(
    head.apply(variables, hidden), dense.apply(given, hidden), rtol=1e-5, atol=1e-5
  )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fields", [{}, {"use_bias": True, "softcap": 3.0}])
def test_few_vectors_and_many_have_one_distribution(fields):
  _, _, head, variables, hidden = routed(**fields)
  # 6 vectors read 128 rows each; 60 vectors read all.
  many = jnp.tile(hidden, (10, 1, 1))
  tokens = jax.random.randint(jax.random.key(5), hidden.shape[:2], 0, 1024)
  for temperature in (1.0, 0.6):
    few = head.apply(variables, hidden, tokens, temperature, method="log_prob")
    all_rows = head.apply(
      variables, many, jnp.tile(tokens, (10, 1)), temperature, method="log_prob"
    )
    np.testing.assert_allclose(few, all_rows[:2], atol=2e-5)
  np.testing.assert_allclose(
    head.apply(variables, hidden), head.apply(variables, many)[:2], atol=2e-5
  )
  few, all_rows = (head.apply(variables, h, 200, method="top_k") for h in (hidden, many))
  np.testing.assert_array_equal(few[1], all_rows[1][:2])
  np.testing.assert_allclose(few[0], all_rows[0][:2], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 9}])
def test_draws_of_few_vectors_follow_the_distribution(options):
  _, _, head, variables, hidden = routed(vocab=64, clusters=8, budget=2, use_bias=True)
  row = hidden[:1, 0]
  draw = jax.jit(
    jax.vmap(lambda key: head.apply(variables, row, key, **options, method="sample")[0])
  )
  counts = np.bincount(draw(jax.random.split(jax.random.key(3), 8000)), minlength=64)
  score = np.asarray(head.apply(variables, row)[0], np.float64) / options.get("temperature", 1.0)
  if "top_k" in options:
    score = np.where(score >= np.sort(score)[-9], score, -np.inf)
  expected = np.exp(reference.log_softmax(score)) * 8000
  assert counts[expected == 0].sum() == 0
  likely = expected > 5
  seen, wanted = (np.append(x[likely], 8000 - x[likely].sum()) for x in (counts, expected))
  enough = wanted > 1e-6
  assert scipy.stats.chisquare(seen[enough], wanted[enough], sum_check=False).pvalue > 1e-4


def test_removed_tokens_have_no_probability_anywhere():
  _, _, head, variables, hidden = routed(use_bias=True)
  bias = variables["params"]["bias"].at[::2].set(-jnp.inf)
  variables["params"]["bias"] = bias
  for given in (hidden, jnp.tile(hidden, (10, 1, 1))):
    tokens = jnp.zeros(given.shape[:2], jnp.int32)
    assert np.isneginf(head.apply(variables, given, tokens, method="log_prob")).all()
    assert (head.apply(variables, given, 100, method="top_k")[1] % 2 == 1).all()


def test_the_loss_of_routes_is_the_divergence_of_the_clusters():
  rng = np.random.default_rng(0)
  centroids, hidden = rng.normal(size=(5, 4)), rng.normal(size=(7, 4))
  log_size = np.log(rng.integers(1, 9, 5))
  cluster, log_prob = rng.integers(0, 5, (7, 3)), np.log(rng.dirichlet(np.ones(3), 7))
  score = hidden @ centroids.T + log_size
  log_q = np.log(np.exp(score).sum(axis=1))
  wanted = np.zeros((7, 5))
  for row in range(7):
    for j in range(3):
      wanted[row, cluster[row, j]] += np.exp(log_prob[row, j])
  expected = -(wanted * (score - log_q[:, None])).sum(axis=1)
  arrays = map(jnp.asarray, (centroids, hidden, log_size, cluster, log_prob))
  np.testing.assert_allclose(routing.routing_loss(*arrays), expected.mean(), rtol=1e-5)


def test_bad_heads_and_numbers_are_refused():
  head, variables, _, _, _ = routed()
  order = np.arange(1024)
  with pytest.raises(ValueError, match="`head` must be a DenseHead; got a CodebookHead"):
    RoutedHead.from_dense(CodebookHead(1024, 16, 4), variables, order, 32, 4)
  with pytest.raises(ValueError, match=r"`budget` must be in .* got budget 33, clusters 32"):
    RoutedHead.from_dense(head, variables, order, 32, 33)
  with pytest.raises(ValueError, match=r"`clusters` in .* got budget 0, clusters 0"):
    RoutedHead.from_dense(head, variables, order, 0, 0)
  with pytest.raises(ValueError, match="`output` must be None; got SigSoftmax"):
    RoutedHead.from_dense(head.clone(output=SigSoftmax()), variables, order, 32, 4)
  with pytest.raises(ValueError, match="`order` must be a permutation"):
    RoutedHead.from_dense(head, variables, order * 0, 32, 4)
