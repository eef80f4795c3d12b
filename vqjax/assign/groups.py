"""Groups of the vocabulary from a clustering, and the group count of least memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import REMEDY, check_shape, table_of

__all__ = ["Grouping", "grouping", "memory_groups", "ordered_in_groups"]


class Grouping(NamedTuple):
  """Groups of a vocabulary, for `GroupedHead(sizes=..., order_init=...)`.

  Attributes:
    sizes: number of tokens of each group.
    order: the tokens, group after group.
  """

  sizes: tuple[int, ...]
  order: Int[np.ndarray, "V"]


def grouping(assignment: ArrayLike | tuple) -> Grouping:
  """One group for each cluster, with the tokens of the group in order of their ids.

  Args:
    assignment: the cluster of each token, integers [V] in [0, G), each of which occurs.

  Raises:
    ValueError: there are no tokens, no integers, a negative cluster, or a cluster without tokens.
  """
  table = np.asarray(table_of(assignment))
  check_shape(table.shape, table.size)
  if not table.size or not np.issubdtype(table.dtype, np.integer):
    raise ValueError(
      f"`assignment` must hold integers; got {table.dtype}{list(table.shape)}. {REMEDY}"
    )
  if table.min() < 0:
    token = np.argmax(table < 0)
    raise ValueError(
      f"`assignment` must be at least 0; got {table[token]} for token {token}. {REMEDY}"
    )
  used, sizes = np.unique(table, return_counts=True)
  count = int(used[-1]) + 1
  if len(used) < count:
    empty = np.argmax(used != np.arange(len(used)))
    raise ValueError(
      f"`assignment` must use every cluster in [0, {count}); got no token in cluster {empty}"
      f" ({count - len(used)} such clusters). Renumber them:"
      " np.unique(assignment, return_inverse=True)[1]."
    )
  order = np.argsort(table, kind="stable").astype(np.int32)
  return Grouping(tuple(sizes.tolist()), order)


def in_order(key: Any, shape: tuple[int, ...], dtype: Any) -> Int[Array, "V"]:
  """The identity order: an `order_init` for a head that a text or a conversion reorders."""
  del key
  return jnp.arange(shape[0], dtype=dtype)


def ordered_in_groups(
  cluster: Int[np.ndarray, "V"], counts: Int[np.ndarray, "V"], sizes: Int[np.ndarray, "G"]
) -> Int[np.ndarray, "V"]:
  """The tokens, group after group: a cluster in each, the most frequent tokens first.

  The largest cluster goes to the largest group, the second largest to the second largest, and so
  on. If a cluster is larger than its group, its rarest tokens move to groups with free slots.

  Args:
    cluster: the cluster of each token, in [0, G).
    counts: number of occurrences of each token.
    sizes: number of tokens of each group.
  """
  groups = len(sizes)
  largest_first = lambda sizes: np.argsort(-sizes, kind="stable")
  group_of_cluster = np.empty(groups, np.int64)
  cluster_sizes = np.bincount(cluster, minlength=groups)
  group_of_cluster[largest_first(cluster_sizes)] = largest_first(sizes)
  group = group_of_cluster[cluster]
  order = np.lexsort((-counts, group))
  tokens = np.bincount(group, minlength=groups)
  rank = np.arange(len(order)) - (np.cumsum(tokens) - tokens)[group[order]]
  left_over = order[rank >= sizes[group[order]]]
  group[left_over] = np.repeat(np.arange(groups), np.maximum(sizes - tokens, 0))
  return np.lexsort((-counts, group))


def memory_groups(vocab: int, arrays: float | int = 4) -> int:
  """The number of groups G for which a grouped head needs the least memory.

  For each scored token the loss and its gradient hold the scores of G groups, and c = `arrays`
  arrays of S numbers: by default the shared scores, the scale and the shift of the token's group,
  and the cotangent of its scores. G + c·S is least at S = sqrt(V/c). Source: LLM Vocabulary
  Compression for Low-Compute Environments, Section 2.4, which counts one array and so derives
  S = sqrt(V).

  Args:
    vocab: number of tokens, V.
    arrays: number of arrays [N, S] that are alive for one array [N, G].

  Raises:
    ValueError: `vocab` is less than 1, or `arrays` is not positive and finite.
  """
  if vocab < 1:
    raise ValueError(f"`vocab` must be at least 1; got {vocab}. Give the number of tokens.")
  if not 0 < arrays < math.inf:
    raise ValueError(f"`arrays` must be positive and finite; got {arrays}. 4 is usual.")
  return max(1, min(vocab, round(math.sqrt(vocab * arrays))))
