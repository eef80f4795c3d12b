"""Assignments from clusters of embeddings: k-means, balanced k-means, frequent tokens alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from vqjax import CodebookHead, assign

VOCAB, DIM, CODES = 211, 6, 23
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def embeddings():
  rng = np.random.default_rng(1)
  centers = 4 * rng.normal(size=(CODES, DIM))
  return (centers[np.arange(VOCAB) % CODES] + 0.5 * rng.normal(size=(VOCAB, DIM))).astype(
    np.float32
  )


@pytest.fixture(scope="module")
def counts():
  return 5_000 // np.arange(1, VOCAB + 1) - 23


RECIPES = {
  "kmeans": lambda e, c: assign.by_kmeans(e, CODES, key=KEY),
  "weighted": lambda e, c: assign.by_kmeans(e, CODES, key=KEY, weights=c**0.5),
  "alone": lambda e, c: assign.frequent_alone(e, CODES, c, 11, key=KEY, weights=c + 1),
  "balanced": lambda e, c: assign.balanced_kmeans(e, CODES, key=KEY),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_clustering_is_an_assignment_with_its_codebook(recipe, embeddings, counts):
  found = RECIPES[recipe](embeddings, counts)
  assert found.assignment.dtype == np.int32
  assert found.centers.dtype == np.float32
  assert found.centers.shape == (CODES, DIM)
  np.testing.assert_array_equal(np.unique(found.assignment), np.arange(CODES))
  again = RECIPES[recipe](jnp.asarray(embeddings), counts)
  np.testing.assert_array_equal(again.assignment, found.assignment)
  head = CodebookHead(VOCAB, DIM, CODES, assign.Given(found.assignment))
  tables = head.init(KEY, jnp.zeros((1, DIM)))["codes"]
  np.testing.assert_array_equal(tables["assignment"], found.assignment)


def means(rows, weights, table):
  return np.array(
    [np.average(rows[table == k], axis=0, weights=weights[table == k]) for k in range(CODES)]
  )


def test_tokens_have_the_nearest_center_which_is_their_weighted_mean(embeddings, counts):
  weights = counts + 1.0
  found = assign.by_kmeans(embeddings, CODES, key=KEY, weights=weights, iterations=100)
  distance = np.square(embeddings[:, None].astype(np.float64) - found.centers).sum(axis=2)
  np.testing.assert_array_equal(distance.argmin(axis=1), found.assignment)
  np.testing.assert_allclose(found.centers, means(embeddings, weights, found.assignment), atol=1e-4)


def test_weights_by_frequency_lower_the_floor(embeddings, counts):
  run = functools.partial(assign.by_kmeans, embeddings, CODES, key=KEY, iterations=100)
  plain, weighted = (run(weights=w).assignment for w in (None, counts))
  assert assign.floor(weighted, counts).nats < assign.floor(plain, counts).nats


def test_frequent_tokens_are_alone_at_their_own_embedding(embeddings, counts):
  shuffled = np.random.default_rng(2).permutation(VOCAB)
  found = assign.frequent_alone(embeddings, CODES, counts[shuffled], 11, key=KEY)
  frequent = np.argsort(shuffled)[:11]
  np.testing.assert_array_equal(found.assignment[frequent], np.arange(11))
  np.testing.assert_array_equal(found.centers[:11], embeddings[frequent])
  assert (np.bincount(found.assignment)[:11] == 1).all()


@pytest.mark.parametrize("capacity", [None, 10, 12, VOCAB])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_code_of_a_balanced_clustering_exceeds_its_capacity(
  embeddings, counts, capacity, weighted
):
  weights = counts if weighted else None
  found = assign.balanced_kmeans(embeddings, CODES, key=KEY, capacity=capacity, weights=weights)
  assert np.bincount(found.assignment).max() <= (capacity or 10)
  if weighted:
    return
  expected = means(embeddings, np.ones(VOCAB), found.assignment)
  np.testing.assert_allclose(found.centers, expected, atol=1e-5)


@pytest.mark.parametrize(("vocab", "codes", "capacity"), [(101, 7, 15), (61, 61, 1), (97, 5, 40)])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_assignment_within_capacity_is_near_the_least_cost(vocab, codes, capacity, weighted):
  rng = np.random.default_rng(3)
  rows, centers = rng.normal(size=(vocab, 5)), rng.normal(size=(codes, 5))
  weights = rng.integers(1, 50, vocab) if weighted else np.ones(vocab)
  table = assign.assigned_within(rows, centers, capacity, weights=weights)
  assert np.bincount(table).max() <= capacity
  cost = weights[:, None] * np.square(rows[:, None] - centers).sum(axis=2)
  slots = np.repeat(cost, capacity, axis=1)
  least = slots[scipy.optimize.linear_sum_assignment(slots)].sum()
  found = cost[np.arange(vocab), table].sum()
  # float32 distances may fall short of the float64 optimum by their rounding.
  assert least * (1 - 1e-5) <= found <= least + 0.05 * cost.min(axis=1).sum()


def test_equal_embeddings_still_fill_every_code_evenly():
  found = assign.balanced_kmeans(np.ones((20, 3)), 6, key=KEY)
  assert np.bincount(found.assignment, minlength=6).max() == 4
  np.testing.assert_allclose(found.centers, 1)


def test_many_equal_rows_settle_within_the_capacity():
  """Equal rows cannot outbid each other: the auction ends only if the increments grow."""
  draw = np.random.default_rng(0)
  rows = np.concatenate([np.zeros((350, 8)), draw.normal(size=(150, 8))])
  table = assign.assigned_within(rows, rows[draw.choice(500, 50)], 10)
  assert (np.bincount(table, minlength=50) == 10).all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [assign.by_kmeans, assign.balanced_kmeans])
def test_one_code_and_a_code_for_each_token_are_possible(recipe, embeddings):
  assert (recipe(embeddings, 1, key=KEY).assignment == 0).all()
  one_each = recipe(embeddings[:13], 13, key=KEY)
  assert sorted(one_each.assignment) == list(range(13))
  np.testing.assert_allclose(one_each.centers[one_each.assignment], embeddings[:13], atol=1e-5)


def broken(embeddings, rows):
  copy = embeddings.copy()
  copy[rows, 2] = np.nan
  return copy


@pytest.mark.parametrize("recipe", [assign.by_kmeans, assign.balanced_kmeans])
def test_wrong_embeddings_and_weights_are_refused(recipe, embeddings, counts):
  wrong = {
    "`codes` must be .*; got 212 for vocab 211": (embeddings, 212, None),
    "`codes` must be .*; got 0 for": (embeddings, 0, None),
    "`embeddings` must be finite; .* in 2 of 211 rows: 3, 17": (
      broken(embeddings, [17, 3]),
      CODES,
      None,
    ),
    r"rows: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.": (broken(embeddings, slice(9)), CODES, None),
    r"`embeddings` must have shape \[V, D\], .* got \(6,\)": (embeddings[0], 2, None),
    "`embeddings` must be an array of real numbers; got ndarray of complex64": (
      embeddings * 1j,
      CODES,
      None,
    ),
    "`weights` must not be all zero in float32; got 0": (embeddings, CODES, 0 * counts),
    r"`weights` must have shape \(211,\); got \(210,\)": (
      embeddings,
      CODES,
      counts[1:],
    ),
    "`weights` must be .*; got -1.0 for token 4": (
      embeddings,
      CODES,
      np.where(np.arange(VOCAB) == 4, -1.0, 1),
    ),
    r"`weights` must be .*; got 1e\+300 for token 0": (
      embeddings,
      CODES,
      np.full(VOCAB, 1e300),
    ),
    "got 0 for all 211 tokens": (embeddings, CODES, np.full(VOCAB, 1e-300)),
    "got nan for token 5": (embeddings, CODES, np.where(np.arange(VOCAB) == 5, np.nan, 1)),
  }
  for message, (rows, codes, weights) in wrong.items():
    with pytest.raises((ValueError, TypeError), match=message):
      recipe(rows, codes, key=KEY, weights=weights)


@pytest.mark.parametrize(
  ("alone", "weights", "message"),
  [
    (CODES, None, r"`alone` must be in \[0, 23\), .*; got 23"),
    (-1, None, "`alone` must be .*; got -1"),
    (3, np.arange(VOCAB) < 3, "`weights` must not be all zero; got 0 for all 208 tokens"),
  ],
)
def test_frequent_tokens_alone_must_leave_codes_and_weight_to_the_rest(
  embeddings, counts, alone, weights, message
):
  with pytest.raises(ValueError, match=message):
    assign.frequent_alone(embeddings, CODES, counts, alone, key=KEY, weights=weights)


def test_too_little_capacity_is_refused_with_the_least_that_suffices(embeddings):
  with pytest.raises(
    ValueError, match="`capacity` must be at least 10 for 211 tokens on 23 codes; got 9"
  ):
    assign.balanced_kmeans(embeddings, CODES, key=KEY, capacity=9)
