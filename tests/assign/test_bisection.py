"""Bisection finds clusters of equal size."""

import itertools

import numpy as np
import pytest

from vqjax import assign
from vqjax.ops.groups import group_starts


@pytest.mark.parametrize(("vocab", "clusters"), [(1, 1), (101, 7), (64, 64), (60, 1)])
def test_an_order_has_every_token_once(vocab, clusters):
  rows = np.random.default_rng(0).normal(size=(vocab, 5))
  order = assign.bisected(rows, clusters)
  np.testing.assert_array_equal(np.sort(order), np.arange(vocab))
  np.testing.assert_array_equal(order, assign.bisected(rows, clusters))


def test_separate_bunches_become_clusters():
  rng = np.random.default_rng(0)
  owner = rng.permutation(np.repeat(np.arange(8), 9))
  rows = 10 * rng.normal(size=(8, 6))[owner] + rng.normal(size=(72, 6))
  order = assign.bisected(rows, 8)
  starts = group_starts(72, 8)
  assert {len(set(owner[order[a:b]])) for a, b in itertools.pairwise(starts)} == {1}


def test_the_metric_says_which_directions_count():
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(50, 2)) * [100.0, 1.0]
  order = assign.bisected(rows, 2, metric=np.diag([0.0, 1.0]))
  assert rows[order[:25], 1].max() < rows[order[25:], 1].min() or (
    rows[order[:25], 1].min() > rows[order[25:], 1].max()
  )
  with pytest.raises(ValueError, match="`metric` must have the width of the rows, 2"):
    assign.bisected(rows, 2, metric=np.eye(3))
