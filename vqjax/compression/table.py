"""Tables of integers: the lossy half of the compression of a trained table [V, D].

An error e of the row of a token of probability p costs about p · eᵀ M e / 2 nats, where M is a
second moment. A transform T turns this into p |e T|² / 2 with uncorrelated columns, so that equal
steps in all columns cost the fewest bits (reverse water-filling). Rows of rare tokens may err more:
the step of a row is proportional to p^-1/2, in classes a factor sqrt(2) apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from vqjax.checkpoints.files import release
from vqjax.compression.moments import SHRINKAGE, Moments

BLOCK = 2**13
"""Rows that are computed at a time, so that no second copy of a large table exists."""

SMOOTHING = 0.2
"""Occurrences that are added to those of every token."""

MOST_LEVELS = 2.0**30
"""Largest magnitude of an integer."""

MOST_CLASSES = 48
"""Classes of steps; rows of still rarer tokens are in the last."""


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
class QuantizedTable:
  """A table as integers: row = mean + steps[class] · (levels @ inverse).

  Attributes:
    levels: coordinates of the rows in steps, [V, D], as an array or as `Levels`.
    step_class: class of each row, [V].
    steps: step of each class, [C].
    inverse: map from coordinates to rows, [D, D], float16 or float32.
    mean: row that is added to each, [D].
  """

  levels: Int[np.ndarray, "V D"] | Levels
  step_class: UInt8[np.ndarray, "V"]
  steps: Float[np.ndarray, "C"]
  inverse: Float[np.ndarray, "D D"]
  mean: Float[np.ndarray, "D"]

  @property
  def shape(self) -> tuple[int, int]:
    """Shape of the table, (V, D)."""
    return self.levels.shape

  def rows(self, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n D"]:
    """The rows of the given tokens, in float32."""
    step = self.steps[self.step_class[ids]][:, None]
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

  Args:
    moments: the second moments H and F.
    covariance: Σ.
    lam: shrinkage of M, in mean eigenvalues.
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


def step_classes(
  p: Float[np.ndarray, "V"], step: float
) -> tuple[UInt8[np.ndarray, "V"], Float[np.ndarray, "C"]]:
  """Class of each row, and the step of each class: about step · (p V)^-1/2, rising."""
  doublings = np.round(-np.log2(p * len(p))).astype(int)
  doublings = np.minimum(doublings, doublings.min() + MOST_CLASSES - 1)
  present, step_class = np.unique(doublings, return_inverse=True)
  return step_class.astype(np.uint8), (step * 2.0 ** (present / 2)).astype(np.float32)


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
    self._basis = transform(moments, sigma, lam)
    self._p = probabilities(moments.counts, smoothing)

  def _scaled(self, step: float, every: int) -> Iterator[tuple[slice, Float[np.ndarray, "W D"]]]:
    """Blocks of every `every`-th row in steps, before they are rounded, and their places."""
    step_class, steps = step_classes(self._p, step * self._basis.scale)
    forward = self._basis.forward.astype(np.float32)
    done = 0
    for start, block in _blocks(self._table):
      first = -start % every
      owner = step_class[start + first : start + len(block) : every]
      if len(owner):
        scaled = (block[first::every] - self._mean) @ forward / steps[owner][:, None]
        yield slice(done, done + len(owner)), scaled
        done += len(owner)

  @functools.cached_property
  def largest(self) -> float:
    """Largest magnitude of a coordinate in steps, where the step is 1."""
    return max(float(np.abs(block).max()) for _, block in self._scaled(1.0, 1))

  def quantized(self, step: float, every: int = 1) -> QuantizedTable:
    """The integers of a step.

    Args:
      step: step of the row of a token of probability 1/V, in the units of the transform.
      every: only every so many rows; the steps and the mean are those of all.

    Raises:
      ValueError: the step is not positive, or so small that levels overflow.
    """
    if not 0 < step < np.inf:
      raise ValueError(f"`step` must be positive and finite; got {step}. Begin with 1.")
    step_class, steps = step_classes(self._p, step * self._basis.scale)
    levels = Levels((-(-self.shape[0] // every), self.shape[1]))
    for rows, scaled in self._scaled(step, every):
      if np.abs(scaled).max() > MOST_LEVELS:
        raise ValueError(
          f"`step` must give levels of at most 2^30; got {step}. Give at least"
          f" {1.01 * self.largest / MOST_LEVELS:.3g}, or keep the table."
        )
      levels[rows] = np.rint(scaled).astype(np.int32)
    return QuantizedTable(levels, step_class[::every], steps, self._basis.inverse, self._mean)


def quantize(
  table: Float[np.ndarray, "V D"],
  moments: Moments,
  step: float,
  *,
  lam: float = SHRINKAGE,
  smoothing: float = SMOOTHING,
) -> QuantizedTable:
  """Quantise a table to integers, a block of rows at a time.

  The expected loss is about D · step² / 24 nats a token where every column has more than a few
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
  found = Coordinates(table, moments, lam=lam, smoothing=smoothing).quantized(step)
  return dataclasses.replace(found, levels=np.asarray(found.levels))


def ideal_bits(quantized: QuantizedTable) -> Float[np.ndarray, "C D"]:
  """Bits of an ideal coder with a distribution for each class and column, without its tables."""
  classes = range(len(quantized.steps))
  bits = np.zeros((len(quantized.steps), quantized.shape[1]))
  for c in classes:
    levels = quantized.levels[quantized.step_class == c]
    for j in range(levels.shape[1]):
      counts = np.unique(levels[:, j], return_counts=True)[1]
      bits[c, j] = -(counts * np.log2(counts / len(levels))).sum()
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
