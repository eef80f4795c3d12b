"""Statistics of a text are those of all its ids, in whatever form they are given."""

import collections
import itertools

import numpy as np
import pytest
import scipy.sparse
from sklearn.utils.extmath import randomized_svd

from vqjax import assign

V = 53


@pytest.fixture(scope="module")
def ids():
  return np.random.default_rng(0).zipf(1.4, 3_000) % V


@pytest.fixture(scope="module")
def text(ids):
  return assign.TextStats.of(ids, V)


def counted(*rows):
  """Counts and bigrams by a loop in Python."""
  tokens = collections.Counter(itertools.chain(*rows))
  pairs = collections.Counter(itertools.chain(*map(itertools.pairwise, rows)))
  table = np.zeros((V, V), int)
  for (first, second), count in pairs.items():
    table[first, second] = count
  return np.array([tokens[v] for v in range(V)]), table


FORMS = {
  "an array": lambda ids, path: (ids, [ids]),
  "a list": lambda ids, path: (ids.tolist(), [ids]),
  "narrow unsigned ids": lambda ids, path: (ids.astype(np.uint8), [ids]),
  "rows": lambda ids, path: (ids.reshape(30, 100), ids.reshape(30, 100)),
  "a stream of arrays": lambda ids, path: (
    (part for part in np.split(ids, [1, 7, 2000])),
    np.split(ids, [1, 7, 2000]),
  ),
  "a memory map": lambda ids, path: (mapped(ids, path), [ids]),
}


def mapped(ids, path):
  np.save(path / "ids.npy", ids.astype(np.uint16))
  return np.load(path / "ids.npy", mmap_mode="r")


@pytest.mark.parametrize("form", FORMS)
def test_counts_and_bigrams_are_those_of_a_loop(ids, form, tmp_path):
  given, rows = FORMS[form](ids, tmp_path)
  found = assign.TextStats.of(given, V)
  counts, bigrams = counted(*(row.tolist() for row in rows))
  np.testing.assert_array_equal(found.counts, counts)
  np.testing.assert_array_equal(found.bigrams.toarray(), bigrams)
  assert assign.TextStats.of(found, V) is found


def test_of_a_longer_text_stretches_at_equal_distances_are_read():
  """In the second half of this text every id is one higher."""
  ids = np.repeat(np.arange(2), 2**18).astype(np.uint16)
  found = assign.TextStats.of(ids, V, most=2**17)
  np.testing.assert_array_equal(found.counts[:3], [2**16, 2**16, 0])
  endless = itertools.repeat(np.array([3, 4]))
  assert assign.TextStats.of(endless, V, most=100).counts.tolist()[3:5] == [50, 50]


@pytest.mark.parametrize("width", [5, 70])
def test_contexts_span_what_scikit_learn_finds(text, width):
  pairs = text.bigrams.astype(float)
  both = scipy.sparse.hstack([pairs, pairs.T.tocsr()]).toarray()
  expected = both.sum(axis=1, keepdims=True) * both.sum(axis=0) / both.sum()
  with np.errstate(divide="ignore", invalid="ignore"):
    information = np.where(both > 0, np.log(both / expected), 0)
  left, value, _ = randomized_svd(np.maximum(information, 0), min(width, V - 1), random_state=0)
  rows = assign.context_vectors(text.bigrams, width)
  assert rows.shape == (V, width)
  # The rotation leaves products of rows alone.
  np.testing.assert_allclose(rows @ rows.T, left * value @ left.T, atol=1e-9)


def test_a_layer_gets_rows_of_unit_length_and_codes_of_every_number(text):
  lengths = np.linalg.norm(text.contexts(8), axis=1)
  np.testing.assert_allclose(lengths, text.counts > 0, atol=1e-6)
  assert sorted(set(text.codes(9))) == list(range(9))
  assert sorted(text.order(np.array([20, 20, 13]))) == list(range(V))
  tables, codes = text.products(4, 2, 8)
  assert (tables.shape, codes.shape) == ((2, 4, 4), (V, 2))


def test_counts_alone_give_bins_of_equal_mass_and_no_rows(text):
  alone = assign.TextStats.of_counts(text.counts, V)
  np.testing.assert_array_equal(alone.codes(9), assign.equal_mass(text.counts, 9))
  assert (np.diff(text.counts[alone.order(np.array([53]))]) <= 0).all()
  assert alone.contexts(8) is None
  assert alone.products(4, 2, 8) == (None, None)


def test_frequencies_are_smoothed_and_sum_to_one(text):
  probability = np.exp(text.log_frequencies().astype(np.float64))
  np.testing.assert_allclose(probability.sum(), 1, rtol=1e-6)
  np.testing.assert_allclose(probability, text.counts / text.counts.sum(), atol=1e-3)


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    (np.array([0.0, 1.0]), "`ids` must be integers; got float64"),
    (np.array([0, V]), r"`ids` must be in \[0, 53\); got 53"),
    ([np.array([0, 1]), np.array([2, -1])], r"`ids` must be in \[0, 53\); got -1"),
    (np.zeros((1, 2, 2), int), r"got shape \(1, 2, 2\)"),
    (np.array([5]), "`ids` must have at least 2 tokens .*; got 1 tokens"),
    ([np.array([5]), np.array([6])], "`ids` must have at least 2 tokens .*; got 2 tokens"),
    (assign.TextStats.of(np.arange(9), 9), r"`counts` must have shape \(53\,?\)"),
  ],
)
def test_ids_that_are_no_text_are_refused(ids, message):
  with pytest.raises(ValueError, match=message):
    assign.TextStats.of(ids, V)
