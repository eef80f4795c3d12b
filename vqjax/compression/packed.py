"""Trained tables in a form that is scored and looked up where it lies, without an entropy coder.

The rows are in the coordinates of `transform`. Classes of rows of like probability spend a whole number
of bits on each coordinate, wider ones for frequent tokens, coded by `vqjax.ops.trellis`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8, UInt16

from vqjax.compression.moments import Moments
from vqjax.compression.table import SHRINKAGE, SMOOTHING, check_table, covariance, probabilities
from vqjax.compression.table import transform as transform_of
from vqjax.ops import trellis

LEAST = 16
"""Least number of rows of a class, which has a scale and a centre for each coordinate."""

ENCODED = 64
"""Rows that are encoded at a time; the memory of it is that of 4096 states of each."""

LEFT = 1.0, 0.285, 0.0773, 0.0211, 5.5e-3, 1.5e-3, 4e-4, 1.15e-4, 3.3e-5
"""Part of the variance of normal numbers that is left by codes of 0 to 8 bits."""

SPREAD = 0.0, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.45
"""Best standard deviation of the values of the codes of 0 to 8 bits."""


@dataclasses.dataclass(frozen=True)
class PackedTable:
  """A table as strings of bits: row = (center[class] + scale[class] · values) @ inverse.

  Attributes:
    stream: bits of all rows in the order of their ranks, after an element that belongs to none.
    rank: place of each row in the order of falling probability, [V].
    size: rows of each class, by rank, [C].
    width: bits of each coordinate of each class, [C, D].
    scale: factor of the values, [C, D].
    center: mean coordinates of the rows, [C, D].
    inverse: map from coordinates to rows, [D, D].
  """

  stream: UInt16[np.ndarray, "units"]
  rank: Int[np.ndarray, "V"]
  size: Int[np.ndarray, "C"]
  width: UInt8[np.ndarray, "C D"]
  scale: Float[np.ndarray, "C D"]
  center: Float[np.ndarray, "C D"]
  inverse: Float[np.ndarray, "D D"]


def pack(
  table: Float[np.ndarray, "V D"],
  moments: Moments,
  units: int,
  *,
  lam: float = SHRINKAGE,
  smoothing: float = SMOOTHING,
  passes: int = 2,
) -> PackedTable:
  """Encode a table in a given number of elements of the stream.

  Args:
    table: the rows; an array, a memory map or a slice of a file.
    moments: what errors cost.
    units: elements of 16 bits of the stream.
    lam: see `transform`.
    smoothing: see `probabilities`.
    passes: times that rows are encoded; scales and centres are fitted after each.

  Raises:
    ValueError: the moments are those of another table, or the table is not finite.
  """
  check_table(table)
  moments.check(*table.shape)
  mean, sigma = covariance(table)
  basis = transform_of(moments, sigma, lam)
  forward = basis.forward.astype(np.float32)
  p = probabilities(moments.counts, smoothing)
  order = np.argsort(-p, kind="stable")
  rank = np.empty(len(order), np.int64)
  rank[order] = np.arange(len(order))
  size = class_sizes(p[order])
  parts = np.split(order, np.cumsum(size)[:-1])
  coordinates = lambda rows: (np.asarray(table[np.sort(rows)], np.float32) - mean) @ forward

  center, deviation = np.zeros((2, len(size), len(mean)))
  for c, rows in enumerate(parts):
    x = coordinates(rows)
    center[c], deviation[c] = x.mean(axis=0), x.std(axis=0)
  cost = np.array([p[rows].mean() for rows in parts])[:, None] * deviation**2
  width = allocate(cost, size, units - 1)

  stream = [np.zeros(1, np.uint16)]
  scale = np.asarray(SPREAD)[width] * deviation
  for c, rows in enumerate(parts):
    # Ranks within a class are those of the token ids, so that a table is read in order.
    rank[np.sort(rows)] = size[:c].sum() + np.arange(len(rows))
    x = coordinates(rows)
    columns = np.argsort(-width[c].astype(int), kind="stable")
    columns = columns[: np.count_nonzero(width[c])]
    center[c] = center[c].astype(np.float16)
    found = np.zeros((len(rows), len(columns)), np.int32)
    for _ in range(passes if len(columns) else 0):
      scale[c] = scale[c].astype(np.float16)
      found = _encoded(x[:, columns] - center[c, columns], scale[c, columns], width[c, columns])
      value = np.asarray(trellis.values(), np.float64)[found]
      fit = (value * (x[:, columns] - center[c, columns])).sum(axis=0)
      scale[c, columns] = fit / np.maximum((value**2).sum(axis=0), 1e-30)
    stream.append(trellis.packed(found, width[c, columns]).reshape(-1))
  stream = np.concatenate(stream)
  filled = np.zeros(units, np.uint16)
  filled[: len(stream)] = stream
  center = center + mean @ basis.forward
  return PackedTable(
    filled,
    rank,
    size,
    width,
    scale.astype(np.float16),
    center.astype(np.float16),
    basis.inverse,
  )


def class_sizes(p: Float[np.ndarray, "V"]) -> Int[np.ndarray, "C"]:
  """Rows of each class of falling probabilities: a factor 2 of probability, of at least `LEAST`."""
  size, start = [], 0
  while start < len(p):
    end = max(np.searchsorted(-p, -p[start] / 2), start + LEAST)
    end = len(p) if len(p) - end < LEAST else end
    size.append(end - start)
    start = end
  return np.array(size)


def allocate(
  cost_CD: Float[np.ndarray, "C D"], size_C: Int[np.ndarray, "C"], units: int
) -> UInt8[np.ndarray, "C D"]:
  """Bits of each coordinate with the least summed cost · size that fit in `units` elements."""
  bits = np.arange(len(LEFT))

  def at(price):
    left = cost_CD[..., None] * np.asarray(LEFT)
    return (left + price * bits).argmin(axis=-1)

  def used(width):
    return (size_C * -(-width.sum(axis=1) // trellis.UNIT)).sum()

  low, high = -100.0, 100.0
  for _ in range(60):
    middle = (low + high) / 2
    if used(at(2.0**middle)) > units:
      low = middle
    else:
      high = middle
  width = at(2.0**high)
  for c in range(len(width)):
    # Whole elements: the bits that would be left empty go where they save most.
    for _ in range(-int(width[c].astype(int).sum()) % trellis.UNIT):
      more = np.minimum(width[c] + 1, len(LEFT) - 1)
      width[c, (cost_CD[c] * (np.asarray(LEFT)[width[c]] - np.asarray(LEFT)[more])).argmax()] += 1
      width[c] = np.minimum(width[c], len(LEFT) - 1)
  return width.astype(np.uint8)


def _encoded(x_ND, scale_D, width_D):
  """The best states of rows, a block at a time, of which the last is filled up."""
  found = np.empty(x_ND.shape, np.int32)
  scaled = np.divide(x_ND, scale_D, out=np.zeros_like(x_ND), where=scale_D > 0)
  weight = (scale_D / max(scale_D.max(), 1e-30)) ** 2
  for start in range(0, len(x_ND), ENCODED):
    block = scaled[start : start + ENCODED]
    filled = np.zeros((ENCODED, x_ND.shape[1]), np.float32)
    filled[: len(block)] = block
    states = trellis.best_states(
      jnp.asarray(filled), jnp.asarray(weight, jnp.float32), jnp.asarray(width_D, jnp.int32)
    )
    found[start : start + len(block)] = states[: len(block)]
  return found
