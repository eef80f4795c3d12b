"""Tests of masses of codes and of draws within a code, against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import reference
from vqjax.ops import codes


def test_without_a_bias_the_mass_is_the_number_of_tokens():
  mass = jax.jit(lambda table: codes.log_mass(table, 5))(np.array([0, 0, 3, 0]))
  np.testing.assert_allclose(np.exp(mass), [3, 0, 0, 1, 0], rtol=1e-6)


def test_with_a_bias_the_mass_is_a_log_sum_and_its_gradient_the_share_inside_the_code():
  assignment, bias = np.array([0, 0, 2, 0]), np.float32([1, -2, 0.5, 300])

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(b):
    mass = codes.log_mass(assignment, 4, b)
    return mass.sum(), mass

  gradient, mass = run(bias)
  np.testing.assert_allclose(mass, [300, -np.inf, 0.5, -np.inf], rtol=1e-6)
  np.testing.assert_allclose(gradient, [0, 0, 1, 1], atol=1e-6)


def test_a_code_whose_tokens_all_have_bias_minus_infinity_is_empty():
  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(b):
    mass = codes.log_mass(np.array([0, 0, 1]), 2, b)
    return mass[1], mass[0]

  gradient, empty = run(np.float32([-np.inf, -np.inf, 0]))
  assert np.isneginf(empty)
  assert np.isfinite(gradient).all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
  ("with_bias", "masses"), [(True, codes.BLOCK_MASSES), (False, 15), (True, 1)]
)
def test_draws_within_a_code_follow_the_bias_in_however_many_blocks(with_bias, masses, monkeypatch):
  # 17 blocks of 19 tokens, 3 of 106, and one of all.
  monkeypatch.setattr(codes, "BLOCK_MASSES", masses)
  rng = np.random.default_rng(0)
  assignment = rng.permutation(np.repeat([0, 1, 4], [10, 300, 7])).astype(np.int32)
  bias = rng.normal(size=317).astype(np.float32) if with_bias else None
  code = np.ones(30_000, np.int32)
  code[:2] = 0, 4
  draw = jax.jit(functools.partial(codes.draw_within, codes=5))
  drawn = np.asarray(draw(jax.random.key(2), code, assignment, bias=bias))
  np.testing.assert_array_equal(assignment[drawn], code)
  on = np.flatnonzero(assignment == 1)
  weight = np.ones(300) if bias is None else np.exp(np.float64(bias)[on])
  counts = np.bincount(drawn[2:], minlength=317)[on]
  expected = weight / weight.sum() * counts.sum()
  assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-4


@pytest.mark.slow
def test_a_code_without_a_token_or_of_mass_zero_draws_minus_one():
  @jax.jit
  def run(code, assignment, bias):
    draw = lambda code, *bias: codes.draw_within(jax.random.key(0), code, assignment, 4, *bias)
    return draw(code, bias), draw(jnp.int32(2))

  code, assignment = np.array([[0, 2], [3, 1]]), np.array([0, 0, 3, 1, 3])
  drawn, empty = jax.device_get(run(code, assignment, np.float32([0, 0, -np.inf, 1, -np.inf])))
  assert drawn[0, 0] in (0, 1)
  assert drawn.ravel()[1:].tolist() == [-1, -1, 3]
  assert empty == -1


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
  bias = bias if has_bias else None
  run = jax.jit(lambda scores, code, bias: codes.best_tokens(scores, code, bias, 509, k))
  found = run(scores, code.astype(np.int32), bias)
  every = np.moveaxis(scores[code], 0, -1) + (0 if bias is None else bias)
  order = np.argsort(-every, axis=-1, kind="stable")[..., :k]
  expected = np.take_along_axis(every, order, -1)
  np.testing.assert_array_equal(found.scores, expected)
  np.testing.assert_array_equal(found.tokens, np.where(np.isneginf(expected), -1, order))
