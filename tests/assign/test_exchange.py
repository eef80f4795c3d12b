"""The exchange algorithm computes the loss of the class-bigram model exactly and lowers it."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse

from vqjax import CodebookHead, GroupedHead, assign
from vqjax.lab.config.identity import describe

VOCAB = 31
UNUSED = 30


@pytest.fixture(scope="module")
def tokens():
  """A text with a cycle of three hidden classes, in which some tokens repeat."""
  rng = np.random.default_rng(0)
  classes = np.cumsum(rng.random(3001) < 0.9) % 3
  return (classes + 3 * (rng.integers(0, 10, 3001) * rng.random(3001)).astype(int)) % UNUSED


def loss(tokens, table, token_bias):
  """Loss of the class-bigram model in nats per token, counted directly in the text."""
  pairs = list(itertools.pairwise(tokens.tolist()))
  code = table.tolist()
  frequency = lambda items: {x: items.count(x) for x in set(items)}
  both = frequency([(code[a], code[b]) for a, b in pairs])
  before = frequency([code[a] for a, _ in pairs])
  predicted = frequency([code[b] for _, b in pairs])
  token = frequency([b for _, b in pairs])
  within = lambda b: token[b] / predicted[code[b]] if token_bias else 1 / code.count(code[b])
  return -sum(
    math.log(both[code[a], code[b]] / before[code[a]] * within(b)) for a, b in pairs
  ) / len(pairs)


def test_bigrams_are_the_pairs_of_neighbours(tokens):
  counts = assign.bigrams(tokens, VOCAB)
  expected = np.zeros((VOCAB, VOCAB), int)
  for a, b in itertools.pairwise(tokens):
    expected[a, b] += 1
  np.testing.assert_array_equal(counts.toarray(), expected)


@pytest.mark.parametrize("token_bias", [False, True])
def test_the_reported_loss_is_that_of_the_class_bigram_model(tokens, token_bias):
  counts = assign.bigrams(tokens, VOCAB)
  for codes in (1, 5, VOCAB):
    start = assign.contiguous(VOCAB, codes)
    found = assign.exchange(counts, codes, start=start, token_bias=token_bias, sweeps=2)
    assert found.nats[0] == pytest.approx(loss(tokens, start, token_bias), rel=1e-12)
    assert found.nats[-1] == pytest.approx(loss(tokens, found.assignment, token_bias), rel=1e-12)


@pytest.mark.parametrize("token_bias", [False, True])
def test_a_token_moves_to_the_code_that_brute_force_finds_best(tokens, token_bias):
  tokens = tokens[:400]
  counts = assign.bigrams(tokens, VOCAB)
  table = assign.contiguous(VOCAB, 4).astype(int)
  expected = table.copy()
  predicted = np.bincount(tokens[1:], minlength=VOCAB)
  for token in sorted(range(VOCAB), key=lambda v: (-predicted[v], v)):
    options = [np.where(np.arange(VOCAB) == token, code, expected) for code in range(4)]
    losses = [loss(tokens, option, token_bias) for option in options]
    if min(losses) < losses[expected[token]] - 1e-8:
      expected = options[int(np.argmin(losses))]
  found = assign.exchange(counts, 4, start=table, token_bias=token_bias, sweeps=1)
  np.testing.assert_array_equal(found.assignment, expected)
  assert (expected != table).any()


@pytest.mark.parametrize("token_bias", [False, True])
def test_each_sweep_lowers_the_loss_until_no_token_moves(tokens, token_bias):
  found = assign.exchange(assign.bigrams(tokens, VOCAB), 7, token_bias=token_bias, sweeps=50)
  assert (np.diff(found.nats) <= 1e-12).all()
  assert 2 < len(found.nats) < 50
  assert found.nats[-1] == pytest.approx(found.nats[-2], abs=1e-12)
  again = assign.exchange(
    assign.bigrams(tokens, VOCAB), 7, start=found.assignment, token_bias=token_bias
  )
  np.testing.assert_array_equal(again.assignment, found.assignment)


def test_hidden_classes_are_found(tokens):
  found = assign.exchange(assign.bigrams(tokens, VOCAB), 3, token_bias=True)
  table = found.assignment
  occurs = np.bincount(tokens, minlength=VOCAB) > 5
  for hidden in range(3):
    members = table[(np.arange(VOCAB) % 3 == hidden) & occurs]
    assert len(members) >= 9
    assert len(set(members)) == 1


def test_a_given_start_is_not_changed_and_the_result_is_the_same_each_time(tokens):
  start = assign.contiguous(VOCAB, 5)
  kept = start.copy()
  counts = assign.bigrams(tokens, VOCAB)
  one, two = (assign.exchange(counts, 5, start=start) for _ in range(2))
  np.testing.assert_array_equal(start, kept)
  np.testing.assert_array_equal(one.assignment, two.assignment)
  assert one.assignment.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.int32])
def test_tokens_and_counts_of_any_integer_type_give_the_same_codes(tokens, dtype):
  counts = assign.bigrams(tokens, VOCAB)
  expected = assign.exchange(counts, 5).assignment
  narrow = assign.bigrams(tokens.astype(dtype), VOCAB).astype(dtype)
  np.testing.assert_array_equal(assign.exchange(narrow, 5).assignment, expected)


def test_tokens_that_never_occur_share_no_code_with_frequent_ones(tokens):
  """Without a bias each of them lowers the probability of the others on its code."""
  counts = assign.bigrams(tokens, VOCAB + 20)
  found = assign.exchange(counts, 6)
  mass = np.bincount(found.assignment, weights=counts.sum(axis=0), minlength=6)
  assert set(found.assignment[UNUSED:]) <= {mass.argmin()}


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: assign.bigrams([3], 5), "`tokens` must have at least 2 tokens, .*; got 1"),
    (
      lambda: assign.bigrams([[1, 2]], 5),
      r"`tokens` must be one row of integers; got int64\[1, 2\]",
    ),
    (lambda: assign.bigrams([0.5, 1.0], 5), "`tokens` must be one row of integers; got float64"),
    (lambda: assign.bigrams([0, 4, 5], 5), r"`tokens` must be in \[0, 5\); got 5 at position 2"),
    (
      lambda: assign.exchange(assign.bigrams([0, 1], 2), 3),
      "`codes` must be .*; got 3 for vocab 2",
    ),
    (
      lambda: assign.exchange(scipy.sparse.csr_array((2, 3), dtype=int), 1),
      r"`counts` must be integers \[V, V\]; got int64\[2, 3\]",
    ),
    (
      lambda: assign.exchange(scipy.sparse.csr_array((3, 3), dtype=int), 1),
      "`counts` must be at least 0 and not all zero",
    ),
    (
      lambda: assign.exchange(scipy.sparse.csr_array((3, 3), dtype=float), 1),
      "`counts` must be integers .*; got float64",
    ),
    (
      lambda: assign.exchange(assign.bigrams([0, 1], 2), 1, start=[0, 1]),
      r"`assignment` must hold codes in \[0, 1\); got 1 for token 1",
    ),
  ],
)
def test_wrong_bigrams_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_result_stands_where_its_array_does(tokens):
  found = assign.exchange(assign.bigrams(tokens, VOCAB), 5)
  head, same = (CodebookHead(VOCAB, 4, 5, x) for x in (found, found.assignment))
  assert head == same
  assert hash(head) == hash(same)
  assert describe(head) == describe(same)
  groups, counts = assign.grouping(found), np.ones(VOCAB, int)
  np.testing.assert_array_equal(groups.order, assign.grouping(found.assignment).order)
  ordered = [
    GroupedHead(VOCAB, 4, sizes=groups.sizes, order_init=x) for x in (groups, groups.order)
  ]
  assert ordered[0] == ordered[1]
  assert assign.floor(found, counts).nats == assign.floor(found.assignment, counts).nats
  again = assign.exchange(assign.bigrams(tokens, VOCAB), 5, start=found, sweeps=1)
  np.testing.assert_array_equal(again.assignment, found.assignment)
