"""An order of the vocabulary in clusters of equal size, by repeated bisection."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import checked_rows
from vqjax.ops.groups import group_starts

__all__ = ["bisected"]

POWER_STEPS = 6
"""Steps of the power iteration that finds the widest direction of a part."""

SWAPS = 6
"""Rounds of two-means after it."""


def bisected(
  embeddings: ArrayLike,
  clusters: int,
  *,
  metric: Float[np.ndarray, "D D"] | None = None,
  seed: int = 0,
) -> Int[np.ndarray, "V"]:
  """The tokens, cluster after cluster, all clusters of one size or of one token fewer.

  The vocabulary is cut in two, and so are the parts until each is a cluster. A cut begins across
  the widest direction of the rows and goes on as two-means whose means have a fixed number of rows:
  rows are sorted by their projection on the difference of the means. It takes O(V D log C) time
  where balanced k-means takes O(V D C): a minute for 262,144 rows of width 640.

  Args:
    embeddings: one row for each token, [V, D].
    clusters: number of clusters, C; cluster c has the tokens at `ops.groups.group_starts(V, C)`.
    metric: errors e of rows cost eᵀ metric e, such as `Moments.metric()`: rows that hidden states
      tell apart are far from each other. None: Euclidean distances.
    seed: seed of the first direction of the power iterations.

  Raises:
    ValueError: there are more clusters than tokens, rows are not finite, or the metric has another
      width.
  """
  rows = checked_rows(embeddings, clusters)
  vocab, dim = rows.shape
  if metric is not None:
    if np.shape(metric) != (dim, dim):
      raise ValueError(
        f"`metric` must have the width of the rows, {dim}; got shape {np.shape(metric)}. Take the"
        " moments of the model whose rows are given."
      )
    values, vectors = np.linalg.eigh(np.asarray(metric, np.float64))
    rows = rows @ (vectors * np.sqrt(np.maximum(values, 0))).astype(np.float32)
  starts, start = group_starts(vocab, clusters), np.random.default_rng(seed).normal(size=dim)
  order = np.arange(vocab, dtype=np.int32)
  parts = [(0, clusters)]
  while parts:
    first, last = parts.pop()
    if last - first == 1:
      continue
    middle = (first + last) // 2
    own = order[starts[first] : starts[last]]
    order[starts[first] : starts[last]] = own[
      _cut(rows[own], starts[middle] - starts[first], start)
    ]
    parts += [(first, middle), (middle, last)]
  return order


def _cut(rows, left, direction):
  """An order of the rows of which the first `left` are one part."""
  rows = rows - rows.mean(axis=0)
  direction = direction.astype(np.float32)
  for _ in range(POWER_STEPS):
    direction = rows.T @ (rows @ direction)
    direction /= np.linalg.norm(direction) or 1.0
  for _ in range(SWAPS):
    order = np.argpartition(rows @ direction, left)
    direction = rows[order[left:]].mean(axis=0) - rows[order[:left]].mean(axis=0)
  return np.argpartition(rows @ direction, left)
