"""Assignments from token ids and frequencies: blocks, bins and random assignments."""

import numpy as np
import pytest

from vqjax import CodebookHead, assign

COUNTS = np.array([3, 0, 50, 7, 7, 1, 0, 2, 900, 11, 5])


def test_a_random_assignment_has_equal_codes_and_follows_its_seed():
  table = assign.Random(3)(1009, 100)
  sizes = np.bincount(table, minlength=100)
  assert set(sizes) == {10, 11}
  np.testing.assert_array_equal(table, assign.Random(3)(1009, 100))
  assert (table != assign.Random(4)(1009, 100)).mean() > 0.9


@pytest.mark.parametrize("codes", [1, 2, 3, 10, 11])
@pytest.mark.parametrize("recipe", [assign.equal_count, assign.equal_mass])
def test_bins_are_blocks_of_the_tokens_by_frequency_and_none_is_empty(recipe, codes):
  table = recipe(COUNTS, codes)
  assert table.dtype == np.int32
  order = sorted(range(len(COUNTS)), key=lambda token: (-COUNTS[token], token))
  steps = np.diff(table[order])
  assert set(steps) <= {0, 1}
  assert (table[order[0]], table[order[-1]]) == (0, codes - 1)


def test_bins_of_equal_mass_leave_the_frequent_tokens_alone():
  counts = 10_000 // np.arange(1, 1010)
  table = assign.equal_mass(counts, 100)
  mass = np.bincount(table, weights=counts)
  alone = counts > counts.sum() / 100
  assert (np.bincount(table)[table[alone]] == 1).all()
  # The others take equal shares, to within half a token.
  share = mass[np.bincount(table) >= 20]
  assert len(share) > 10
  assert share.max() / share.min() < 1.1


def test_bins_of_equal_mass_on_equal_counts_are_those_of_equal_count():
  table = assign.equal_mass(np.ones(60, int), 12)
  np.testing.assert_array_equal(table, assign.equal_count(np.ones(60, int), 12))


@pytest.mark.parametrize(
  ("counts", "codes", "message"),
  [
    (COUNTS, 12, "`codes` must be .*; got 12 for vocab 11"),
    (COUNTS, 0, "`codes` must be .*; got 0 for vocab 11"),
    (np.zeros(5, int), 2, "`counts` must not be all zero; got 0 for all 5 tokens"),
    (COUNTS / 2, 2, "`counts` must hold integers; got float64"),
    (COUNTS[None], 2, r"`counts` must have shape \(V,\); got \(1, 11\)"),
    ([4, -1, 2], 2, "`counts` must be at least 0; got -1 for token 1"),
    (np.array([2**63 + 5, 1], np.uint64), 2, r"`counts` must add up .*; got 9\.22e"),
    ([2**62, 2**62], 2, r"`counts` must add up .*; got 9\.22e"),
    ([], 1, "`counts` must hold integers; got float64"),
  ],
)
@pytest.mark.parametrize("recipe", [assign.equal_count, assign.equal_mass])
def test_wrong_counts_are_refused(recipe, counts, codes, message):
  with pytest.raises(ValueError, match=message):
    recipe(counts, codes)


def test_a_given_table_is_an_assignment_and_equals_its_copy():
  table = assign.equal_mass(COUNTS, 3)
  given = assign.Given(table)
  np.testing.assert_array_equal(given(11, 3), table)
  head, same = (CodebookHead(11, 4, 3, assign.Given(t)) for t in (table, list(map(int, table))))
  assert head == same
  assert hash(head) == hash(same)
  assert given != assign.Given(table[::-1])
  with pytest.raises(ValueError, match=r"`assignment` must have shape \(12,\), .*; got \(11,\)"):
    given(12, 3)
  with pytest.raises(ValueError, match=r"`assignment` must hold codes in \[0, 2\); got 2"):
    given(11, 2)
