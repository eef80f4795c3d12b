"""The routed head is one distribution, whether a few rows of its weight are read or all."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import reference
from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import results, run
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
  """A dense head, the routed head of it, the variables of both, and hidden vectors."""
  dense, rng = DenseHead(vocab, dim, use_bias=use_bias, **fields), np.random.default_rng(0)
  params = {"weight": rng.standard_normal((vocab, dim), np.float32)}
  if use_bias:
    params["bias"] = rng.standard_normal(vocab, np.float32)
  order, given = rng.permutation(vocab), {"params": params}
  head = RoutedHead(vocab, dim, use_bias=use_bias, clusters=clusters, budget=budget, **fields)

  def make(given):
    made, variables = RoutedHead.from_dense(dense, given, order, clusters, budget)
    assert made == head
    return variables

  return dense, given, head, results(make, given), rng.standard_normal((2, 3, dim), np.float32)


def test_centroids_of_a_dense_head_are_the_mean_rows():
  _, dense, _, variables, _ = routed()
  rows = dense["params"]["weight"].astype(np.float64)
  means = rows[variables["codes"]["order"]].reshape(32, 32, 16).mean(axis=1)
  np.testing.assert_allclose(variables["params"]["centroids"], means, atol=1e-6)


def test_with_every_cluster_the_head_is_the_dense_head():
  dense, given, head, variables, hidden = routed(budget=32, use_bias=True)
  logits = lambda *both: [h.apply(v, hidden) for h, v in zip((head, dense), both)]
  np.testing.assert_allclose(*results(logits, variables, given), rtol=1e-5, atol=1e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fields", [{"use_bias": True, "softcap": 3.0}, {}])
def test_few_vectors_and_many_have_one_distribution(fields):
  _, _, head, variables, hidden = routed(**fields)
  tokens = np.random.default_rng(5).integers(0, 1024, hidden.shape[:2])

  def everything(own, hidden):
    of_both = []
    # 6 vectors read 128 rows each; 60 vectors read all.
    for times in (1, 10):
      h, t = jnp.tile(hidden, (times, 1, 1)), jnp.tile(tokens, (times, 1))
      log_prob = [own.log_prob(h, t, temperature)[:2] for temperature in (1.0, 0.6)]
      best = [x[:2] for x in own.top_k(h, 200)]
      of_both.append((log_prob, own.logits(h)[:2], *best))
    return of_both

  few, every = run(head, variables, everything, hidden)
  for a, b in zip(few[:3], every):
    np.testing.assert_allclose(a, b, atol=2e-5)
  np.testing.assert_array_equal(few[3], every[3])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 9}])
def test_draws_of_few_vectors_follow_the_distribution(options):
  _, _, head, variables, hidden = routed(vocab=64, clusters=8, budget=2, use_bias=True)

  def program(own, row):
    draw = lambda key: own.sample(row, key, **options)[0]
    return jax.vmap(draw)(jax.random.split(jax.random.key(3), 8000)), own.logits(row)[0]

  drawn, score = run(head, variables, program, hidden[:1, 0])
  counts = np.bincount(drawn, minlength=64)
  score = score.astype(np.float64) / options.get("temperature", 1.0)
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
  variables["params"]["bias"][::2] = -np.inf

  def everything(own, hidden):
    many = hidden, jnp.tile(hidden, (10, 1, 1))
    zeros = [jnp.zeros(given.shape[:2], jnp.int32) for given in many]
    return [(own.log_prob(h, t), own.top_k(h, 100)[1]) for h, t in zip(many, zeros)]

  for log_prob, best in run(head, variables, everything, hidden):
    assert np.isneginf(log_prob).all()
    assert (best % 2 == 1).all()


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
  found = results(routing.routing_loss, centroids, hidden, log_size, cluster, log_prob)
  np.testing.assert_allclose(found, expected.mean(), rtol=1e-5)


def test_bad_heads_and_numbers_are_refused():
  head, variables, order = DenseHead(1024, 16), {}, np.arange(1024)
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
