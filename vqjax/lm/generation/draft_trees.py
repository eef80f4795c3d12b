"""Trees of draft tokens: several continuations that one pass of a model verifies together.

Source: Miao et al., SpecInfer, 2023; Cai et al., Medusa, 2024, Section 2.1.2.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

__all__ = ["DraftTree"]


def is_whole(value: Any) -> bool:
  """Whether a value is an integer of Python or NumPy; a bool is not."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, remedy: str) -> None:
  """Raise ValueError unless a value is an integer of at least 1."""
  if not is_whole(value) or value < 1:
    raise ValueError(f"`{name}` must be an integer of at least 1; got {value!r}. {remedy}")


@dataclasses.dataclass(frozen=True)
class DraftTree:
  """The shape of a draft: which ranks of the drafter's tokens are tried, and after which others.

  A node is the path of ranks to it: (0, 2) is the third likeliest token after the likeliest one.
  Nodes are numbered by depth, then by their ranks; node 0, the empty path, is the token that the
  model has drawn last.

  Attributes:
    paths: paths of ranks, all different, such as those of all leaves. Every beginning of a path is
      a node too.
  """

  paths: Sequence[Sequence[int]]

  def __post_init__(self):
    given = tuple(map(tuple, self.paths))
    if broken := [path for path in given if not all(map(is_whole, path))]:
      raise ValueError(
        f"`paths` must have ranks that are integers; got {broken[0]}. 0 is the likeliest token,"
        " and 1 the second."
      )
    paths = tuple(tuple(map(int, path)) for path in given)
    object.__setattr__(self, "paths", paths)  # hashable, so that programs are compiled once
    if not paths or () in paths:
      raise ValueError(
        f"`paths` must have at least one path, of at least one rank each; got {list(paths)}. Give"
        " [(0,)] for a single draft token, or leave the drafter out."
      )
    if min(map(min, paths)) < 0:
      raise ValueError(
        f"`paths` must have ranks of at least 0; got {min(paths, key=min)}. 0 is the likeliest."
      )
    path, count = Counter(paths).most_common(1)[0]
    if count > 1:
      raise ValueError(
        f"`paths` must be all different; got {path} {count} times. Leave repetitions out."
      )

  @staticmethod
  def chain(length: int) -> DraftTree:
    """The likeliest token at each of `length` depths."""
    check_count("length", length, "4 is usual; without a drafter, leave `drafter` out.")
    return DraftTree([(0,) * length])

  @staticmethod
  def best(ranks: Int[np.ndarray, "N K"], size: int) -> DraftTree:
    """The tree of at most `size` draft tokens with the highest `tokens_per_pass` on a text.

    Nodes are added one at a time, the one that is reached most often first. Since no node is
    reached more often than the one before it, no other choice is better.

    Args:
      ranks: rank that the drafter gives to the token that follows at each of K depths; negative
        where it is not among the drafter's candidates.
      size: number of draft tokens.

    Raises:
      ValueError: no token is ever among the candidates, or `size` is not an integer of at least 1.
    """
    check_count("size", size, "16 to 64 are usual.")
    reached: Counter[tuple[int, ...]] = Counter()
    for row in np.asarray(ranks).tolist():
      known = next((depth for depth, rank in enumerate(row) if rank < 0), len(row))
      reached.update(tuple(row[:depth]) for depth in range(1, known + 1))
    if not reached:
      raise ValueError(
        f"`ranks` must have a rank of at least 0 in the first column; got {len(ranks)} rows without"
        " one. Train the drafter, or give more candidates."
      )
    # A node that is reached as often as one before it on its path comes after it.
    order = sorted(reached, key=lambda path: (-reached[path], len(path), path))
    return DraftTree(order[:size])

  def tokens_per_pass(self, ranks: Int[np.ndarray, "N K"]) -> float:
    """Mean number of tokens that a pass adds to a text, its own token included.

    Args:
      ranks: as in `best`, of a text that the tree was not chosen on.
    """
    nodes = set(self.nodes)
    known = lambda row: sum(tuple(row[:depth]) in nodes for depth in range(1, self.depth + 1))
    return 1 + float(np.mean([known(row) for row in np.asarray(ranks).tolist()]))

  def check_width(self, vocab: int) -> None:
    """Raise ValueError if a rank is not below a number of tokens."""
    if self.width > vocab:
      raise ValueError(
        f"`tree` must have ranks below the {vocab} tokens of the drafter's head; got"
        f" {self.width - 1}. Leave these paths out."
      )

  @functools.cached_property
  def nodes(self) -> tuple[tuple[int, ...], ...]:
    """The path to each node, the root's first."""
    found = {path[:depth] for path in self.paths for depth in range(len(path) + 1)}
    return tuple(sorted(found, key=lambda path: (len(path), path)))

  @property
  def size(self) -> int:
    """Number of draft tokens."""
    return len(self.nodes) - 1

  @property
  def depth(self) -> int:
    """Number of draft tokens on the longest path."""
    return len(self.nodes[-1])

  @property
  def width(self) -> int:
    """Number of candidates that are needed at each depth: the highest rank, and one."""
    return 1 + max(map(max, self.paths))

  @functools.cached_property
  def depths(self) -> Int[np.ndarray, "nodes"]:
    """The depth of each node, 0 of the root."""
    return np.array([len(path) for path in self.nodes], np.int32)

  @functools.cached_property
  def ranks(self) -> Int[np.ndarray, "nodes"]:
    """The last rank of each node's path; 0 of the root."""
    return np.array([path[-1] if path else 0 for path in self.nodes], np.int32)

  @functools.cached_property
  def parents(self) -> Int[np.ndarray, "nodes"]:
    """The node before each node; the root's own for the root."""
    number = {path: index for index, path in enumerate(self.nodes)}
    return np.array([number[path[:-1]] for path in self.nodes], np.int32)

  @functools.cached_property
  def sees(self) -> Bool[np.ndarray, "nodes nodes"]:
    """Whether the path to the node of a row leads through that of a column, itself included."""
    return np.array([[path[: len(of)] == of for of in self.nodes] for path in self.nodes])

  @functools.cached_property
  def ways(self) -> Int[np.ndarray, "nodes steps"]:
    """The nodes from the root to each node; after it, entry d is d, whatever node that is."""
    number = {path: index for index, path in enumerate(self.nodes)}
    way = lambda path: [number[path[:depth]] for depth in range(len(path) + 1)]
    steps = list(range(self.depth + 1))
    return np.array([way(path) + steps[len(path) + 1 :] for path in self.nodes], np.int32)
