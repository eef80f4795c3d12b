"""Orders of the tokens of a grouped head, and its parameters from dense rows.

An order is a frozen dataclass that is called as `order(stats, sizes)` with the number of tokens of
each group, and returns the token at each position, int [V].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax import assign
from vqjax.assign.blocks import by_frequency
from vqjax.assign.groups import in_order
from vqjax.convert.mappings import Mapping, TokenStats, as_mapping
from vqjax.convert.targets import check_kind
from vqjax.heads import GroupedHead, Head, UnsharedGroupedHead
from vqjax.ops.groups import check_order

__all__ = ["ByClusters", "ByFrequency", "Ordering", "Shuffled", "ToGrouped", "in_order"]

RIDGE = 0.1
"""Ridge penalty of the mean hidden vector, relative to the mean eigenvalue of the second moment."""

Ordering = Callable[[TokenStats, Int[np.ndarray, "G"]], Int[np.ndarray, "V"]]


@dataclasses.dataclass(frozen=True)
class ByFrequency:
  """Tokens by falling frequency; ties by token id."""

  def __call__(self, stats: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    del sizes
    return by_frequency(stats.counts)


@dataclasses.dataclass(frozen=True)
class Shuffled:
  """A random permutation of the tokens.

  Attributes:
    seed: seed of the permutation.
  """

  seed: int = 0

  def __call__(self, stats: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    del sizes
    return np.random.default_rng(self.seed).permutation(len(stats.counts))


@dataclasses.dataclass(frozen=True)
class ByClusters:
  """One cluster of tokens in each group, as `assign.ordered_in_groups` puts them.

  Attributes:
    mapping: makes as many clusters as there are groups; `Balanced()` moves the fewest tokens. Or
      the cluster of each token, an array [V].
  """

  mapping: Mapping | ArrayLike

  def __post_init__(self):
    object.__setattr__(self, "mapping", as_mapping(self.mapping))

  def __call__(self, stats: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    groups = len(sizes)
    cluster = assign.checked_assignment(self.mapping(stats, groups), len(stats.counts), groups)
    return assign.ordered_in_groups(cluster, stats.counts, sizes)


def token_order(by: Ordering, stats: TokenStats, head: Head) -> Int[np.ndarray, "V"]:
  """The token at each position of a grouped head, int32 [V].

  Raises:
    ValueError: the head has no order, or `by` does not return a permutation of its tokens.
  """
  if getattr(head, "order_init", None) is None:
    raise ValueError(
      f"`head` must have an order of its tokens to be set by {by}; got a {type(head).__name__}"
      " without one. Use a grouped head with order_init=convert.in_order."
    )
  order = np.asarray(by(stats, np.diff(head.starts)))
  check_order(order, head.vocab)
  return order.astype(np.int32)


def as_codes(order: Int[np.ndarray, "V"]) -> dict[str, np.ndarray]:
  """The "codes" variables of an ordered head: order and inverse order."""
  return {"order": order, "position": np.argsort(order).astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class ToGrouped:
  """Grouped-head variables whose distribution is near the dense one.

  A token's row is the sum of its group's mean row and a remainder. Within a group only the
  remainders matter: `UnsharedGroupedHead` keeps them, so that p(token | group) is exact.
  `GroupedHead` has their least-squares approximation: one vector for each slot, which is common to
  the groups, and a scale for each token; the shift corrects the score at the mean hidden vector.
  The score of a group is that of its mean row, corrected so that at the mean hidden vector it is
  the log-frequency of the group's tokens: by the group bias, or without biases along the mean
  hidden vector. The hidden vectors themselves are not given: their mean is estimated as the vector
  whose scores are nearest to the log-frequencies, and their variance is assumed to be 1. A trained
  output bias is kept inside the groups: as the slot bias of each group, or in the shifts.

  Attributes:
    power: in means and least squares the weight of a row is (count + 1)^power.
    by: the order of the tokens, for a head with an `order_init`; None: the order that
      `order_init` gives.
  """

  power: float = 0.75
  by: Ordering | None = None

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    """The head's variables; ValueError for a head without groups of slots."""
    unshared = isinstance(head, UnsharedGroupedHead)
    check_kind(head, UnsharedGroupedHead if unshared else GroupedHead, self)
    if unshared and stats.bias is not None and not head.use_bias:
      raise ValueError(
        "`head` must have a bias, because the rows were trained with one; got an"
        " UnsharedGroupedHead without. Give use_bias=True."
      )
    order = self._order(stats, head)
    counts, bias = stats.counts[order], _trained_bias(stats)[order]
    split = _Split.of(
      rows=np.asarray(stats.output, np.float64)[order],
      weights=(counts + 1.0) ** self.power,
      starts=head.starts,
    )
    mean_D = _mean_hidden(stats)

    missing_G = np.log(np.bincount(split.group, counts + 1.0)) - split.means @ mean_D
    missing_G -= missing_G.mean()
    if head.use_bias:
      params = {"group_weight": split.means, "group_bias": missing_G}
    else:
      # The expectation of hidden · along is nearest to 1 for hidden of this mean and variance 1.
      along_D = mean_D / (1.0 + mean_D @ mean_D)
      params = {"group_weight": split.means + missing_G[:, None] * along_D}
    params |= split.own_slots() if unshared else split.shared_slots(mean_D)
    if head.use_bias:
      params["slot_bias"] = np.zeros(params["slot_weight"].shape[:-1])
    kept = "slot_bias" if unshared else "shift"
    if kept in params:
      params[kept][split.group, split.slot] += bias
    codes = {} if head.order_init is None else {"codes": as_codes(order)}
    return {"params": params} | codes

  def _order(self, stats: TokenStats, head: Head) -> Int[np.ndarray, "V"]:
    if self.by is not None:
      return token_order(self.by, stats, head)
    if head.order_init is None:
      return np.arange(head.vocab)
    given = head.order_init(jax.random.key(0), (head.vocab,), jnp.int32)
    return token_order(lambda stats, sizes: given, stats, head)


@dataclasses.dataclass(frozen=True)
class _Split:
  """Rows in the order of the head, split into group means and remainders."""

  means: Float[np.ndarray, "G D"]
  rest: Float[np.ndarray, "V D"]
  weights: Float[np.ndarray, "V"]
  group: Int[np.ndarray, "V"]
  slot: Int[np.ndarray, "V"]

  @classmethod
  def of(cls, rows: np.ndarray, weights: np.ndarray, starts: np.ndarray) -> "_Split":
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    add = lambda numbers: np.add.reduceat(numbers, starts[:-1])
    means = add(rows * weights[:, None]) / add(weights)[:, None]
    slot = np.arange(len(rows)) - starts[group]
    return cls(means=means, rest=rows - means[group], weights=weights, group=group, slot=slot)

  def own_slots(self) -> dict:
    """A weight for each slot of each group, [G, S, D]; zero in the free slots."""
    groups, slots, dim = len(self.means), int(self.slot.max()) + 1, self.rest.shape[1]
    weight = np.zeros((groups, slots, dim))
    weight[self.group, self.slot] = self.rest
    return {"slot_weight": weight}

  def shared_slots(self, mean_D: np.ndarray) -> dict:
    """Weights [S, D] that all groups share, with scales and shifts [G, S]."""
    groups, slots, dim = len(self.means), int(self.slot.max()) + 1, self.rest.shape[1]
    scale, shift, vectors = np.zeros((groups, slots)), np.zeros((groups, slots)), []
    positions = np.split(
      np.argsort(self.slot, kind="stable"), np.cumsum(np.bincount(self.slot))[:-1]
    )
    for slot, at in enumerate(positions):
      rest, weights = self.rest[at], self.weights[at]
      # The first right singular vector; its sign makes the weighted mean of the scales positive.
      vector = np.linalg.svd(rest * np.sqrt(weights)[:, None], full_matrices=False)[2][0]
      vector = vector if weights @ (rest @ vector) >= 0 else -vector
      scale[self.group[at], slot] = rest @ vector
      shift[self.group[at], slot] = rest @ mean_D - (rest @ vector) * (vector @ mean_D)
      vectors.append(vector)
    return {"slot_weight": np.reshape(vectors, (slots, dim)), "scale": scale, "shift": shift}


def _trained_bias(stats: TokenStats) -> Float[np.ndarray, "V"]:
  return np.zeros(len(stats.counts)) if stats.bias is None else np.asarray(stats.bias, np.float64)


def _mean_hidden(stats: TokenStats) -> Float[np.ndarray, "D"]:
  """The vector whose scores are nearest to log(count + 1), by ridge regression.

  A trained bias counts as part of the scores. It is zero if all counts are equal.
  """
  rows = np.asarray(stats.output, np.float64)
  rows = rows - rows.mean(axis=0)
  log_counts = np.log(stats.counts + 1.0) - _trained_bias(stats)
  second = rows.T @ rows
  ridge = RIDGE * np.trace(second) / len(second) or 1.0
  centred = log_counts - log_counts.mean()
  return np.linalg.solve(second + ridge * np.eye(len(second)), rows.T @ centred)
