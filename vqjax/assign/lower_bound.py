"""Which perplexity can no model reach whose tokens share these codes?"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax.assign.table import check_codes, checked, checked_counts

WORST = 20


class Offender(NamedTuple):
  """What one token adds to the floor.

  Attributes:
    token: the token.
    count: its occurrences.
    code: the code it sits on.
    shared: tokens on that code, itself included.
    nats: what all its occurrences cost together, however well their code is predicted.
  """

  token: int
  count: int
  code: int
  shared: int
  nats: float


@dataclasses.dataclass(frozen=True, eq=False)
class Floor:
  """The loss that a codebook head has on a text even where each code is predicted with certainty.

  Attributes:
    nats: that loss, in nats a token.
    sizes: number of tokens on each code, int64 [K].
    dead: the codes that no token sits on, int64 [number of them].
    worst: the tokens that cost most, the worst first; at most 20, none that costs nothing.
  """

  nats: float
  sizes: Int[np.ndarray, "K"]
  dead: Int[np.ndarray, "Dead"]
  worst: tuple[Offender, ...]

  @property
  def perplexity(self) -> float:
    """exp(nats): no model body can reach a lower one."""
    return math.exp(self.nats)


def floor(
  assignment: ArrayLike, counts: ArrayLike, *, codes: int | None = None, token_bias: bool = False
) -> Floor:
  """The lowest loss of a `CodebookHead` on a text with these counts, whatever its body is.

  p(v) = p(code of v) · p(v | code), and p(v | code) does not depend on the hidden vector. Without a
  token bias it is 1/n for n tokens on the code: the floor is E[log n], reached where every code is
  predicted with certainty. With a token bias it is one fixed distribution, at best the text's own
  frequencies inside the code: the floor is the conditional entropy H(token | code), which is never
  higher, and is 0 only where no code has two tokens that occur. A bias that was fitted to another
  text stays above it.

  Args:
    assignment: the code of each token, integers [V].
    counts: occurrences of each token in the text, integers [V]; some may be zero.
    codes: number of codes, K; None: up to the highest one that has a token.
    token_bias: whether the head has a token bias.

  Raises:
    ValueError: a table that is no assignment, or counts that are none (see `checked_counts`).
  """
  counts = checked_counts(counts)
  if codes is None:
    codes = int(np.max(checked(assignment, len(counts), 2**31))) + 1
  table = checked(assignment, len(counts), codes)
  check_codes(len(counts), codes)
  sizes = np.bincount(table, minlength=codes)
  nats = _cost_within(table, counts, codes) if token_bias else np.log(sizes[table])
  cost = counts * nats
  worst = np.argsort(-cost, kind="stable")[:WORST]
  return Floor(
    nats=float(cost.sum() / counts.sum()),
    sizes=sizes,
    dead=np.flatnonzero(sizes == 0),
    worst=tuple(
      Offender(int(v), int(counts[v]), int(table[v]), int(sizes[table[v]]), float(cost[v]))
      for v in worst
      if cost[v] > 0
    ),
  )


def _cost_within(
  table: Int[np.ndarray, "V"], counts: Int[np.ndarray, "V"], codes: int
) -> Float[np.ndarray, "V"]:
  """-log p(v | code of v) where p are the frequencies of the counts; 0 for a token without any."""
  mass = np.bincount(table, weights=counts, minlength=codes)
  return np.log(np.where(counts > 0, mass[table], 1)) - np.log(np.maximum(counts, 1))
