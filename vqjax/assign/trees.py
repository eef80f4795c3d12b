"""Binary trees over the vocabulary for a tree softmax.

`HierarchicalHead(tree=...)` takes a function vocab -> `BinaryTree`. Leaves are numbered from left
to right, and an inner node has the number of the last leaf on its left: node k separates leaf k
from leaf k + 1, and leaf j is left of an ancestor k if and only if j <= k. The inner nodes of a
path therefore determine its turns, and between consecutive leaves there are consecutive nodes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import checked_counts

__all__ = ["BinaryTree", "Huffman"]

NO_NODE = -1
"""Padding of a path that is shorter than the longest."""


class BinaryTree(NamedTuple):
  """A full binary tree over the tokens.

  Attributes:
    tokens: the token of each leaf, from left to right.
    paths: the inner nodes from the root to each leaf, padded with `NO_NODE`; L is the length of the
      longest path, and 1 for a single leaf.
  """

  tokens: Int[np.ndarray, "V"]
  paths: Int[np.ndarray, "V L"]


TreeInit = Callable[[int], BinaryTree]


def balanced(vocab: int) -> BinaryTree:
  """The tree of least depth, ceil(log2 V), with tokens in order of their ids."""
  if vocab < 1:
    raise ValueError(f"`vocab` must be at least 1; got {vocab}. Give the number of tokens.")
  depth = (vocab - 1).bit_length()
  early = 2**depth - vocab
  return _with_depths(np.arange(vocab), np.where(np.arange(vocab) < early, depth - 1, depth))


@dataclasses.dataclass(frozen=True, eq=False)
class Huffman:
  """The tree of least expected depth under the counts.

  Tokens with count 0 have leaves too. Source: Huffman, A method for the construction of
  minimum-redundancy codes, 1952.

  Attributes:
    counts: number of occurrences of each token, integers [V].
  """

  counts: ArrayLike

  def __call__(self, vocab: int) -> BinaryTree:
    """The tree; ValueError if the counts are not valid (see `checked_counts`)."""
    depth = _huffman_depths(checked_counts(self.counts, vocab))
    order = np.argsort(depth, kind="stable")
    return _with_depths(order, depth[order])

  def __eq__(self, other: object) -> bool:
    """Whether the counts are equal, since modules are compared by their fields."""
    return isinstance(other, Huffman) and np.array_equal(self.counts, other.counts)

  def __hash__(self) -> int:
    """Hash of the counts."""
    return hash(np.asarray(self.counts, np.int64).tobytes())


def _huffman_depths(counts: Int[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
  vocab = len(counts)
  # Of equal masses the oldest node comes first; it is the shallowest.
  heap = [(count, leaf) for leaf, count in enumerate(counts.tolist())]
  heapq.heapify(heap)
  parent = [0] * (2 * vocab - 1)
  for node in range(vocab, 2 * vocab - 1):
    mass, first = heapq.heappop(heap)
    other, second = heap[0]
    heapq.heapreplace(heap, (mass + other, node))
    parent[first] = parent[second] = node
  depth = [0] * (2 * vocab - 1)
  for node in range(2 * vocab - 3, -1, -1):
    depth[node] = depth[parent[node]] + 1
  return np.array(depth[:vocab])


def _with_depths(tokens: Int[np.ndarray, "V"], depths: Int[np.ndarray, "V"]) -> BinaryTree:
  """The tree whose leaves have these depths, from left to right."""
  vocab = len(tokens)
  # Paths first hold inner nodes in the order of a depth-first walk: the number of a node is known
  # only after all leaves on its left.
  paths = np.full((vocab, max(1, depths.max())), NO_NODE, np.int32)
  number = np.full(vocab, NO_NODE, np.int32)
  open_nodes, is_left, reached = [], [], 0
  for leaf, depth in enumerate(depths.tolist()):
    new = depth - len(open_nodes)
    open_nodes += range(reached, reached + new)
    is_left += [True] * new
    reached += new
    paths[leaf, :depth] = open_nodes
    while is_left and not is_left[-1]:
      open_nodes.pop()
      is_left.pop()
    if is_left:
      is_left[-1] = False
      number[open_nodes[-1]] = leaf
  return BinaryTree(tokens.astype(np.int32), np.where(paths < 0, NO_NODE, number[paths]))
