"""Tests of the sampled softmax: consistency, exactness for all tokens, size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.ops.exact import normals
from vqjax.ops.sampled_softmax import Candidates, draw_candidates, log_uniform, sampled_softmax

V, D = 53, 6


def problem(seed=0, rows=7):
  hidden, weight, bias = normals(seed, (rows, D), (V, D), (V,))
  return hidden, weight, np.random.default_rng(1).integers(0, V, rows), bias


def drawn(samples, key=1):
  """Candidates of a draw by Zipf's law."""
  return jax.jit(lambda: draw_candidates(jax.random.key(key), log_uniform(V), samples))()


@jax.jit
def estimate(hidden, weight, tokens, candidates, bias=None):
  return sampled_softmax(hidden, weight, tokens, candidates, bias)


def estimate_by_definition(hidden, weight, tokens, bias, candidates):
  """float64, candidate by candidate: exp(own) + sum of exp(score) / π over the others."""
  hidden, weight, bias = (np.asarray(x, np.float64) for x in (hidden, weight, bias))
  scores = hidden @ weight.T + bias
  log_prob = []
  for row, token in zip(scores, tokens):
    z = np.exp(row[token])
    for other, log_pi in zip(*map(np.asarray, candidates)):
      z += np.exp(row[other] - float(log_pi)) if other != token else 0
    log_prob.append((row[token] - np.log(z), np.log(z)))
  return np.array(log_prob).T


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 13, 52])
def test_the_estimate_equals_its_definition_with_accidental_hits_removed(samples):
  hidden, weight, tokens, bias = problem()
  candidates = drawn(samples)
  tokens[0] = np.asarray(candidates.tokens)[0]
  found = estimate(hidden, weight, tokens, candidates, bias)
  expected = estimate_by_definition(hidden, weight, tokens, bias, candidates)
  # Roundings of 6e-8 grow by 1/π, π here down to 0.02.
  np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_definition():
  hidden, weight, tokens, bias = problem()
  candidates = drawn(13)
  tokens[0] = np.asarray(candidates.tokens)[0]

  def by_definition(hidden, weight, bias):
    scores = hidden @ weight.T + bias
    own = jnp.take_along_axis(scores, tokens[:, None], -1)
    others = scores[:, candidates.tokens] - candidates.log_inclusion
    others = jnp.where(candidates.tokens == tokens[:, None], -jnp.inf, others)
    return (own - jax.nn.logsumexp(jnp.hstack([own, others]), -1, keepdims=True)).sum()

  loss = lambda h, w, b: sampled_softmax(h, w, tokens, candidates, b).log_prob.sum()
  run = lambda f: jax.jit(jax.grad(f, (0, 1, 2)))(hidden, weight, bias)
  found, expected = run(loss), run(by_definition)
  for a, b in zip(found, expected):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("log_q", [log_uniform, jnp.zeros], ids=["Zipf", "uniform"])
def test_the_normaliser_is_estimated_without_bias_and_better_with_more_samples(log_q):
  hidden, weight, tokens, bias = problem()
  exact = estimate_by_definition(
    hidden, weight, tokens, bias, Candidates(np.arange(V), np.zeros(V))
  )
  spread, rows = [], jnp.asarray(weight)
  for samples in (5, 20, 45):

    def one(key, samples=samples):
      candidates = draw_candidates(key, log_q(V), samples)
      return sampled_softmax(hidden, rows, tokens, candidates, jnp.asarray(bias)).log_z

    log_z = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 4000))
    ratio = np.exp(np.asarray(log_z, np.float64) - exact[1])
    error = ratio.std(axis=0) / np.sqrt(len(ratio))
    # Five standard errors: a false alarm once in a million.
    assert (abs(ratio.mean(axis=0) - 1) < 5 * error).all()
    spread.append(np.sqrt(np.mean((ratio - 1) ** 2)))
  # A variance in proportion to about V / samples - 1.
  assert spread[0] > 2 * spread[1] > 4 * spread[2]


@pytest.mark.slow
def test_tokens_that_the_proposal_excludes_pad_the_sample_with_weight_zero():
  hidden, weight, tokens, bias = problem()
  log_q = np.where(np.arange(V) < 5, 0, -np.inf).astype(np.float32)
  draw = jax.jit(lambda log_q: draw_candidates(jax.random.key(0), log_q, 9))
  tokens = np.maximum(tokens, 9)  # none that pads the sample
  found = estimate(hidden, weight, tokens, draw(log_q), bias)
  only = Candidates(np.arange(5), np.zeros(5))
  expected = estimate_by_definition(hidden, weight, tokens, bias, only)
  np.testing.assert_allclose(found.log_prob, expected[0], atol=1e-5)
  np.testing.assert_allclose(found.log_z, expected[1], atol=1e-5)


def test_zipfs_law_sums_to_one_and_falls():
  log_q = np.asarray(jax.jit(lambda: log_uniform(10007))(), np.float64)
  np.testing.assert_allclose(np.exp(log_q).sum(), 1, rtol=1e-4)
  assert (np.diff(log_q) < 0).all()
  ranks = np.arange(10007)
  expected = np.log(np.log((ranks + 2) / (ranks + 1)) / np.log(10008))
  np.testing.assert_allclose(log_q, expected, atol=1e-5)


def test_candidates_differ_and_come_as_often_as_they_are_said_to():
  draw = jax.jit(jax.vmap(lambda key: draw_candidates(key, log_uniform(11), 4)))
  tokens, log_inclusion = map(np.asarray, draw(jax.random.split(jax.random.key(0), 20_000)))
  assert all(len(set(row)) == 4 for row in tokens[:100])
  # E[1 / π over the draws of v] = 1 for every token v.
  weight = np.zeros(11)
  np.add.at(weight, tokens.ravel(), np.exp(-log_inclusion).ravel())
  np.testing.assert_allclose(weight / 20_000, 1, atol=0.06)


def test_neither_logits_nor_more_than_the_scatter_is_of_the_vocabularys_size():
  rows, vocab, dim, samples = 257, 4099, 16, 31
  args = (
    jax.ShapeDtypeStruct((rows, dim), jnp.float32),
    jax.ShapeDtypeStruct((vocab, dim), jnp.float32),
    jax.ShapeDtypeStruct((rows,), jnp.int32),
  )

  def loss(hidden, weight, tokens):
    candidates = draw_candidates(jax.random.key(0), log_uniform(vocab), samples)
    return sampled_softmax(hidden, weight, tokens, candidates).log_prob.mean()

  gradient = jax.grad(loss, (0, 1))
  assert reference.largest_value(gradient, *args) == vocab * dim
  scattered = str(jax.make_jaxpr(gradient)(*args)).count(f":f32[{vocab},{dim}] = scatter-add")
  assert scattered == 1
  # Beside parameters and gradients: rows of the sample and of the tokens, their scores in tiles.
  memory = jax.jit(gradient).lower(*args).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * vocab * dim


@pytest.mark.slow
@pytest.mark.parametrize("token", [-1, V])
def test_a_token_outside_the_vocabulary_is_nan(token):
  hidden, weight, tokens, _ = problem()
  tokens[2] = token
  found = estimate(hidden, weight, tokens, drawn(9))
  assert np.flatnonzero(np.isnan(found.log_prob)).tolist() == [2]


@pytest.mark.parametrize("samples", [0, 54])
def test_samples_outside_the_vocabulary_are_refused(samples):
  with pytest.raises(ValueError, match=rf"`samples` must be in \[1, 53\] .* got {samples}"):
    drawn(samples)
