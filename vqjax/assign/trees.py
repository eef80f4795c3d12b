"""Which path through a binary tree leads to each token of the vocabulary?

A tree is a function vocab -> `Tree`: what `HierarchicalHead(tree=...)` expects. Leaves are counted
from left to right, and an inner node has the number of the last leaf on its left: node k parts
leaf k from leaf k + 1, and leaf j lies left of an ancestor k exactly where j <= k. So a path needs
no turns beside its nodes, and consecutive leaves have consecutive nodes between them.
"""

import dataclasses
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.table import checked_counts

NO_NODE = -1
"""What fills up a path that is shorter than the longest."""


class Tree(NamedTuple):
  """A full binary tree over the tokens.

  Attributes:
    tokens: the token of each leaf, from left to right.
    paths: the inner nodes from the root down to each leaf, then `NO_NODE`; L is the longest path's
      length, 1 for a single leaf.
  """

  tokens: Int[np.ndarray, "V"]
  paths: Int[np.ndarray, "V L"]


TreeInit = Callable[[int], Tree]


def balanced(vocab: int) -> Tree:
  """The tree of least depth, ceil(log2 V), whose leaves are the tokens in their own order."""
  if vocab < 1:
    raise ValueError(f"vocab {vocab} holds no token; give at least 1")
  depth = (vocab - 1).bit_length()
  early = 2**depth - vocab
  return _with_depths(np.arange(vocab), np.where(np.arange(vocab) < early, depth - 1, depth))


@dataclasses.dataclass(frozen=True, eq=False)
class Huffman:
  """The tree of least expected depth under these counts; frequent tokens are near the root.

  Source: Huffman 1952. A token that never occurs has a leaf too.

  Attributes:
    counts: how often each token occurs, integers [V].
  """

  counts: ArrayLike

  def __call__(self, vocab: int) -> Tree:
    """The tree; ValueError for counts of another length, negative, not integers, or all zero."""
    depth = _huffman_depths(checked_counts(self.counts, vocab))
    order = np.argsort(depth, kind="stable")
    return _with_depths(order, depth[order])

  def __eq__(self, other: object) -> bool:
    """Whether the counts are equal: modules are compared and hashed by their fields."""
    return isinstance(other, Huffman) and np.array_equal(self.counts, other.counts)

  def __hash__(self) -> int:
    """Of the counts."""
    return hash(np.asarray(self.counts, np.int64).tobytes())


def _huffman_depths(counts: Int[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
  vocab = len(counts)
  # Among equal masses the oldest first: it is the shallowest.
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


def _with_depths(tokens: Int[np.ndarray, "V"], depths: Int[np.ndarray, "V"]) -> Tree:
  """The tree whose leaves have these depths, from left to right."""
  vocab = len(tokens)
  # Paths of nodes in the order in which they are met; a node's own number is known only when the
  # leaves on its left are done.
  paths = np.full((vocab, max(1, depths.max())), NO_NODE, np.int32)
  number = np.full(vocab, NO_NODE, np.int32)
  open_nodes, is_left, met = [], [], 0
  for leaf, depth in enumerate(depths.tolist()):
    new = depth - len(open_nodes)
    open_nodes += range(met, met + new)
    is_left += [True] * new
    met += new
    paths[leaf, :depth] = open_nodes
    while is_left and not is_left[-1]:
      open_nodes.pop()
      is_left.pop()
    if is_left:
      is_left[-1] = False
      number[open_nodes[-1]] = leaf
  return Tree(tokens.astype(np.int32), np.where(paths < 0, NO_NODE, number[paths]))
