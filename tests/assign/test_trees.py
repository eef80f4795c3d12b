"""Trees have each token once, and their depths are the least possible."""

import numpy as np
import pytest

from vqjax.assign import trees


def depths(tree):
  """Depth of each token."""
  found = np.empty(len(tree.tokens), int)
  found[tree.tokens] = (tree.paths != trees.NO_NODE).sum(axis=1)
  return found


def check(tree, vocab):
  """Check that node k separates its leaves after leaf k, and that each path ends at one leaf."""
  assert sorted(tree.tokens) == list(range(vocab))
  assert sorted(set(tree.paths.ravel()) - {trees.NO_NODE}) == list(range(vocab - 1))

  def descend(leaves, level):
    if len(leaves) == 1:
      assert (tree.paths[leaves[0], level:] == trees.NO_NODE).all()
      return
    (node,) = set(tree.paths[leaves, level])
    assert leaves[0] <= node < leaves[-1]
    descend(leaves[leaves <= node], level + 1)
    descend(leaves[leaves > node], level + 1)

  descend(np.arange(vocab), 0)


def least_expected_depth(counts):
  """Sum of the masses of all inner nodes of Huffman's algorithm."""
  masses, total = sorted(counts), 0
  while len(masses) > 1:
    merged, masses = masses[0] + masses[1], sorted([masses[0] + masses[1], *masses[2:]])
    total += merged
  return total


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 9, 101])
def test_a_balanced_tree_has_the_least_depth(vocab):
  tree = trees.balanced(vocab)
  check(tree, vocab)
  assert tree.paths.shape == (vocab, max(1, int(np.ceil(np.log2(vocab)))))
  assert np.ptp(depths(tree)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_huffman_tree_has_the_least_expected_depth(seed):
  counts = np.random.default_rng(seed).geometric(0.02, 61) - 1
  tree = trees.Huffman(counts)(61)
  check(tree, 61)
  assert (depths(tree) * counts).sum() == least_expected_depth(counts.tolist())


def test_powers_of_two_make_a_chain_and_equal_counts_a_balanced_tree():
  assert depths(trees.Huffman(2 ** np.arange(7))(7)).tolist() == [6, 6, 5, 4, 3, 2, 1]
  assert set(depths(trees.Huffman(np.full(16, 3))(16))) == {4}


def test_tokens_that_never_occur_do_not_make_the_tree_deep():
  counts = np.zeros(1025, int)
  counts[3] = 1
  assert depths(trees.Huffman(counts)(1025)).max() == 11
