"""Encoders of the block types of GGUF, by llama.cpp's rounding or fitted in a metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num, UInt8

from vqjax.tables.grids import LevelGrid, check_rows, fit_grid

__all__ = ["encode_blocks"]

NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of IQ4_NL."""

BOTH_SIGNS = tuple(sign * s for s in (0.70, 0.77, 0.84, 0.90, 0.96, 1.02, 1.10) for sign in (1, -1))
"""Scales that are tried for few levels, whose two ends differ."""

ONE_SIGN = (0.94, 0.97, 1.0, 1.015)
"""Scales that are tried for many levels."""


class RowBlocks(NamedTuple):
  """Rows in blocks.

  Attributes:
    scale: the scale of each block.
    factor: the factor of each group; None: each group is a block.
    level: the level of each number.
  """

  scale: Float[np.ndarray, "R N"]
  factor: Int[np.ndarray, "R G"] | None
  level: Int[np.ndarray, "R D"]


@dataclasses.dataclass(frozen=True)
class BlockType:
  """A block type of GGUF.

  Attributes:
    block: columns of a block, which has one float16 scale.
    bytes: bytes of a block.
    grid: its levels and groups. Where several groups make a block, each has an int8 factor of the
      block's scale.
    rounded: rows -> their blocks as llama.cpp rounds them.
    layout: (codes of the levels, factors, scales), of blocks, as uint8 -> the parts of the bytes.
    coded: levels -> their codes; None: their distance from the first level.
  """

  block: int
  bytes: int
  grid: LevelGrid
  rounded: Callable[[np.ndarray], RowBlocks]
  layout: Callable[[np.ndarray, np.ndarray | None, np.ndarray], list[np.ndarray]]
  coded: Callable[[np.ndarray], np.ndarray] | None = None

  @property
  def has_factors(self) -> bool:
    """Groups have int8 factors of the block's scale."""
    return self.grid.group < self.block


def block_type(name: str, dim: int) -> BlockType:
  """A block type for rows of width `dim`.

  Raises:
    ValueError: the type is unknown, or its blocks do not divide the rows.
  """
  if name not in TYPES:
    raise ValueError(f"`kind` must be one of {', '.join(TYPES)}; got {name!r}. Use one of them.")
  kind = TYPES[name]
  if dim % kind.block:
    fitting = ", ".join(other for other, t in TYPES.items() if dim % t.block == 0) or "none"
    raise ValueError(
      f"`kind` {name} must have rows whose width is a multiple of {kind.block}; got width {dim}."
      f" The types for this width: {fitting}."
    )
  return kind


def encode_blocks(
  name: str, rows: Num[np.ndarray, "R D"], metric: Num[np.ndarray, "D D"] | None = None
) -> UInt8[np.ndarray, "R n"]:
  """The bytes of rows in a block type.

  Args:
    name: one of `TYPES`.
    rows: the rows.
    metric: the rows are fitted in this metric, as `grids.fit_grid` does; None: each number is
      rounded as llama.cpp does without an importance matrix.

  Raises:
    ValueError: the type is unknown or does not suit the width, or numbers are not finite.
  """
  rows = np.ascontiguousarray(rows, np.float32)
  check_rows(rows)
  kind = block_type(name, rows.shape[1])
  plain = kind.rounded(rows)
  if metric is None:
    return _block_bytes(kind, plain)
  unit = scale = factor = None
  if kind.has_factors:
    # The feedback of errors may make a group larger than it was: factors get a tenth of headroom.
    scale = (np.float32(1.1) * plain.scale.astype(np.float32)).astype(np.float16)
    unit = np.repeat(scale.astype(np.float32), kind.block // kind.grid.group, axis=1)
  found = fit_grid(rows, kind.grid, metric, unit=unit)
  if kind.has_factors:
    factor = np.rint(np.divide(found.scale, unit, out=np.zeros_like(unit), where=unit != 0))
    factor = factor.astype(np.int8)
  else:
    scale = found.scale.astype(np.float16)
  fitted = RowBlocks(scale, factor, found.level)
  # Some rows are on a grid as they are, which the search may miss.
  errors = [_error(kind, blocks, rows, metric) for blocks in (plain, fitted)]
  is_better_R1 = (errors[1] < errors[0])[:, None]
  choose = lambda new, old: None if new is None else np.where(is_better_R1, new, old)
  return _block_bytes(kind, RowBlocks(*map(choose, fitted, plain)))


def _error(kind: BlockType, blocks: RowBlocks, rows: np.ndarray, metric: np.ndarray) -> np.ndarray:
  """The error of each row in a metric."""
  scale = blocks.scale.astype(np.float32)
  if blocks.factor is not None:
    scale = np.repeat(scale, kind.block // kind.grid.group, axis=1) * blocks.factor
  wrong = rows - np.repeat(scale, kind.grid.group, axis=1) * blocks.level
  return np.einsum("rd,rd->r", wrong @ np.asarray(metric, np.float32), wrong)


def _round_half_away(x: np.ndarray) -> np.ndarray:
  return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def _inverse(x: np.ndarray) -> np.ndarray:
  return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def _largest(blocks: np.ndarray) -> np.ndarray:
  """The number of the largest magnitude of each block, with its sign."""
  return np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)


def _rounded_8_bits(rows: np.ndarray) -> RowBlocks:
  blocks = rows.reshape(len(rows), -1, 32)
  scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
  level = _round_half_away(blocks * _inverse(scale))
  return RowBlocks(
    scale[..., 0].astype(np.float16), None, level.reshape(rows.shape).astype(np.int16)
  )


def _rounded_from_largest(rows: np.ndarray, most: int) -> RowBlocks:
  """The largest number of a block is on the level -most."""
  blocks = rows.reshape(len(rows), -1, 32)
  scale = _largest(blocks) / np.float32(-most)
  code = np.trunc(blocks * _inverse(scale) + np.float32(most + 0.5)).clip(0, 2 * most - 1)
  level = code.reshape(rows.shape).astype(np.int16) - most
  return RowBlocks(scale[..., 0].astype(np.float16), None, level)


def _best_scale(blocks: np.ndarray, inverses: list[np.ndarray], nearest) -> np.ndarray:
  """The least-squares scale for the levels of the best of several scales; weights are squares."""
  best, explained = np.zeros_like(blocks[..., :1]), np.full_like(blocks[..., :1], -1)
  for inverse in inverses:
    level = nearest(inverse * blocks)
    product = (blocks**3 * level).sum(-1, keepdims=True)
    square = (blocks**2 * level**2).sum(-1, keepdims=True)
    scale = product * _inverse(square)
    better = (square > 0) & (scale * product > explained)
    best, explained = np.where(better, scale, best), np.where(better, scale * product, explained)
  return best


def _nearest_non_linear(x: np.ndarray) -> np.ndarray:
  levels = np.asarray(NON_LINEAR, np.float32)
  return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x, side="right")]


def _rounded_non_linear(rows: np.ndarray) -> RowBlocks:
  blocks = rows.reshape(len(rows), -1, 32)
  largest = _inverse(_largest(blocks))
  # The first one puts the largest number on 127, the others put it near -127.
  tried = [np.float32(127) * largest, *((np.float32(n - 127) * largest) for n in range(-7, 8))]
  scale = _best_scale(blocks, tried, _nearest_non_linear)
  level = _nearest_non_linear(blocks * _inverse(scale)).reshape(rows.shape).astype(np.int16)
  return RowBlocks(scale[..., 0].astype(np.float16), None, level)


def _rounded_6_bits(rows: np.ndarray) -> RowBlocks:
  groups = rows.reshape(len(rows), -1, 16, 16)
  largest = _inverse(_largest(groups))
  order = [0, *(n for n in range(-9, 10) if n)]
  tried = [np.float32(-(32 + 0.1 * n)) * largest for n in order]
  scale = _best_scale(groups, tried, lambda x: np.rint(x).clip(-32, 31))[..., 0]
  wide = _largest(scale)
  inverse = np.float32(-128) * _inverse(wide)
  unit = _inverse(inverse).astype(np.float16)
  factor = np.minimum(np.rint(inverse * scale), 127)
  step = unit.astype(np.float32) * factor
  level = np.rint(groups * _inverse(step)[..., None]).clip(-32, 31)
  return RowBlocks(
    unit[..., 0], factor.reshape(len(rows), -1).astype(np.int8),
    level.reshape(rows.shape).astype(np.int16),
  )  # fmt: skip


def _block_bytes(kind: BlockType, blocks: RowBlocks) -> np.ndarray:
  """The bytes of blocks, [R, n]."""
  level = blocks.level.reshape(-1, kind.block)
  scale = np.ascontiguousarray(blocks.scale.astype("<f2")).reshape(-1, 1).view(np.uint8)
  code = (kind.coded or (lambda level: level - kind.grid.levels[0]))(level).astype(np.uint8)
  factor = None
  if blocks.factor is not None:
    factor = blocks.factor.reshape(-1, kind.block // kind.grid.group).view(np.uint8)
  return np.concatenate(kind.layout(code, factor, scale), axis=1).reshape(len(blocks.level), -1)


def _parts_of_4_bits(code: np.ndarray) -> list[np.ndarray]:
  """The first half of a block is in the low bits, the second half in the high bits."""
  return [code[:, :16] | code[:, 16:] << 4]


def _parts_of_5_bits(code: np.ndarray) -> list[np.ndarray]:
  high = np.packbits(code >> 4, axis=1, bitorder="little")
  return [high, *_parts_of_4_bits(code & 15)]


def _parts_of_6_bits(code: np.ndarray) -> list[np.ndarray]:
  """Four low bits of each number, by pairs 64 columns apart, and two high bits by fours."""
  quarter = code.reshape(len(code), 2, 4, 32)  # halves of a block, quarters of a half
  low, high = quarter & 15, quarter >> 4
  low = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
  high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
  return [low.reshape(len(code), 128), high.reshape(len(code), 64)]


TYPES = {
  "Q4_0": BlockType(
    32, 18, LevelGrid(tuple(range(-8, 8)), 32, factors=BOTH_SIGNS),
    rounded=lambda rows: _rounded_from_largest(rows, 8),
    layout=lambda code, _, scale: [scale, *_parts_of_4_bits(code)],
  ),
  "IQ4_NL": BlockType(
    32, 18, LevelGrid(NON_LINEAR, 32, factors=BOTH_SIGNS),
    rounded=_rounded_non_linear,
    layout=lambda code, _, scale: [scale, *_parts_of_4_bits(code)],
    coded=lambda level: np.searchsorted(np.asarray(NON_LINEAR), level),
  ),
  "Q5_0": BlockType(
    32, 22, LevelGrid(tuple(range(-16, 16)), 32, factors=BOTH_SIGNS),
    rounded=lambda rows: _rounded_from_largest(rows, 16),
    layout=lambda code, _, scale: [scale, *_parts_of_5_bits(code)],
  ),
  "Q6_K": BlockType(
    256, 210, LevelGrid(tuple(range(-32, 32)), 16, factors=(*ONE_SIGN, -1.02)),
    rounded=_rounded_6_bits,
    layout=lambda code, factor, scale: [*_parts_of_6_bits(code), factor, scale],
  ),
  "Q8_0": BlockType(
    32, 34, LevelGrid(tuple(range(-127, 128)), 32, factors=ONE_SIGN),
    rounded=_rounded_8_bits,
    layout=lambda code, _, scale: [scale, code],
    # Two's complement.
    coded=lambda level: level.astype(np.int8).view(np.uint8),
  ),
}  # fmt: skip
"""The block types that are written, by their names."""
