"""How many groups should a vocabulary have, and what groups are those of a clustering?"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.table import REMEDY, check_shape


class Grouping(NamedTuple):
  """Groups of a vocabulary, for `GroupedHead(sizes=..., order_init=...)`.

  Attributes:
    sizes: number of tokens of each group.
    order: the tokens, group after group.
  """

  sizes: tuple[int, ...]
  order: Int[np.ndarray, "V"]


def grouping(assignment: ArrayLike) -> Grouping:
  """The groups that hold the tokens of each cluster, in order of the clusters, then of the tokens.

  Args:
    assignment: the cluster of each token, integers [V] of 0 to G - 1, each of which is used.

  Raises:
    ValueError: no token, no integers, a negative cluster, or one between that has no token.
  """
  table = np.asarray(assignment)
  check_shape(table.shape, table.size)
  if not table.size or not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f"an assignment {table.dtype}{table.shape} names no clusters{REMEDY}")
  if table.min() < 0:
    token = np.argmax(table < 0)
    raise ValueError(f"token {token} is in cluster {table[token]}; number them from 0 on{REMEDY}")
  used, sizes = np.unique(table, return_counts=True)
  count = int(used[-1]) + 1
  if len(used) < count:
    empty = np.argmax(used != np.arange(len(used)))
    raise ValueError(
      f"cluster {empty} of {count} has no token ({count - len(used)} such clusters); number those"
      " that have one from 0 on: np.unique(assignment, return_inverse=True)[1]"
    )
  order = np.argsort(table, kind="stable").astype(np.int32)
  return Grouping(tuple(sizes.tolist()), order)


def memory_groups(vocab: int, arrays: float | int = 4) -> int:
  """The number of groups G, with S = V/G slots, that takes the least memory for each token.

  For each token that is scored the loss and its gradient hold G scores of groups and, of S numbers
  each, c = `arrays`: by default the shared scores, the scale and the shift of the token's group,
  and the cotangent of its scores. G + c·S is least at S = sqrt(V/c). Section 2.4 of the paper
  counts one array of S, and so finds S = sqrt(V).

  Args:
    vocab: number of tokens, V.
    arrays: how many arrays of N·S are alive for one of N·G.

  Raises:
    ValueError: no token, or no positive number of arrays.
  """
  if vocab < 1:
    raise ValueError(f"vocab {vocab} holds no token; give at least 1")
  if not 0 < arrays < math.inf:
    raise ValueError(f"arrays {arrays} is no count of arrays; give more than 0, such as 4")
  return max(1, min(vocab, round(math.sqrt(vocab * arrays))))
