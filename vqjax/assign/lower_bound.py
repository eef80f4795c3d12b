"""The lowest perplexity that a codebook head with a given assignment can have."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import check_codes, checked_assignment, checked_counts

__all__ = ["Floor", "Offender", "floor", "least_floor"]

WORST = 20
"""Number of tokens that a `Floor` lists."""


class Offender(NamedTuple):
  """The part of the floor that one token contributes.

  Attributes:
    token: token id.
    count: number of its occurrences.
    code: its code.
    shared: number of tokens on that code, itself included.
    nats: loss of all its occurrences together if their code is predicted with certainty.
  """

  token: int
  count: int
  code: int
  shared: int
  nats: float


@dataclasses.dataclass(frozen=True, eq=False)
class Floor:
  """The loss of a codebook head on a text if each code is predicted with certainty.

  Attributes:
    nats: the loss in nats per token.
    sizes: number of tokens on each code, int64 [K].
    dead: the codes without tokens, int64.
    worst: the tokens that contribute most, in falling order; at most 20, without those of 0 nats.
  """

  nats: float
  sizes: Int[np.ndarray, "K"]
  dead: Int[np.ndarray, "Dead"]
  worst: tuple[Offender, ...]

  @property
  def perplexity(self) -> float:
    """exp(nats), below which no model can be."""
    return math.exp(self.nats)

  def __str__(self) -> str:
    codes = f"{self.sizes.size:,} codes, {self.dead.size:,} of them without tokens"
    return f"perplexity {self.perplexity:.2f} at least ({self.nats:.4f} nats a token; {codes})"


def floor(
  assignment: ArrayLike | tuple,
  counts: ArrayLike,
  *,
  codes: int | None = None,
  token_bias: bool = False,
) -> Floor:
  """The lowest loss of any model with a `CodebookHead` on a text with these counts.

  p(v) = p(code of v) · p(v | code), and p(v | code) does not depend on the hidden vector. Without a
  token bias it is 1/n for n tokens on the code: the floor is E[log n], which is reached if every
  code is predicted with certainty. With a token bias it is one fixed distribution, at best the
  frequencies of the text within the code: the floor is the conditional entropy H(token | code). It
  is at most E[log n], and 0 only if no code has two tokens that occur. A bias that was fitted to
  another text has a higher floor.

  Args:
    assignment: the code of each token, integers [V].
    counts: number of occurrences of each token in the text, integers [V].
    codes: number of codes, K; None: the highest code of the assignment plus 1.
    token_bias: the head has a token bias.

  Raises:
    ValueError: the assignment or the counts are not valid (see `checked_counts`).

  Example:
    Half of the text is on a code of three tokens, which are equally likely:

    >>> from vqjax import assign
    >>> bound = assign.floor([0, 1, 1, 1], counts=[50, 25, 25, 0])
    >>> print(f"{bound.perplexity:.3f}", bound.sizes)
    1.732 [1 3]
  """
  counts = checked_counts(counts)
  if codes is None:
    codes = int(np.max(checked_assignment(assignment, len(counts), 2**31))) + 1
  table = checked_assignment(assignment, len(counts), codes)
  check_codes(len(counts), codes)
  sizes = np.bincount(table, minlength=codes)
  if token_bias:
    # -log p(v | code of v) under the frequencies of the counts; 0 for a token that does not occur.
    mass = np.bincount(table, weights=counts, minlength=codes)
    nats = np.log(np.where(counts > 0, mass[table], 1)) - np.log(np.maximum(counts, 1))
  else:
    nats = np.log(sizes[table])
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


def least_floor(counts: ArrayLike, codes: int) -> float:
  """The perplexity below which no assignment without a token bias can be.

  Each of n tokens on a code has 1/n of it, so that an assignment to K codes has Σ_v 1/n_v = K. Over
  all real n_v of at least 1 with this sum, E[log n] is least where n_v = max(1, c / p_v) for tokens
  of probability p_v: the most frequent alone, the rest in proportion. Whole tokens on whole codes
  can only be above it.

  Args:
    counts: number of occurrences of each token in the text, integers [V].
    codes: number of codes, K.

  Raises:
    ValueError: the counts are not valid (see `checked_counts`), or `codes` is not in [2, V].

  Example:
    >>> from vqjax import assign
    >>> round(assign.least_floor([50, 25, 25, 0], codes=2), 2)
    1.41
  """
  counts = checked_counts(counts)
  check_codes(len(counts), codes)
  p = np.sort(counts / counts.sum())[::-1]
  # With the first `alone` tokens alone, the others share codes - alone in proportion to their mass.
  alone = np.arange(min(codes, len(p)))
  c = (1 - np.concatenate([[0.0], np.cumsum(p)])[alone]) / (codes - alone)
  first = int(np.argmax(p[alone] <= c)) if (p[alone] <= c).any() else len(alone)
  if first == len(alone):
    return 1.0
  rest = p[first:][p[first:] > 0]
  return float(np.exp((rest * np.log(c[first] / rest)).sum()))
