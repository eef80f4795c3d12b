"""Tests of masses of codes and of draws within a code, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import reference
from vqjax.ops import codes


def test_without_a_bias_the_mass_is_the_number_of_tokens():
  mass = codes.log_mass(jnp.array([0, 0, 3, 0]), 5)
  np.testing.assert_allclose(np.exp(mass), [3, 0, 0, 1, 0], rtol=1e-6)


def test_with_a_bias_the_mass_is_a_log_sum_and_its_gradient_the_share_inside_the_code():
  assignment, bias = jnp.array([0, 0, 2, 0]), jnp.array([1.0, -2.0, 0.5, 300.0])
  mass, pull = jax.vjp(lambda b: codes.log_mass(assignment, 4, b), bias)
  np.testing.assert_allclose(mass, [300, -np.inf, 0.5, -np.inf], rtol=1e-6)
  (gradient,) = pull(jnp.ones(4))
  np.testing.assert_allclose(gradient, [0, 0, 1, 1], atol=1e-6)


def test_a_code_whose_tokens_all_have_bias_minus_infinity_is_empty():
  bias = jnp.array([-jnp.inf, -jnp.inf, 0.0])
  mass = codes.log_mass(jnp.array([0, 0, 1]), 2, bias)
  assert np.isneginf(mass[0])
  gradient = jax.grad(lambda b: codes.log_mass(jnp.array([0, 0, 1]), 2, b)[1])(bias)
  assert np.isfinite(gradient).all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
  ("with_bias", "masses"), [(True, codes.BLOCK_MASSES), (False, 15), (True, 1)]
)
def test_draws_within_a_code_follow_the_bias_in_however_many_blocks(with_bias, masses, monkeypatch):
  # 17 blocks of 19 tokens, 3 of 106, and one of all.
  monkeypatch.setattr(codes, "BLOCK_MASSES", masses)
  assignment = jnp.concatenate([jnp.full(10, 0), jnp.full(300, 1), jnp.full(7, 4)])
  assignment = jax.random.permutation(jax.random.key(0), assignment)
  bias = jax.random.normal(jax.random.key(1), (317,)) if with_bias else None
  code = jnp.ones(30_000, jnp.int32).at[0].set(0).at[1].set(4)
  drawn = codes.draw_within(jax.random.key(2), code, assignment, 5, bias)
  np.testing.assert_array_equal(assignment[drawn], code)
  on = np.flatnonzero(np.asarray(assignment) == 1)
  weight = np.ones(300) if bias is None else np.exp(np.asarray(bias, np.float64)[on])
  counts = np.bincount(np.asarray(drawn[2:]), minlength=317)[on]
  expected = weight / weight.sum() * counts.sum()
  assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-4


@pytest.mark.slow
def test_a_code_without_a_token_or_of_mass_zero_draws_minus_one():
  assignment = jnp.array([0, 0, 3, 1, 3])
  bias = jnp.array([0.0, 0.0, -jnp.inf, 1.0, -jnp.inf])
  code = jnp.array([[0, 2], [3, 1]])
  drawn = codes.draw_within(jax.random.key(0), code, assignment, 4, bias)
  assert drawn[0, 0] in (0, 1)
  assert drawn.ravel()[1:].tolist() == [-1, -1, 3]
  assert codes.draw_within(jax.random.key(0), jnp.int32(2), assignment, 4) == -1


def test_draws_within_a_code_cost_no_noise_of_the_vocabulary_and_few_masses():
  vocab, rows = 1_000_003, 5
  table = jax.ShapeDtypeStruct((vocab,), jnp.int32)
  code = jax.ShapeDtypeStruct((rows,), jnp.int32)
  for count in (2, 70_001):
    draw = lambda key, code, table, count=count: codes.draw_within(key, code, table, count)
    largest = reference.largest_value(draw, jax.random.key(0), code, table)
    assert largest <= max(codes.BLOCK_MASSES, 2 * vocab)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("k", [1, 5, 300])
def test_best_tokens_equal_a_stable_sort_of_all_scores(k, has_bias):
  # Tokens of a code tie, also across the chunks that are searched; 509 is prime.
  rng = np.random.default_rng(0)
  scores, code = rng.integers(0, 9, (7, 2, 3)).astype(np.float32), rng.integers(0, 7, 509)
  bias = np.where(rng.random(509) < 0.5, -np.inf, rng.integers(0, 3, 509)).astype(np.float32)
  found = codes.best_tokens(
    jnp.asarray(scores),
    jnp.asarray(code, jnp.int32),
    jnp.asarray(bias) if has_bias else None,
    509,
    k,
  )
  every = np.moveaxis(scores[code], 0, -1) + (bias if has_bias else 0)
  order = np.argsort(-every, axis=-1, kind="stable")[..., :k]
  expected = np.take_along_axis(every, order, -1)
  np.testing.assert_array_equal(found.scores, expected)
  np.testing.assert_array_equal(found.tokens, np.where(np.isneginf(expected), -1, order))
