"""With which groups, and which parameters of a grouped head, does a run begin?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from vqjax.convert.mappings import TokenStats
from vqjax.convert.orders import Ordering, as_codes, ordered
from vqjax.convert.targets import check_kind
from vqjax.heads import GroupedHead, Head, UnsharedGroupedHead

RIDGE = 0.1
"""Of the mean hidden vector, in units of the mean variance of the rows along a direction."""


@dataclasses.dataclass(frozen=True)
class ToGrouped:
  """A grouped head, shared or not, whose distribution is near to that of the dense rows.

  A token's row is its group's mean row and a rest. Within a group only the rests matter:
  `UnsharedGroupedHead` keeps them, so that p(token | group) is exact, and `GroupedHead` has their
  least-squares approximation: of all rests in one slot a common vector, with a scale for each; the
  shift is what this leaves of the score of the mean hidden vector. A group's own score is that of
  its mean row, moved by what its tokens' share of the text asks for at the mean hidden vector: by
  its bias, or without biases along that vector. Nobody knows the hidden vectors here: their mean is
  that whose scores are nearest to the log-frequencies, and their variance is taken to be 1.

  Attributes:
    power: rows weigh (count + 1)^power in means and least squares.
    by: the order of the tokens, for a head with an `order_init`; None: what that gives.
  """

  power: float = 0.75
  by: Ordering | None = None

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables; TypeError for a head that has no groups of slots."""
    unshared = isinstance(head, UnsharedGroupedHead)
    check_kind(head, UnsharedGroupedHead if unshared else GroupedHead, self)
    order = self._order(known, head)
    parts = _Parts.of(known, order, head.starts, self.power)
    mean = _mean_hidden(known)
    params = _group_params(parts, known.counts[order], mean, head.use_bias)
    params |= _own_slots(parts) if unshared else _shared_slots(parts, mean)
    if head.use_bias:
      params["slot_bias"] = np.zeros(params["slot_weight"].shape[:-1])
    kept = {} if head.order_init is None else {"codes": as_codes(order)}
    return {"params": params} | kept

  def _order(self, known: TokenStats, head: Head) -> Int[np.ndarray, "V"]:
    if self.by is not None:
      return ordered(self.by, known, head)
    if head.order_init is None:
      return np.arange(head.vocab)
    given = head.order_init(jax.random.key(0), (head.vocab,), jnp.int32)
    return ordered(lambda known, sizes: given, known, head)


@dataclasses.dataclass(frozen=True)
class _Parts:
  """Rows at their positions: the means of the groups, what is left, and where each position lies."""

  means: Float[np.ndarray, "G D"]
  rest: Float[np.ndarray, "V D"]
  weights: Float[np.ndarray, "V"]
  group: Int[np.ndarray, "V"]
  slot: Int[np.ndarray, "V"]

  @classmethod
  def of(cls, known, order, starts, power):
    rows = np.asarray(known.output, np.float64)[order]
    weights = (known.counts[order] + 1.0) ** power
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    add = lambda numbers: np.add.reduceat(numbers, starts[:-1])
    means = add(rows * weights[:, None]) / add(weights)[:, None]
    slot = np.arange(len(rows)) - starts[group]
    return cls(means, rows - means[group], weights, group, slot)

  @property
  def shape(self) -> tuple[int, int]:
    """(G, S)."""
    return len(self.means), int(self.slot.max()) + 1


def _mean_hidden(known) -> Float[np.ndarray, "D"]:
  """The vector whose scores are nearest to log(count + 1), up to a constant, by ridge regression.

  Zero where the counts are all alike.
  """
  rows = np.asarray(known.output, np.float64)
  rows = rows - rows.mean(axis=0)
  wanted = np.log(known.counts + 1.0)
  second = rows.T @ rows
  ridge = RIDGE * np.trace(second) / len(second) or 1.0
  return np.linalg.solve(second + ridge * np.eye(len(second)), rows.T @ (wanted - wanted.mean()))


def _group_params(parts, counts, mean, use_bias) -> dict:
  mass = np.bincount(parts.group, counts + 1.0)
  missing = np.log(mass) - parts.means @ mean
  missing -= missing.mean()
  if use_bias:
    return {"group_weight": parts.means, "group_bias": missing}
  # hidden · along is nearest to 1, for hidden of this mean and of variance 1.
  along = mean / (1.0 + mean @ mean)
  return {"group_weight": parts.means + missing[:, None] * along}


def _own_slots(parts) -> dict:
  weight = np.zeros((*parts.shape, parts.rest.shape[1]))
  weight[parts.group, parts.slot] = parts.rest
  return {"slot_weight": weight}


def _shared_slots(parts, mean) -> dict:
  scale, shift = np.zeros(parts.shape), np.zeros(parts.shape)
  vectors = np.zeros((parts.shape[1], len(mean)))
  positions = np.split(
    np.argsort(parts.slot, kind="stable"), np.cumsum(np.bincount(parts.slot))[:-1]
  )
  for slot, position in enumerate(positions):
    rest, weights = parts.rest[position], parts.weights[position]
    vector = _common(rest, weights)
    mine = parts.group[position], slot
    vectors[slot], scale[mine] = vector, rest @ vector
    shift[mine] = rest @ mean - scale[mine] * (vector @ mean)
  return {"slot_weight": vectors, "scale": scale, "shift": shift}


def _common(rows, weights) -> Float[np.ndarray, "D"]:
  """The unit vector along which the weighted rows are longest; most of their mass points along."""
  vector = np.linalg.svd(rows * np.sqrt(weights)[:, None], full_matrices=False)[2][0]
  return vector if weights @ (rows @ vector) >= 0 else -vector
