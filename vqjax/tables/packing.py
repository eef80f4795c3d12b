"""Trained tables in a form that is scored and looked up where it lies, without an entropy coder.

The rows are in the coordinates of `transform`. Row groups of like probability spend a whole
number of bits on each coordinate, more for frequent tokens, coded by `vqjax.ops.trellis`: by a
trellis of fixed rate, or by levels, which are found a thousand times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from vqjax.assign.multiple import code_dtype
from vqjax.convert.packed_table import PackedTable
from vqjax.ops import trellis
from vqjax.tables.coded import SMOOTHING, check_table, covariance, probabilities
from vqjax.tables.coded import transform as transform_of
from vqjax.tables.moments import SHRINKAGE, Moments

__all__ = ["ROW_GROUPS", "pack", "units_of"]

ROW_GROUPS = 24
"""Most row groups, each with a scale and a centre of every coordinate."""

LEAST = 16
"""Least number of rows of a row group."""

BLOCK = 2**10
"""Rows that are read at a time, so that no second copy of a large table exists."""

ENCODED = 64
"""Rows that are encoded at a time, of whose 4096 states each coordinate is remembered."""


class Coding(NamedTuple):
  """What is known of codes of 0 to 8 bits for normal numbers.

  Attributes:
    left: part of the variance that they leave.
    spread: best standard deviation of their values, in that of the numbers.
  """

  left: tuple[float, ...]
  spread: tuple[float, ...]


TRELLIS = Coding(
  left=(1.0, 0.293, 0.08, 0.0214, 5.5e-3, 1.5e-3, 4e-4, 1.15e-4, 3.3e-5),
  spread=(0.0, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.45),
)
LEVELS = Coding(
  left=(1.0, 0.363, 0.118, 0.0354, 9.8e-3, 2.57e-3, 6.5e-4, 1.65e-4, 4.1e-5),
  spread=(0.0, 1.18, 1.32, 1.43, 1.54, 1.64, 1.68, 1.7, 1.7),
)


def fixed_bytes(vocab: int, dim: int) -> int:
  """Bytes of a packed table without its stream, as `PackedTable.parts` has them."""
  row_groups = min(ROW_GROUPS, vocab)
  ranks = vocab * np.dtype(code_dtype(vocab)).itemsize
  return _fixed(dim, row_groups) + ranks + 1


def _fixed(dim, row_groups):
  """Bytes of the transform and of the row groups."""
  return 2 * dim * dim + row_groups * (5 * dim + 4)


def units_of(byte_budget: int, vocab: int, dim: int, row_groups: int, others: int = 0) -> int:
  """Elements of the stream of a table of so many bytes, with float16 parameters.

  Args:
    others: bytes of the bias and of the ranks.

  Raises:
    ValueError: nothing is left for the rows.
  """
  fixed = _fixed(dim, row_groups) + others
  units = (int(byte_budget) - fixed) // 2
  if units < 1 + vocab // 8:
    raise ValueError(
      f"`byte_budget` must be above {fixed + vocab // 4:,}, the bytes of the transform and of"
      f" {row_groups} classes; got {byte_budget:,}. Give more, or use fewer row groups."
    )
  return units


def pack(
  table: Float[np.ndarray, "V D"],
  moments: Moments,
  units: int,
  *,
  row_groups: int = ROW_GROUPS,
  lam: float = SHRINKAGE,
  smoothing: float = SMOOTHING,
  passes: int = 2,
  is_trellis: bool = True,
  progress: Callable[[float], None] = lambda part: None,
) -> PackedTable:
  """Encode a table in a given number of elements of the stream.

  Args:
    table: the rows; an array, a memory map or a slice of a file.
    moments: what errors cost.
    units: elements of 16 bits of the stream; see `units_of`.
    row_groups: number of row groups, or V if that is less; some are empty where fewer differ.
    lam: see `transform`.
    smoothing: see `probabilities`.
    passes: times that rows are encoded, each with scales that fit the values of the time before.
    is_trellis: search the bits of a trellis, which takes milliseconds a row and pass on a CPU;
      False: use levels, in microseconds, with 1.2 to 1.7 times the error.
    progress: is called with the part that is done.

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
  # A head has no more row groups than tokens.
  size = row_group_sizes(p[order], min(row_groups, len(order)))
  # Within a row group rows are in the order of their ids, so that a table is read in order.
  parts = [np.sort(part) for part in np.split(order, np.cumsum(size)[:-1])]
  rank = np.empty(len(order), np.int64)
  rank[np.concatenate(parts)] = np.arange(len(order))

  def blocks(rows):
    """The coordinates of the given rows about the mean row, some at a time."""
    for start in range(0, len(rows), BLOCK):
      some = np.asarray(table[rows[start : start + BLOCK]], np.float32)
      yield (some - mean) @ forward

  shape = len(size), len(mean)
  center, square, weight = np.zeros(shape), np.zeros(shape), np.zeros(len(size))
  for c, rows in enumerate(parts):
    for x_ND in blocks(rows):
      center[c] += x_ND.sum(axis=0, dtype=np.float64) / len(rows)
      square[c] += (x_ND.astype(np.float64) ** 2).sum(axis=0) / len(rows)
    weight[c] = p[rows].mean() if len(rows) else 0
  # Rounded as they are kept, so that the bits make up for what rounding costs.
  offset = mean.astype(np.float64) @ basis.forward
  kept = _in_float16(center + offset)
  center = kept.astype(np.float64) - offset
  deviation = np.sqrt(np.maximum(square - center**2, 0))
  coding = TRELLIS if is_trellis else LEVELS
  width = allocate(weight[:, None] * deviation**2, size, units - 1, coding.left)
  scale = np.asarray(coding.spread)[width] * deviation
  value = trellis.values() if is_trellis else trellis.level_values()
  best = _best_states if is_trellis else _nearest_levels
  stream, at, done = np.zeros(units, np.uint16), 1, 0
  for c, rows in enumerate(parts):
    if not len(rows):
      continue
    start, columns = at, np.argsort(-width[c].astype(int), kind="stable")
    for _ in range(passes):
      scale[c] = _in_float16(scale[c])
      product, power, at = 0.0, 1e-30, start
      for x_ND in blocks(rows):
        x_ND = (x_ND - center[c].astype(np.float32))[:, columns]
        state_ND = best(x_ND, scale[c, columns], width[c, columns])
        y_ND = value[state_ND]
        product = product + (x_ND * y_ND).sum(axis=0, dtype=np.float64)
        power = power + (y_ND**2).sum(axis=0, dtype=np.float64)
        bits = trellis.stream_units(state_ND, width[c, columns]).reshape(-1)
        stream[at : at + len(bits)] = bits
        at += len(bits)
        done += len(x_ND)
        progress(done / (passes * len(order)))
      scale[c, columns] = np.where(width[c, columns], np.maximum(product / power, 0), 0)
  return PackedTable(stream, rank, size, width, _in_float16(scale), kept, basis.inverse, is_trellis)


def _in_float16(numbers):
  """Means or scales as they are kept."""
  with np.errstate(over="ignore"):
    kept = np.asarray(numbers).astype(np.float16)
  if not np.isfinite(kept).all():
    raise ValueError(
      f"`table` must have means and scales that float16 holds, below {np.finfo(np.float16).max:,};"
      f" got {np.abs(numbers).max():.3g}. Set its outliers to zero, or use another method than"
      " packed bits."
    )
  return kept


def row_group_sizes(
  p: Float[np.ndarray, "V"], row_groups: int = ROW_GROUPS
) -> Int[np.ndarray, "C"]:
  """Rows of each row group of falling probabilities; some are 0 where fewer differ.

  Probabilities of a row group differ by at most a factor, 2 or as much as it takes, unless it would
  have less than `LEAST` rows.
  """
  factor = 2.0
  while True:
    size, start = [], 0
    while start < len(p):
      end = max(np.searchsorted(-p, -p[start] / factor), start + LEAST)
      end = len(p) if len(p) - end < LEAST else end
      size.append(end - start)
      start = end
    if len(size) <= row_groups:
      return np.array(size + [0] * (row_groups - len(size)))
    factor *= 1.1


def allocate(
  cost_CD: Float[np.ndarray, "C D"],
  size_C: Int[np.ndarray, "C"],
  units: int,
  left: Sequence[float] = TRELLIS.left,
) -> UInt8[np.ndarray, "C D"]:
  """Bits of each coordinate with the least summed cost · size that fit in `units` elements.

  Args:
    cost_CD: cost of a coordinate without bits.
    left: part of the cost that codes of 0, 1, ... bits leave.
  """
  left, size_C = np.asarray(left), np.asarray(size_C)

  def at(price):
    width = (cost_CD[..., None] * left + price * np.arange(len(left))).argmin(axis=-1)
    return np.where(size_C[:, None] > 0, width, 0)

  used = lambda width: (size_C * -(-width.sum(axis=1) // trellis.UNIT)).sum()
  low, high = -200.0, 200.0
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if used(at(2.0**middle)) > units else (low, middle)
  width = at(2.0**high)
  for c in np.flatnonzero(size_C):
    # Whole elements: the bits that would be left empty go where they save most.
    for _ in range(-int(width[c].sum()) % trellis.UNIT):
      saved = cost_CD[c] * (left[width[c]] - left[np.minimum(width[c] + 1, len(left) - 1)])
      if saved.max() <= 0:
        break
      width[c, saved.argmax()] += 1
  return width.astype(np.uint8)


def _nearest_levels(x_ND, scale_D, width_D):
  return trellis.nearest_levels(x_ND / np.where(scale_D > 0, scale_D, np.inf), width_D)


def _best_states(x_ND, scale_D, width_D):
  """The best states of rows, a block at a time, of which the last is filled up."""
  state_ND = np.empty(x_ND.shape, np.int32)
  scaled_ND = x_ND / np.where(scale_D > 0, scale_D, np.inf)
  weight_D = jnp.asarray((scale_D / max(scale_D.max(), 1e-30)) ** 2, jnp.float32)
  for start in range(0, len(x_ND), ENCODED):
    block = scaled_ND[start : start + ENCODED]
    filled = np.zeros((ENCODED, x_ND.shape[1]), np.float32)
    filled[: len(block)] = block
    state = trellis.best_states(jnp.asarray(filled), weight_D, jnp.asarray(width_D, jnp.int32))
    state_ND[start : start + len(block)] = state[: len(block)]
  return state_ND
