"""In which order do the tokens lie that a head cuts into groups?

An order is a frozen dataclass that is called with what is known and the number of tokens of each
group, and gives the token at each position, int [V].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vqjax import assign
from vqjax.assign.blocks import by_frequency
from vqjax.convert.mappings import Mapping, TokenStats
from vqjax.heads import Head
from vqjax.ops.groups import check_order

Ordering = Callable[[TokenStats, Int[np.ndarray, "G"]], Int[np.ndarray, "V"]]


@dataclasses.dataclass(frozen=True)
class ByFrequency:
  """The most frequent tokens in the first group, the rarest in the last; ties by their numbers."""

  def __call__(self, known: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    """The token at each position."""
    del sizes
    return by_frequency(known.counts)


@dataclasses.dataclass(frozen=True)
class Shuffled:
  """An order drawn at random.

  Attributes:
    seed: of the draw.
  """

  seed: int = 0

  def __call__(self, known: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    """The token at each position."""
    del sizes
    return np.random.default_rng(self.seed).permutation(len(known.counts))


@dataclasses.dataclass(frozen=True)
class ByClusters:
  """Tokens of one cluster in one group; the most frequent first.

  The largest cluster goes to the largest group, and so on. Of a cluster that is larger than its
  group the rarest tokens go where there is room.

  Attributes:
    mapping: makes as many clusters as there are groups; `Balanced()` leaves least over.
  """

  mapping: Mapping

  def __call__(self, known: TokenStats, sizes: Int[np.ndarray, "G"]) -> Int[np.ndarray, "V"]:
    """The token at each position."""
    groups = len(sizes)
    cluster = assign.checked(self.mapping(known, groups), len(known.counts), groups)
    group_of = np.empty(groups, np.int64)
    group_of[_largest_first(np.bincount(cluster, minlength=groups))] = _largest_first(sizes)
    group = group_of[cluster]
    order = np.lexsort((-known.counts, group))
    tokens = np.bincount(group, minlength=groups)
    rank = np.arange(len(order)) - (np.cumsum(tokens) - tokens)[group[order]]
    left_over = order[rank >= sizes[group[order]]]
    group[left_over] = np.repeat(np.arange(groups), np.maximum(sizes - tokens, 0))
    return np.lexsort((-known.counts, group))


def _largest_first(sizes):
  return np.argsort(-sizes, kind="stable")


def in_order(key: Array, shape: tuple[int, ...], dtype: Any) -> Int[Array, "V"]:
  """Token v at position v: the `order_init` of a head whose order a run's start is to set."""
  del key
  return jnp.arange(shape[0], dtype=dtype)


def ordered(by: Ordering, known: TokenStats, head: Head) -> Int[np.ndarray, "V"]:
  """The order `by` of a grouped head's tokens; ValueError where the head keeps none."""
  if getattr(head, "order_init", None) is None:
    raise ValueError(
      f"{by} orders the tokens of a head that keeps their order, which this {type(head).__name__}"
      " does not; give it order_init=convert.in_order"
    )
  order = np.asarray(by(known, np.diff(head.starts)))
  check_order(order, head.vocab)
  return order.astype(np.int32)


def as_codes(order: Int[np.ndarray, "V"]) -> dict[str, np.ndarray]:
  """What a head keeps of an order: the token at each position, and the position of each token."""
  return {"order": order, "position": np.argsort(order).astype(np.int32)}
