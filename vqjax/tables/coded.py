"""Tables of integers: the lossy half of the compression of a trained table [V, D].

The integers are chosen by entropy-constrained dependent quantisation, with the quantisers of
`vqjax.tables.container`.

An error e of the row of a token of probability p costs about p · eᵀ M e / 2 nats, where M is a
second moment. A transform T turns this into p |e T|² / 2 with uncorrelated columns, so that equal
steps in all columns cost the fewest bits (reverse water-filling). Rows of rare tokens may err more:
the step of a row is proportional to p^-1/2, in row groups a factor sqrt(2) apart.

Coordinates are not rounded: of the integers that the dependent quantiser of a compressed file
allows, Viterbi's algorithm takes those of the least error and bits together. At equal bytes the
error is about a fifth less than that of the nearest multiples of a step.

Source: Schwarz et al., Quantization and entropy coding in the versatile video coding standard,
2021; Fischer and Wang, Entropy-constrained trellis-coded quantization, 1992.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from vqjax.tables import container, entropy_coder
from vqjax.tables.moments import SHRINKAGE, Moments
from vqjax.tables.tensor_files import release

__all__ = [
  "BIT",
  "SMOOTHING",
  "CodedTable",
  "Transform",
  "coded_table",
  "ideal_bits",
  "probabilities",
  "row_group_steps",
  "transform",
]

BLOCK = 2**13
"""Rows that are computed at a time, so that no second copy of a large table exists."""

SMOOTHING = 0.2
"""Occurrences that are added to those of every token."""

MOST_LEVELS = 2.0**30
"""Largest magnitude of an integer."""

BIT = 0.1
"""What a bit costs, in squared steps.

The least squared error at equal bytes is at about 0.4. But coordinates that cost bits become
smaller, and errors that all point towards the mean row change the scores more than others do: of
values down to 0 this one had the least loss on validation text of Penn Treebank.
"""

OF_ROW_GROUP, SAMPLE = 2**9, 2**14
"""Rows of a row group, and of all together, from which bits are learned and counted."""

LANES = 2**10
"""Streams that are searched side by side."""

FINEST = 10
"""Bits behind the point of an inverse, of which float16 holds 11 in its largest entries."""

LEAST_VARIANCE = 2.0**-12
"""Variances that count, of the mean one: smaller ones are below the steps."""

MOST_ROW_GROUPS = 48
"""Row groups of steps; rows of still rarer tokens are in the last."""


class Transform(NamedTuple):
  """A change of basis in which errors of all columns cost alike.

  Attributes:
    forward: T [D, D]; the coordinates of a row are (row - mean) @ T.
    inverse: T^-1 in float16, whose largest entry is 1: a row is mean + coordinates @ inverse.
    variances: variances of the columns, falling.
    scale: length of a coordinate whose error costs as an error of 1 in the metric.
  """

  forward: Float[np.ndarray, "D D"]
  inverse: Float[np.ndarray, "D D"]
  variances: Float[np.ndarray, "D"]
  scale: float


class Levels:
  """Integers [V, D] in half the memory: rows that 16 bits can hold are kept in 16.

  Rows are read and written as those of an int32 array.

  Attributes:
    shape: (V, D).
  """

  def __init__(self, shape: tuple[int, int]):
    """Zeros."""
    self.shape = shape
    self._narrow = np.zeros(shape, np.int16)
    self._wide: dict[int, Int[np.ndarray, "D"]] = {}
    self._is_wide = np.zeros(shape[0], bool)

  def __len__(self) -> int:
    return self.shape[0]

  def __setitem__(self, rows: slice, levels_RD: Int[np.ndarray, "R D"]) -> None:
    is_wide = np.abs(levels_RD).max(axis=1, initial=0) > np.iinfo(np.int16).max
    self._narrow[rows] = np.where(is_wide[:, None], 0, levels_RD)
    self._is_wide[rows] = is_wide
    ids = np.arange(self.shape[0])[rows]
    self._wide |= {int(ids[i]): levels_RD[i].astype(np.int32) for i in np.flatnonzero(is_wide)}

  def __getitem__(self, rows: slice | np.ndarray) -> Int[np.ndarray, "R D"]:
    found = self._narrow[rows].astype(np.int32)
    wide = np.flatnonzero(self._is_wide[rows])
    if len(wide):
      ids = np.arange(self.shape[0])[rows]
      found[wide] = [self._wide[int(ids[i])] for i in wide]
    return found

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy  # there is no array that could be shared
    return self[:].astype(dtype or np.int32, copy=False)


@dataclasses.dataclass(frozen=True)
class CodedTable:
  """A table as integers: row = mean + steps[group] · (levels @ inverse).

  Attributes:
    levels: coordinates of the rows in steps, [V, D], as an array or as `Levels`; integers of the
      dependent quantiser of `vqjax.tables.container`.
    row_group: row group of each row, [V].
    steps: step of each row group, [C]: half of the distance of the integers of a quantiser.
    inverse: map from coordinates to rows, [D, D], float16 or float32.
    mean: row that is added to each, [D].
  """

  levels: Int[np.ndarray, "V D"] | Levels
  row_group: UInt8[np.ndarray, "V"]
  steps: Float[np.ndarray, "C"]
  inverse: Float[np.ndarray, "D D"]
  mean: Float[np.ndarray, "D"]

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the table, (V, D)."""
    return self.levels.shape

  def rows(self, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n D"]:
    """The rows of the given tokens, in float32."""
    step = self.steps[self.row_group[ids]][:, None]
    scaled = self.levels[ids].astype(np.float32) * step
    return scaled @ self.inverse.astype(np.float32) + self.mean

  def blocks(self, size: int = BLOCK) -> Iterator[Float[np.ndarray, "W D"]]:
    """All rows in order, `size` at a time."""
    for start in range(0, len(self.levels), size):
      yield self.rows(np.arange(start, min(start + size, len(self.levels))))

  def table(self) -> Float[np.ndarray, "V D"]:
    """All rows, as one float32 array."""
    table = np.empty(self.shape, np.float32)
    start = 0
    for block in self.blocks():
      table[start : start + len(block)] = block
      start += len(block)
    return table


def probabilities(
  counts: Float[np.ndarray, "V"], smoothing: float = SMOOTHING
) -> Float[np.ndarray, "V"]:
  """Probabilities of tokens, of which each has `smoothing` more occurrences than were counted.

  Raises:
    ValueError: `smoothing` is not positive: a row without occurrences would need no bits.
  """
  if not 0 < smoothing < np.inf:
    raise ValueError(
      f"`smoothing` must be positive and finite; got {smoothing}. {SMOOTHING} is usual."
    )
  smoothed = np.asarray(counts, np.float64) + smoothing
  return smoothed / smoothed.sum()


def transform(
  moments: Moments, covariance: Float[np.ndarray, "D D"], lam: float = SHRINKAGE
) -> Transform:
  """The basis in which errors cost alike and columns are uncorrelated.

  With M = H + F + lam · trace/D · I it is T = M^1/2 Q, where Q are the eigenvectors of
  M^1/2 Σ M^1/2 and Σ is the covariance of the rows.
  """
  if not 0 < lam < np.inf:
    raise ValueError(f"`lam` must be positive and finite; got {lam}. {SHRINKAGE} is usual.")
  values, vectors = np.linalg.eigh(moments.metric(lam))
  # Positive but for roundings.
  values = np.maximum(values, 1e-12 * values[-1])
  root = (vectors * np.sqrt(values)) @ vectors.T
  root_inverse = (vectors / np.sqrt(values)) @ vectors.T
  variances, basis = np.linalg.eigh(root @ covariance @ root)
  variances, basis = np.maximum(variances[::-1], 0), basis[:, ::-1]
  inverse = basis.T @ root_inverse
  scale = np.abs(inverse).max()
  # What is kept is the rounded inverse; the coordinates are those that it turns into the rows.
  inverse = (inverse / scale).astype(np.float16)
  forward = np.linalg.inv(inverse.astype(np.float64))
  return Transform(forward, inverse, variances * scale**2, float(scale))


def with_fewer_bits(
  basis: Transform,
  metric: Float[np.ndarray, "D D"],
  covariance: Float[np.ndarray, "D D"],
  rows: int,
) -> Transform:
  """The transform with as many bits as pay for themselves in a file of so many rows.

  A file keeps the inverse, which takes as much as the integers of a table of few rows. Rounded
  coarsely it is still exact as a basis, but its columns no longer cost quite alike, and are
  correlated. Entries become multiples of 2^-k. The error of each is made up for by the next ones in
  the metric, as GPTQ does with weights. Of k = 10, 9, ... the last is taken that makes the file
  smaller by the theory of fine steps, where a number takes log2(deviation / step) bits.
  """

  def stored(inverse):
    """The bits of the entropy of either byte of float16, which deflate nearly reaches."""
    planes = inverse.view(np.uint8).reshape(-1, inverse.itemsize).T
    counts = np.stack([np.bincount(plane, minlength=256) for plane in planes])
    return -(counts * np.log2(np.maximum(counts, 1) / inverse.size)).sum()

  def bits(one: Transform) -> float:
    inverse = one.inverse.astype(np.float64)
    cost = ((inverse @ metric) * inverse).sum(axis=1).mean()
    variances = ((one.forward.T @ covariance) * one.forward.T).sum(axis=1)
    least = max(LEAST_VARIANCE * variances.mean(), np.finfo(np.float64).tiny)
    deviations = np.log2(np.maximum(variances, least)).sum() / 2
    return stored(one.inverse) + rows * (len(inverse) * math.log2(cost) / 2 + deviations)

  # The inverse of the metric is upperᵀ upper.
  lower = np.linalg.cholesky(metric[::-1, ::-1])
  upper = np.ascontiguousarray(np.linalg.inv(lower)[::-1, ::-1])
  best, least, before = basis, bits(basis), math.inf
  for k in range(FINEST, 0, -1):
    inverse = _rounded(basis.inverse.astype(np.float64), upper, 2.0**k).astype(np.float16)
    try:
      forward = np.linalg.inv(inverse.astype(np.float64))
    except np.linalg.LinAlgError:
      break
    found = basis._replace(forward=forward, inverse=inverse)
    size = bits(found)
    if not size < before:
      break
    before = size
    if size < least:
      best, least = found, size
  return best


def _rounded(
  inverse: Float[np.ndarray, "D D"], upper: Float[np.ndarray, "D D"], scale: float
) -> Float[np.ndarray, "D D"]:
  """Multiples of 1/scale; `upper` is the Cholesky factor of the metric's inverse, transposed."""
  # Columns are contiguous.
  left, width = inverse.T.copy(), 128
  for start in range(0, len(upper), width):
    end = min(start + width, len(upper))
    errors = np.empty((end - start, len(inverse)))
    for column in range(start, end):
      rounded = np.rint(left[column] * scale) / scale
      errors[column - start] = error = (left[column] - rounded) / upper[column, column]
      left[column + 1 : end] -= upper[column, column + 1 : end, None] * error
      left[column] = rounded
    left[end:] -= upper[start:end, end:].T @ errors
  return np.ascontiguousarray(left.T)


def row_group_steps(
  p: Float[np.ndarray, "V"], step: float
) -> tuple[UInt8[np.ndarray, "V"], Float[np.ndarray, "C"]]:
  """Row group of each row, and the step of each row group: about step / 2 · (p V)^-1/2, rising."""
  doublings = np.round(-np.log2(p * len(p))).astype(int)
  doublings = np.minimum(doublings, doublings.min() + MOST_ROW_GROUPS - 1)
  present, row_group = np.unique(doublings, return_inverse=True)
  return row_group.astype(np.uint8), (step * 2.0 ** (present / 2 - 1)).astype(np.float32)


class Sample(NamedTuple):
  """Some rows of a table, in order.

  Attributes:
    x: their coordinates in steps, where the step is 1.
    owner: their row groups.
    first: fewer of them, about equally many of each row group.
    weight: rows for which one of a row group stands.
  """

  x: Float[np.ndarray, "n D"]
  owner: UInt8[np.ndarray, "n"]
  first: Int[np.ndarray, "m"]
  weight: Float[np.ndarray, "C"]


class Coordinates:
  """A table in the basis in which errors cost alike: what is the same for every step.

  Attributes:
    shape: shape of the table, (V, D).
  """

  def __init__(
    self,
    table: Float[np.ndarray, "V D"],
    moments: Moments,
    *,
    lam: float = SHRINKAGE,
    smoothing: float = SMOOTHING,
  ):
    """Find the basis; no copy of the table is kept.

    Raises:
      ValueError: the moments are those of another table, or the table is not finite.
    """
    check_table(table)
    moments.check(*table.shape)
    self.shape = table.shape
    self._table = table
    self._mean, sigma = covariance(table)
    basis = transform(moments, sigma, lam)
    self._basis = with_fewer_bits(basis, moments.metric(lam), sigma, len(table))
    self._p = probabilities(moments.counts, smoothing)
    self._known: dict[float, tuple[container.Distributions, float]] = {}

  def _scaled(
    self, rows: Int[np.ndarray, "n"], step: Float[np.ndarray, "n"]
  ) -> Float[np.ndarray, "n D"]:
    """The coordinates of rows, in rising order, in units of their steps."""
    scaled = np.empty((len(rows), self.shape[1]), np.float32)
    # Rows that are far apart are read a block at a time too, and given back after it.
    ends = np.searchsorted(rows, np.arange(0, self.shape[0] + BLOCK, BLOCK))
    for first, last in itertools.pairwise(ends):
      if first == last:
        continue
      own = rows[first:last]
      block = self._table[own[0] : own[-1] + 1]
      centred = np.asarray(block, np.float32)[own - own[0]] - self._mean
      scaled[first:last] = centred @ self._forward / step[first:last, None]
      release(block)
    return scaled

  @functools.cached_property
  def _forward(self) -> Float[np.ndarray, "D D"]:
    return self._basis.forward.astype(np.float32)

  @functools.cached_property
  def largest(self) -> float:
    """Largest magnitude of a coordinate in steps, where the step is 1."""
    row_group, steps = row_group_steps(self._p, self._basis.scale)
    step = steps[row_group]
    largest_of = lambda rows: float(np.abs(self._scaled(rows, step[rows])).max())
    return max(container.side_by_side(largest_of, _ranges(self.shape[0])))

  def coded(self, step: float) -> CodedTable:
    """The integers of a step.

    Args:
      step: step of the row of a token of probability 1/V, in the units of the transform.

    Raises:
      ValueError: the step is not positive, or so small that levels overflow.
    """
    self._check(step)
    row_group, steps = row_group_steps(self._p, step * self._basis.scale)
    search = functools.partial(dependent_levels, model=self._rates(step)[0])
    levels = Levels(self.shape)

    def of_block(rows):
      return rows, search(self._scaled(rows, steps[row_group[rows]]), row_group[rows])

    for rows, found in container.side_by_side(of_block, _ranges(self.shape[0])):
      levels[rows[0] : rows[-1] + 1] = found
    return CodedTable(levels, row_group, steps, self._basis.inverse, self._mean)

  def size(self, step: float) -> int:
    """Bytes of the file of `coded(step)`, about, from some rows of each row group.

    Raises:
      ValueError: as `coded` does.
    """
    self._check(step)
    row_group, steps = row_group_steps(self._p, step * self._basis.scale)
    coded = CodedTable(None, row_group, steps, self._basis.inverse, self._mean)
    return entropy_coder.coded_bytes(coded, *self._rates(step))

  def _check(self, step):
    if not 0 < step < np.inf:
      raise ValueError(f"`step` must be positive and finite; got {step}. Begin with 1.")
    if self.largest > step * MOST_LEVELS:
      raise ValueError(
        f"`step` must give levels of at most 2^30; got {step}. Give at least"
        f" {1.01 * self.largest / MOST_LEVELS:.3g}, or keep the table."
      )

  @functools.cached_property
  def _sample(self) -> Sample:
    """Some rows of each row group: all of a small table."""
    row_group, steps = row_group_steps(self._p, self._basis.scale)
    count = np.bincount(row_group)
    most = max(1, self.shape[0] // SAMPLE)
    parts = np.split(np.argsort(row_group, kind="stable"), np.cumsum(count)[:-1])
    # Of large row groups at least `OF_ROW_GROUP` rows, and these are the first of each.
    parts = [own[:: max(1, min(len(own) // OF_ROW_GROUP, most))] for own in parts]
    rows = np.sort(np.concatenate(parts))
    first = np.concatenate([own[:: -(-len(own) // OF_ROW_GROUP)] for own in parts])
    weight = count / [len(own) for own in parts]
    x = self._scaled(rows, steps[row_group[rows]])
    return Sample(x, row_group[rows], np.searchsorted(rows, np.sort(first)), weight)

  def _rates(self, step) -> tuple[container.Distributions, float]:
    """Distributions of the indices that the sample chooses, and the bits of all rows."""
    if step not in self._known:
      model, bits = learned_rates(self._sample, step)
      self._known[step] = model, float(bits @ self._sample.weight)
    return self._known[step]


def learned_rates(
  some: Sample,
  step: float,
  restart: int = container.RESTART,
  block: int | None = None,
  dropped: int | None = None,
  **options: Any,
) -> tuple[container.Distributions, Float[np.ndarray, "C"]]:
  """Distributions of the indices that a sample chooses, and the bits of row groups.

  Args:
    some: the sample.
    step: step of a row of probability 1/V.
    restart: rows that are coded together.
    block: rows that are computed at a time, a multiple of `restart`; None: `BLOCK`.
    dropped: row group whose integers are 0.
    **options: those of `entropy_coder.distributions_of`.
  """
  row_groups, columns = len(some.weight), some.x.shape[1]
  # At first all bits cost alike.
  frequency = np.ones((1, container.SYMBOLS), np.uint16)
  zeros = np.zeros((2, row_groups, columns), np.uint8)
  model = container.Distributions(frequency, zeros, zeros[0], restart)
  first = [some.first] * (2 if "weight" in options else 1)
  for rows in (*first, slice(None)):
    x, owner = some.x[rows] / np.float32(step), some.owner[rows]
    levels = np.empty(x.shape, np.int32)

    def of_block(own, x=x, owner=owner, model=model, levels=levels):
      levels[own] = dependent_levels(x[own], owner[own], model, dropped)

    for _ in container.side_by_side(of_block, _ranges(len(x), block)):
      pass
    model, bits = entropy_coder.distributions_of(
      levels, owner, row_groups, restart=restart, **options
    )
  return model, bits


def dependent_levels(
  x: Float[np.ndarray, "R D"],
  row_group: UInt8[np.ndarray, "R"],
  model: container.Distributions,
  dropped: int | None = None,
) -> Int[np.ndarray, "R D"]:
  """The integers of the dependent quantiser of the least squared error and bits.

  Args:
    x: coordinates in steps; row 0 begins a restart block.
    row_group: row group of each row.
    model: distributions, whose bits cost `BIT` each.
    dropped: row group whose integers are 0; None: there is none.
  """
  rows, columns = x.shape
  if dropped is not None:
    row_group = np.where(row_group == dropped, MOST_ROW_GROUPS, row_group)  # that of padding
  lanes, restart = model.lanes, model.restart
  # A symbol that no sampled row had may still be the best.
  bits = container.PRECISION - np.log2(np.maximum(model.frequencies, 2.0**-4))
  bits[:, list(container.ESCAPES)] += 32
  if model.codes_groups:
    bits[model.frequencies == 0] = container.PRECISION + 32  # it is coded as an escape
  # Of one size, so that one program is compiled. What is behind the last row and column is 0,
  # whatever it costs.
  cost = np.full((entropy_coder.MOST_DISTRIBUTIONS + 1, container.SYMBOLS), 1e9, np.float32)
  cost[: len(bits)] = BIT * (bits - bits.min(axis=1, keepdims=True))
  cost[-1, container.LARGEST] = 0
  last = (0, MOST_ROW_GROUPS + 1 - len(model.shift)), (0, -columns % lanes)
  which = np.pad(model.distribution, ((0, 0), *last), constant_values=len(cost) - 1)
  shift = np.pad(model.shift, last)
  by_group = lambda y: y.reshape(*y.shape[:-1], -1, lanes)
  which, shift = by_group(which), by_group(shift)
  blocks = 2 ** math.ceil(math.log2(-(-rows // restart)))
  at_once = restart * min(blocks, max(1, LANES // lanes))
  levels = np.empty((rows, columns), np.int32)
  for first in range(0, rows, at_once):
    own, owner = x[first : first + at_once], row_group[first : first + at_once]
    missing = at_once - len(own)
    own = by_group(np.pad(own, ((0, missing), last[1])))
    owner = np.pad(owner.astype(np.int32), (0, missing), constant_values=-1)
    # By row of a block: [RESTART, groups, blocks, lanes].
    own = own.reshape(-1, restart, *own.shape[1:]).transpose(1, 2, 0, 3)
    found = np.asarray(_viterbi(own, owner.reshape(-1, restart).T, which, shift, cost))
    found = found.transpose(2, 0, 1, 3).reshape(at_once, -1)
    levels[first : first + at_once] = found[: at_once - missing, :columns]
  return levels


@jax.jit
def _viterbi(
  x: Float[Array, "R G B L"],
  owner: Int[Array, "R B"],
  which: UInt8[Array, "2 C G L"],
  shift: UInt8[Array, "C G L"],
  cost: Float[Array, "K S"],
) -> Int[Array, "R G B L"]:
  """The levels of streams [B, L] of the least cost; see `dependent_levels`."""
  following, flat = container.NEXT_STATE, cost.reshape(-1)
  states = len(following)
  # Of each state the two states before it, with the parities that lead from them to it.
  before = np.array(
    [
      [(s, p) for s in range(states) for p in (0, 1) if following[s, p] == state]
      for state in range(states)
    ]
  )
  previous, place = before[..., 0], 2 * (before[..., 0] & 1) + before[..., 1]

  def choices(row):
    """Costs and levels [G, 4, B, L] of the best integer of each quantiser and parity."""
    x_GBL, owner_B = row
    shift_GBL = jnp.moveaxis(shift[owner_B], 1, 0).astype(jnp.int32)
    size_GBL, sign_GBL = jnp.abs(x_GBL), jnp.where(x_GBL < 0, -1, 1)
    costs, levels = [], []
    for quantizer, parity in ((0, 0), (0, 1), (1, 0), (1, 1)):
      own_GBL = jnp.moveaxis(which[quantizer, owner_B], 1, 0).astype(jnp.int32) * cost.shape[1]
      # In integers: above 2^24 float32 has no odd ones.
      near_GBL = 2 * jnp.rint((size_GBL + quantizer - 2 * parity) / 4).astype(jnp.int32) + parity
      near_GBL = jnp.maximum(near_GBL, parity)
      options = []
      # The nearest, and the next one towards 0, whose bits are fewer.
      for index_GBL in (near_GBL, jnp.where(near_GBL >= 2, near_GBL - 2, near_GBL)):
        level_GBL = 2 * index_GBL - jnp.where(index_GBL > 0, quantizer, 0)
        symbol_GBL = entropy_coder.symbols(sign_GBL * index_GBL, shift_GBL)
        bits_GBL = flat[own_GBL + symbol_GBL]
        options.append((bits_GBL + (size_GBL - level_GBL) ** 2, level_GBL))
      (cost_GBL, level_GBL), (other_GBL, lower_GBL) = options
      levels.append(sign_GBL * jnp.where(other_GBL < cost_GBL, lower_GBL, level_GBL))
      costs.append(jnp.minimum(cost_GBL, other_GBL))
    return jnp.stack(costs, axis=1), jnp.stack(levels, axis=1)

  def column(path_SBL, cost_4BL):
    one, two = (path_SBL[previous[:, i]] + cost_4BL[place[:, i]] for i in (0, 1))
    new_SBL, bit_S = jnp.minimum(one, two), np.arange(states, dtype=np.uint8)[:, None, None]
    second_BL = ((two < one).astype(jnp.uint8) << bit_S).sum(axis=0, dtype=jnp.uint8)
    return new_SBL - new_SBL[0], second_BL

  forward = lambda path_SBL, row: lax.scan(column, path_SBL, choices(row)[0])
  start = jnp.full((states, *x.shape[2:]), 1e30).at[0].set(0.0)
  path_SBL, second_RGBL = lax.scan(forward, start, (x, owner))
  table = jnp.array(before)

  def column_back(state_BL, second_BL):
    is_second = (second_BL.astype(jnp.int32) >> state_BL) & 1
    state_BL, parity_BL = jnp.moveaxis(table[state_BL, is_second], -1, 0)
    return state_BL, 2 * (state_BL & 1) + parity_BL

  def backward(state_BL, row):
    *own, second_GBL = row
    state_BL, place_GBL = lax.scan(column_back, state_BL, second_GBL, reverse=True)
    _, level_G4BL = choices(own)
    return state_BL, jnp.take_along_axis(level_G4BL, place_GBL[:, None], axis=1)[:, 0]

  last = path_SBL.argmin(axis=0).astype(table.dtype)
  return lax.scan(backward, last, (x, owner, second_RGBL), reverse=True)[1]


def coded_table(
  table: Float[np.ndarray, "V D"],
  moments: Moments,
  step: float,
  *,
  lam: float = SHRINKAGE,
  smoothing: float = SMOOTHING,
) -> CodedTable:
  """Quantise a table to integers, a block of rows at a time.

  The expected loss is about D · step² / 30 nats a token where every column has more than a few
  levels; halving the step costs a bit for each number.

  Args:
    table: the rows; an array, a memory map or a slice of a file.
    moments: what errors cost.
    step: step of the row of a token of probability 1/V, in the units of the transform.
    lam: see `transform`.
    smoothing: see `probabilities`.

  Raises:
    ValueError: the moments are those of another table, the table is not finite, or the step is not
      positive or so small that levels overflow.
  """
  found = Coordinates(table, moments, lam=lam, smoothing=smoothing).coded(step)
  return dataclasses.replace(found, levels=np.asarray(found.levels))


def ideal_bits(coded: CodedTable) -> Float[np.ndarray, "C D"]:
  """Bits of an ideal coder of the indices, without its tables.

  It has a distribution for each row group, quantiser and column.
  """
  index, quantizer = entropy_coder.indices(np.asarray(coded.levels))
  bits = np.zeros((len(coded.steps), coded.shape[1]))
  for c in range(len(coded.steps)):
    own = coded.row_group == c
    # The low bit is the quantiser, so that one count is of both.
    both = 2 * index[own].astype(np.int64) + quantizer[own]
    for j in range(both.shape[1]):
      found, counts = np.unique(both[:, j], return_counts=True)
      of = np.bincount(found & 1, counts, minlength=2)[found & 1]
      bits[c, j] = -(counts * np.log2(counts / of)).sum()
  return bits


def check_table(table: Float[np.ndarray, "V D"]) -> None:
  """Check that there are rows.

  Raises:
    ValueError: the table has no rows or is not of two axes.
  """
  if np.ndim(table) != 2 or 0 in np.shape(table):
    raise ValueError(
      f"`table` must be an array [V, D]; got shape {np.shape(table)}. Give a row for each token."
    )


def _ranges(count: int, size: int | None = None) -> Iterator[Int[np.ndarray, "n"]]:
  """The numbers below `count` in order, `size` or `BLOCK` at a time."""
  size = size or BLOCK  # which a test may replace
  return (np.arange(i, min(i + size, count)) for i in range(0, count, size))


def _blocks(table):
  for start in range(0, table.shape[0], BLOCK):
    block = np.asarray(table[start : start + BLOCK], np.float32)
    if not np.isfinite(block).all():
      row = start + int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
      raise ValueError(
        f"`table` must be finite; row {row} has an entry that is not. Check that the model was"
        " saved whole."
      )
    yield start, block
    release(table[start : start + BLOCK])


def covariance(
  table: Float[np.ndarray, "V D"],
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "D D"]]:
  """The mean row in float32, and the covariance of the rows, a block of rows at a time."""
  vocab, dim = table.shape
  total, second = np.zeros(dim), np.zeros((dim, dim))
  # About the first row, near the mean in comparison with rows far from 0.
  first = np.asarray(table[0], np.float64)
  for _, block in _blocks(table):
    centred = block - first
    total += centred.sum(axis=0)
    second += centred.T @ centred
  mean = total / vocab
  return (first + mean).astype(np.float32), second / vocab - np.outer(mean, mean)
