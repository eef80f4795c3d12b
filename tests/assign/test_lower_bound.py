"""The floor is the lowest perplexity that a codebook head can have."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import CodebookHead, assign

TABLE = np.array([0, 2, 2, 0, 4, 2, 4, 1])
COUNTS = np.array([5, 1, 0, 7, 20, 3, 1, 6])


@pytest.mark.parametrize(
  ("vocab", "codes", "perplexity"), [(267_735, 1024, 261), (10_000, 1024, 9.8), (10_007, 1, 10_007)]
)
def test_equal_codes_have_the_floor_of_vocabulary_by_codes(vocab, codes, perplexity):
  found = assign.floor(assign.contiguous(vocab, codes), np.ones(vocab, int), codes=codes)
  assert found.perplexity == pytest.approx(perplexity, rel=5e-3)


def test_the_floor_is_the_mean_log_size_of_the_tokens_codes():
  found = assign.floor(TABLE, COUNTS, codes=6)
  shared = [2, 3, 3, 2, 2, 3, 2, 1]
  nats = sum(c * math.log(n) for c, n in zip(COUNTS, shared)) / 43
  assert found.nats == pytest.approx(nats, rel=1e-14)
  assert found.perplexity == pytest.approx(math.exp(nats), rel=1e-14)
  assert found.sizes.tolist() == [2, 1, 3, 0, 2, 0]
  assert found.dead.tolist() == [3, 5]


def test_the_worst_offenders_are_the_parts_of_the_floor():
  found = assign.floor(TABLE, COUNTS)
  assert found.worst[0] == (4, 20, 4, 2, pytest.approx(20 * math.log(2)))
  costs = [row.nats for row in found.worst]
  assert costs == sorted(costs, reverse=True)
  assert sum(costs) == pytest.approx(43 * found.nats)
  # Tokens with a code of their own and tokens that do not occur contribute nothing.
  assert {row.token for row in found.worst} == {0, 1, 3, 4, 5, 6}


def test_the_floor_with_a_bias_is_the_entropy_of_a_token_given_its_code():
  found = assign.floor(TABLE, COUNTS, token_bias=True)
  part = {0: 5 / 12, 3: 7 / 12, 4: 20 / 21, 6: 1 / 21, 1: 1 / 4, 5: 3 / 4}
  nats = -sum(COUNTS[token] * math.log(p) for token, p in part.items()) / 43
  assert found.nats == pytest.approx(nats, rel=1e-14)
  assert found.nats < assign.floor(TABLE, COUNTS).nats


def test_a_bias_allows_a_perplexity_of_one_only_where_no_two_tokens_of_a_code_occur():
  counts = np.array([5, 0, 0, 0, 20, 3, 0, 6])
  found = assign.floor(TABLE, counts, token_bias=True)
  assert found.perplexity == 1
  assert found.worst == ()
  assert assign.floor(TABLE, counts).perplexity > 1.5


def loss(head, params, hidden):
  """Loss in nats per token, with the hidden vector of the right code before each token."""
  variables = {"params": params, "codes": {"assignment": jnp.asarray(TABLE)}}
  log_prob = head.apply(variables, hidden[TABLE], jnp.arange(8), method="log_prob")
  return -float(np.where(COUNTS > 0, COUNTS * log_prob, 0).sum() / COUNTS.sum())


@pytest.mark.slow
@pytest.mark.parametrize("token_bias", [False, True])
def test_a_head_that_predicts_every_code_reaches_the_floor_and_other_biases_stay_above(token_bias):
  head = CodebookHead(8, 5, 5, token_bias=token_bias)
  found = assign.floor(TABLE, COUNTS, codes=5, token_bias=token_bias)
  params = {"codebook": jnp.eye(5)}
  hidden = 300.0 * jnp.eye(5)
  if not token_bias:
    assert loss(head, params, hidden) == pytest.approx(found.nats, abs=1e-6)
    return
  best = jnp.log(jnp.maximum(COUNTS, 1e-9))
  assert loss(head, params | {"token_bias": best}, hidden) == pytest.approx(found.nats, abs=1e-5)
  for seed in range(5):
    other = best + 0.1 * jax.random.normal(jax.random.key(seed), (8,))
    assert loss(head, params | {"token_bias": other}, hidden) > found.nats


def test_a_tokens_count_of_zero_costs_nothing_and_one_token_is_enough():
  assert assign.floor([0], [1]).perplexity == 1
  assert assign.floor([0, 0, 0], [0, 2, 0]).perplexity == pytest.approx(3)


def test_no_assignment_is_below_the_least_floor_and_some_reach_it():
  draw = np.random.default_rng(0)
  for codes in (2, 3, 4):
    counts = draw.integers(0, 50, 6) + np.array([1, 0, 0, 0, 0, 0])
    tables = itertools.product(range(codes), repeat=6)
    best = min(assign.floor(table, counts, codes=codes).perplexity for table in tables)
    assert 0.7 * best < assign.least_floor(counts, codes) <= best
  # One token alone and two alike on the other code are what the real numbers give.
  assert assign.least_floor([50, 25, 25], 2) == pytest.approx(2**0.5)
  assert assign.least_floor([5, 3, 0, 0], 2) == pytest.approx(1)
  with pytest.raises(ValueError, match=r"`codes` must be .*; got 9 for vocab 3"):
    assign.least_floor([50, 25, 25], 9)


@pytest.mark.parametrize(
  ("table", "counts", "message"),
  [
    (TABLE, COUNTS[:7], r"`assignment` must have shape \(7,\)"),
    (TABLE - 1, COUNTS, "`assignment` must hold codes .*; got -1 for token 0"),
    ([], COUNTS, r"`assignment` must have shape \(8,\), .*; got \(0,\)"),
    ([9] * 8, COUNTS, "`codes` must be .*; got 10 for vocab 8"),
  ],
)
def test_wrong_tables_and_counts_are_refused(table, counts, message):
  with pytest.raises(ValueError, match=message):
    assign.floor(table, counts)


def test_a_floor_prints_its_perplexity():
  assert str(assign.floor([0, 0, 2], [1, 1, 0])).startswith("perplexity 2.00 at least (0.6931 nats")
