"""Is a clustering turned into groups, and is the number of groups the one that memory wants?"""

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
    ([0, 2, 2, 4], r"cluster 1 of 5 has no token \(2 such clusters\); .*np.unique"),
    ([0, 2**40], r"cluster 1 of 1099511627777 has no token"),
    ([0, 1, -1], "token 2 is in cluster -1; number them from 0 on"),
    ([0.0, 1.0], "names no clusters"),
    ([], "names no clusters"),
    ([[0, 1]], r"vocab 2 has an assignment of shape \(1, 2\)"),
  ],
)
def test_a_clustering_that_gives_no_groups_is_refused(assignment, message):
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
def test_a_memory_optimum_of_nothing_is_refused(vocab, arrays):
  with pytest.raises(ValueError, match=r"give (at least 1|more than 0)"):
    assign.memory_groups(vocab, arrays=arrays)
