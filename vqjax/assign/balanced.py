"""Which tokens share a code by their embeddings, where no code may have too many of them?"""

import itertools

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray
from numpy.typing import ArrayLike

from vqjax.assign.clusters import Clustering, by_kmeans
from vqjax.assign.table import checked_rows, checked_weights

CHUNK = 4096

PATIENCE = 300
"""Rounds of bids until they rise twice as fast."""


def balanced_kmeans(
  embeddings: ArrayLike,
  codes: int,
  *,
  key: PRNGKeyArray,
  capacity: int | None = None,
  weights: ArrayLike | None = None,
  iterations: int = 20,
) -> Clustering:
  """K-means in which no code has more than `capacity` tokens.

  Starts from the centres of `by_kmeans`, then alternates between `assigned_within` and weighted
  means as long as that lowers the sum of weighted squared distances.

  Args:
    embeddings: a row a token, [V, D].
    codes: number of codes, K.
    key: what the seeding draws with.
    capacity: most tokens on a code; None: ceil(V / K), which makes all codes equal.
    weights: how much each token matters, at least 0, [V]; None: all alike.
    iterations: of Lloyd's algorithm, then of the alternation, at most.

  Raises:
    ValueError: as `by_kmeans`; a capacity that leaves tokens without a code.
  """
  rows = checked_rows(embeddings, codes)
  weights = checked_weights(weights, len(rows))
  capacity = -(-len(rows) // codes) if capacity is None else capacity
  start = by_kmeans(rows, codes, key=key, weights=weights, iterations=iterations).centers
  table = assigned_within(rows, start, capacity, weights=weights)
  best = Clustering(table, _means(rows, weights, table, start))
  for _ in range(iterations):
    table = assigned_within(rows, best.centers, capacity, weights=weights)
    found = Clustering(table, _means(rows, weights, table, best.centers))
    if _inertia(rows, weights, found) >= _inertia(rows, weights, best):
      break
    best = found
  return best


def assigned_within(
  embeddings: ArrayLike, centers: ArrayLike, capacity: int, *, weights: ArrayLike | None = None
) -> Int[np.ndarray, "V"]:
  """The codes with the least sum of weighted squared distances, at most `capacity` tokens on each.

  By an auction: a token without a code bids for the one that is best at present prices, as much as
  makes the second best no better, and a little more; a full code keeps its highest bids and costs
  the lowest of them. The "little" is 5% of the mean distance without a capacity, and so at most is
  the sum above the least one, a token; where bids do not settle, as those of many equal rows, it
  doubles every 300 rounds, and this bound with it. (Weights below 1/1000 of their mean are raised
  to that.) Source: Bertsekas and Castanon, "The auction algorithm for the transportation problem",
  Annals of Operations Research 20 (1989), Section 3.

  Args:
    embeddings: a row a token, [V, D].
    centers: a row a code, [K, D].
    capacity: most tokens on a code.
    weights: how much each token matters, at least 0, [V]; None: all alike.

  Raises:
    ValueError: rows that are not finite, wrong weights, too little capacity for all tokens.
  """
  centers = np.asarray(centers, np.float32)
  rows = checked_rows(embeddings, len(centers))
  weights = checked_weights(weights, len(rows))
  if capacity * len(centers) < len(rows):
    raise ValueError(
      f"{len(centers)} codes of capacity {capacity} hold no {len(rows)} tokens; give a capacity of"
      f" at least {-(-len(rows) // len(centers))}"
    )
  auction = _Auction(rows, centers, capacity, weights)
  for round_number in itertools.count(1):
    if not auction.free.size:
      return auction.table
    auction.bid()
    if round_number % PATIENCE == 0:
      auction.raise_V *= 2


class _Auction:
  """Who holds which code at what bid. `free` are the tokens without one."""

  def __init__(self, rows, centers, capacity, weights):
    self.rows, self.centers, self.capacity = rows, centers, capacity
    self.square_K = np.square(centers).sum(axis=1)
    self.weight_V = np.maximum(weights, weights.mean() * 1e-3).astype(np.float64)
    self.table = np.full(len(rows), -1, np.int32)
    self.bid_V = np.zeros(len(rows))
    self.price_K = np.zeros(len(centers))
    self.free = np.arange(len(rows))
    nearest = np.concatenate([self._distances(part).min(axis=1) for part in self._chunks()])
    # 1 where no distance is above 0: a bid must go up.
    self.raise_V = 0.05 * self.weight_V * (np.average(nearest, weights=self.weight_V) or 1.0)

  def _chunks(self):
    return np.split(self.free, range(CHUNK, len(self.free), CHUNK))

  def _distances(self, tokens) -> Float[np.ndarray, "n K"]:
    rows = self.rows[tokens]
    product = rows @ self.centers.T
    return np.maximum(np.square(rows).sum(axis=1)[:, None] - 2 * product + self.square_K, 0)

  def bid(self):
    """One round: every free token bids, then the codes that are too full let tokens go."""
    for part in self._chunks():
      cost_nK = self.weight_V[part, None] * self._distances(part) + self.price_K
      code_n = cost_nK.argmin(axis=1)
      lowest_n = np.take_along_axis(cost_nK, code_n[:, None], axis=1)[:, 0]
      np.put_along_axis(cost_nK, code_n[:, None], np.inf, axis=1)
      second_n = cost_nK.min(axis=1) if len(self.centers) > 1 else lowest_n
      self.table[part] = code_n
      self.bid_V[part] = self.price_K[code_n] + second_n - lowest_n + self.raise_V[part]
    self._let_go()

  def _let_go(self):
    held = np.flatnonzero(self.table >= 0)
    order = held[np.lexsort((held, -self.bid_V[held], self.table[held]))]
    code = self.table[order]
    size_K = np.bincount(code, minlength=len(self.centers))
    first_K = np.cumsum(size_K) - size_K
    full = np.flatnonzero(size_K >= self.capacity)
    self.price_K[full] = self.bid_V[order[first_K[full] + self.capacity - 1]]
    self.free = np.sort(order[np.arange(len(order)) - first_K[code] >= self.capacity])
    self.table[self.free] = -1


def _means(rows, weights, table, fallback) -> Float[np.ndarray, "K D"]:
  """The weighted mean of each code's rows; the fallback's for a code without weight."""
  order = np.argsort(table, kind="stable")
  codes, first = np.unique(table[order], return_index=True)
  weight = np.add.reduceat(weights[order].astype(np.float64), first)
  total = np.add.reduceat((weights[:, None] * rows)[order], first, axis=0, dtype=np.float64)
  means = np.array(fallback, np.float32)
  some = weight > 0
  means[codes[some]] = total[some] / weight[some, None]
  return means


def _inertia(rows, weights, found: Clustering) -> float:
  distance = np.square(rows - found.centers[found.assignment]).sum(axis=1, dtype=np.float64)
  return float((weights * distance).sum())
