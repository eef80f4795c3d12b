"""Groups from a clustering, and the number of groups that needs the least memory."""

import numpy as np
import pytest

from vqjax import GroupedHead, assign


def test_groups_hold_the_tokens_of_a_cluster_in_their_order():
  found = assign.grouping(np.array([2, 0, 1, 0, 2, 2]))
  assert found.sizes == (2, 1, 3)
  assert found.order.tolist() == [1, 3, 2, 0, 4, 5]
  head = GroupedHead(6, 4, sizes=found.sizes)
  assert head.starts.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ([0, 2, 2, 4], r"every cluster in \[0, 5\); got no token in cluster 1 \(2 such .*np.unique"),
    ([0, 2**40], r"every cluster in \[0, 1099511627777\); got no token in cluster 1"),
    ([0, 1, -1], "`assignment` must be at least 0; got -1 for token 2"),
    ([0.0, 1.0], "`assignment` must hold integers; got float64"),
    ([], "`assignment` must hold integers; got float64"),
    ([[0, 1]], r"`assignment` must have shape \(2,\), as vocab; got \(1, 2\)"),
  ],
)
def test_an_invalid_clustering_is_refused(assignment, message):
  with pytest.raises(ValueError, match=message):
    assign.grouping(np.array(assignment))


@pytest.mark.parametrize("arrays", [1, 3, 4.0])
def test_no_other_number_of_groups_takes_less_memory(arrays):
  vocab = 50257
  held = lambda groups: groups + arrays * vocab / groups
  best = assign.memory_groups(vocab, arrays=arrays)
  assert held(best) <= min(held(best - 1), held(best + 1))


def test_one_array_is_the_papers_square_root_and_groups_stay_within_the_vocabulary():
  assert assign.memory_groups(10_000, arrays=1) == 100
  assert assign.memory_groups(3, arrays=100) == 3
  assert assign.memory_groups(1000, arrays=1e-9) == 1


@pytest.mark.parametrize(("vocab", "arrays"), [(0, 4), (5, 0), (5, float("nan"))])
def test_memory_groups_refuses_an_empty_vocabulary_and_no_arrays(vocab, arrays):
  with pytest.raises(ValueError, match=r"`(vocab|arrays)` must be"):
    assign.memory_groups(vocab, arrays=arrays)
