"""Rounding of rows to grids of levels, chosen in a metric instead of number by number."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

__all__ = ["LevelGrid", "fit_grid"]

CHUNK = 1024
"""Rows that are fitted at a time; the working set of a search stays in a cache of a few MB."""

SEARCHED = 64
"""Largest group whose scale is searched with the feedback of its own errors."""


@dataclasses.dataclass(frozen=True)
class LevelGrid:
  """Numbers that a scale times one of a few levels can be.

  Attributes:
    levels: the levels, rising; the first one is the largest in magnitude.
    group: adjoining columns that share a scale.
    scale_dtype: number format of the scales in a file.
    factors: scales that are tried, as multiples of the one that puts the largest number of a group
      on the first level.
    signed: scales may be negative.
  """

  levels: tuple[int, ...]
  group: int
  scale_dtype: str = "float16"
  factors: tuple[float, ...] = (1.0,)
  signed: bool = True

  @property
  def is_uniform(self) -> bool:
    """Neighbouring levels differ by 1."""
    return self.levels[-1] - self.levels[0] == len(self.levels) - 1


class Fitted(NamedTuple):
  """Rows on a grid: the number in column j is scale[group of j] * level[j].

  Attributes:
    scale: scales, as they are in the file.
    level: levels, not codes.
  """

  scale: Float[np.ndarray, "R G"]
  level: Int[np.ndarray, "R D"]

  def values(self) -> Float[np.ndarray, "R D"]:
    """The rows, float32."""
    repeats = self.level.shape[1] // self.scale.shape[1]
    return np.repeat(self.scale.astype(np.float32), repeats, axis=1) * self.level


def check_rows(rows: Num[np.ndarray, "R D"], name: str = "rows") -> None:
  """Raise ValueError unless all numbers are finite."""
  if not np.isfinite(rows).all():
    at = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
    raise ValueError(
      f"`{name}` must be finite; row {at} has NaN or an infinity. The model is damaged: download it"
      " again."
    )


def _check_metric(metric: Num[np.ndarray, "D D"], dim: int) -> np.ndarray:
  """A metric as float64; ValueError unless it is a positive definite matrix of width `dim`."""
  metric = np.asarray(metric, np.float64)
  if metric.shape != (dim, dim):
    raise ValueError(
      f"`metric` must have shape [{dim}, {dim}], the width of the table; got {list(metric.shape)}."
      " Collect the moments with this model."
    )
  if not np.isfinite(metric).all() or not np.allclose(metric, metric.T, rtol=1e-4, atol=1e-6):
    raise ValueError(
      "`metric` must be finite and symmetric; got another matrix. Collect the moments again."
    )
  lowest = np.linalg.eigvalsh(metric)[0]
  if lowest <= 0:
    raise ValueError(
      f"`metric` must be positive definite; its lowest eigenvalue is {lowest:.3g}. Add a"
      " multiple of the identity."
    )
  return metric


def fit_grid(
  rows: Num[np.ndarray, "R D"],
  grid: LevelGrid,
  metric: Num[np.ndarray, "D D"],
  *,
  unit: Num[np.ndarray, "R G"] | None = None,
  passes: int = 2,
) -> Fitted:
  """Round rows to a grid so that (w - q)' M (w - q) is small for each row w.

  Columns are rounded one after another, and the error of each is fed back into those that follow
  (GPTQ, arXiv:2210.17323, Eq. 2-3). The scale of a group is the one of several with the least error
  after this feedback. Then scales and columns are changed one at a time to their best values, which
  cannot raise the error. Each row has its own optimum, whatever its weight is.

  Args:
    rows: the rows; D is divided by the group.
    grid: levels and groups.
    metric: M, positive definite, such as a second moment of hidden states plus a diagonal.
    unit: scales are multiples of it by -127 to 127; None: any number of `grid.scale_dtype`.
    passes: sweeps of single changes.
  """
  dim = rows.shape[1]
  metric = _check_metric(metric, dim)
  # The row j of this factor has the feedback of an error in column j on the columns after it.
  upper = np.linalg.cholesky(np.linalg.inv(metric)).T.astype(np.float32)
  constants = jnp.asarray(metric, jnp.float32), jnp.asarray(np.ascontiguousarray(upper))
  groups = dim // grid.group
  scale = np.empty((len(rows), groups), np.float32)
  level = np.empty((len(rows), dim), np.int16)
  for first in range(0, len(rows), CHUNK):
    some = np.asarray(rows[first : first + CHUNK], np.float32)
    check_rows(some)
    count = len(some)
    # The last rows are filled up, so that they need no program of their own.
    pad = ((0, min(CHUNK, len(rows)) - count), (0, 0))
    units = None if unit is None else jnp.asarray(np.pad(unit[first : first + CHUNK], pad)).T
    found = _fit(jnp.asarray(np.pad(some, pad)).T, units, *constants, grid=grid, passes=passes)
    scale[first : first + count] = np.asarray(found[0]).T[:count]
    level[first : first + count] = np.asarray(found[1]).T[:count]
  return Fitted(scale, level)


@functools.partial(jax.jit, static_argnames=("grid", "passes"))
def _fit(rows_DR, unit_GR, metric_DD, upper_DD, *, grid: LevelGrid, passes: int):
  """Scales [G, R] and levels [D, R]; rows are columns here, so that all loops run along them."""
  round_scale = functools.partial(_rounded_scale, dtype=jnp.dtype(grid.scale_dtype))
  units = lambda at: None if unit_GR is None else unit_GR[at]
  fed_back = _feed_back(rows_DR, units, metric_DD, upper_DD, grid, round_scale)
  sweep = functools.partial(
    _sweep, rows_DR=rows_DR, units=units, metric_DD=metric_DD, grid=grid, round_scale=round_scale
  )
  return jax.lax.fori_loop(0, passes, lambda _, state: sweep(state), fed_back)


def _rounded_scale(scale, unit, dtype):
  if unit is None:
    return scale.astype(dtype).astype(jnp.float32)
  return unit * jnp.clip(jnp.round(scale / jnp.where(unit == 0, 1, unit)), -127, 127)


def _nearest(x, grid: LevelGrid):
  """The level that is nearest to each number."""
  levels = grid.levels
  if grid.is_uniform:
    return jnp.clip(jnp.round(x), levels[0], levels[-1])
  # A sum of steps: a gather from a table of levels is slower on CPUs.
  found = jnp.full_like(x, levels[0])
  for low, high in itertools.pairwise(levels):
    found += jnp.where(x > (low + high) / 2, jnp.float32(high - low), 0)
  return found


def _divided(x, scale):
  """x / scale, and 0 where the scale is 0."""
  return x * jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


def _tried(block_gR, grid: LevelGrid):
  """Scales that are tried for a group, [K, R]."""
  at = jnp.abs(block_gR).argmax(0)
  largest_R = jnp.take_along_axis(block_gR, at[None], axis=0)
  first_R = largest_R / grid.levels[0]
  first_R = first_R if grid.signed else jnp.abs(first_R)
  return first_R * jnp.asarray(grid.factors, jnp.float32)[:, None]


def _feed_back(rows_DR, units, metric_DD, upper_DD, grid: LevelGrid, round_scale):
  """Round the columns in their order; return scales and levels."""
  dim, count = rows_DR.shape
  group = grid.group
  groups = dim // group
  searched = group <= SEARCHED
  block = group if searched else next(n for n in (32, 16, 8, 4, 2, 1) if group % n == 0)

  def one_block(number, state):
    rest_DR, scale_GR, level_DR = state
    first, of = number * block, number * block // group
    block_bR = jax.lax.dynamic_slice_in_dim(rest_DR, first, block)
    upper_bD = jax.lax.dynamic_slice_in_dim(upper_DD, first, block)
    upper_bb = jax.lax.dynamic_slice_in_dim(upper_bD, first, block, axis=1)
    tried_KR = round_scale(_tried(block_bR, grid), units(of)) if searched else scale_GR[of][None]

    def one_column(column, errors_and_levels):
      error_bKR, level_bKR = errors_and_levels
      # Errors of this column and of later ones are still 0.
      fed_KR = block_bR[column] - jnp.tensordot(upper_bb[:, column], error_bKR, axes=1)
      level_KR = _nearest(_divided(fed_KR, tried_KR), grid)
      error_KR = (fed_KR - tried_KR * level_KR) / upper_bb[column, column]
      return error_bKR.at[column].set(error_KR), level_bKR.at[column].set(level_KR)

    empty = jnp.zeros((block, *tried_KR.shape), jnp.float32)
    error_bKR, level_bKR = jax.lax.fori_loop(0, block, one_column, (empty, empty))
    best_R = (error_bKR**2).sum(0).argmin(0)
    pick = lambda array: jnp.take_along_axis(array, best_R[None, None], axis=1)[:, 0]
    rest_DR = rest_DR - upper_bD.T @ pick(error_bKR)
    scale_R = jnp.take_along_axis(tried_KR, best_R[None], axis=0)[0]
    level_DR = jax.lax.dynamic_update_slice_in_dim(level_DR, pick(level_bKR), first, 0)
    return rest_DR, scale_GR.at[of].set(scale_R), level_DR

  scale_GR = jnp.zeros((groups, count), jnp.float32)
  if not searched:
    # The search with feedback would hold an error for each scale that is tried.
    weight_D = jnp.diagonal(metric_DD)
    for number in range(groups):
      own = slice(number * group, (number + 1) * group)
      tried_KR = round_scale(_tried(rows_DR[own], grid), units(number))
      costs = [
        ((rows_DR[own] - s * _nearest(_divided(rows_DR[own], s), grid)) ** 2 * weight_D[own, None])
        .sum(0)
        for s in tried_KR
      ]  # fmt: skip
      best_R = jnp.stack(costs).argmin(0)
      scale_GR = scale_GR.at[number].set(jnp.take_along_axis(tried_KR, best_R[None], axis=0)[0])
  state = rows_DR, scale_GR, jnp.zeros_like(rows_DR)
  _, scale_GR, level_DR = jax.lax.fori_loop(0, dim // block, one_block, state)
  return scale_GR, level_DR


def _sweep(state, *, rows_DR, units, metric_DD, grid: LevelGrid, round_scale):
  """Change each scale, then each level of its group, to the best value with all else as it is."""
  group = grid.group
  scale_GR, level_DR = state
  left_DR = rows_DR - jnp.repeat(scale_GR, group, axis=0) * level_DR

  def one_group(number, state):
    pull_DR, scale_GR, level_DR = state
    first = number * group
    own = lambda array, axis=0: jax.lax.dynamic_slice_in_dim(array, first, group, axis)
    metric_Dg = own(metric_DD, 1)
    metric_gg = own(metric_Dg)
    level_gR, pull_gR, scale_R = own(level_DR), own(pull_DR), scale_GR[number]
    before_gR = scale_R * level_gR
    # The error is a quadratic in the scale, with this slope and this curvature.
    turned_gR = metric_gg @ level_gR
    slope_R, curvature_R = (level_gR * pull_gR).sum(0), (level_gR * turned_gR).sum(0)
    moved_R = round_scale(scale_R + _divided(slope_R, curvature_R), units(number))
    change_R = moved_R - scale_R
    is_better = 2 * change_R * slope_R > change_R**2 * curvature_R
    is_better &= grid.signed | (moved_R > 0)
    change_R = jnp.where(is_better, change_R, 0)
    scale_R, pull_gR = scale_R + change_R, pull_gR - change_R * turned_gR

    def one_column(column, state):
      pull_gR, level_gR = state
      wanted_R = level_gR[column] + _divided(pull_gR[column] / metric_gg[column, column], scale_R)
      level_R = jnp.where(scale_R == 0, level_gR[column], _nearest(wanted_R, grid))
      change_R = scale_R * (level_R - level_gR[column])
      pull_gR = pull_gR - metric_gg[:, column, None] * change_R
      return pull_gR, level_gR.at[column].set(level_R)

    _, level_gR = jax.lax.fori_loop(0, group, one_column, (pull_gR, level_gR))
    pull_DR = pull_DR - metric_Dg @ (scale_R * level_gR - before_gR)
    level_DR = jax.lax.dynamic_update_slice_in_dim(level_DR, level_gR, first, 0)
    return pull_DR, scale_GR.at[number].set(scale_R), level_DR

  state = metric_DD @ left_DR, scale_GR, level_DR
  return jax.lax.fori_loop(0, rows_DR.shape[0] // group, one_group, state)[1:]
