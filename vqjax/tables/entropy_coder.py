"""The entropy coder of compressed tables: rANS of the indices of the dependent quantiser.

`encode_table` writes what `vqjax.tables.container` reads; `decoded` is the reader's loop over
integers, compiled. All lanes of some restart blocks are coded side by side, one integer of each at
a time, in the order of rows and of groups of columns: arrays are [R, G, B, L] with R rows of a
block, G groups of L columns, and B blocks.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt16, UInt32

from vqjax.tables.container import (
  ESCAPES,
  FAR,
  FORMAT,
  LARGEST,
  LOWEST,
  NEXT_STATE,
  PRECISION,
  RESTART,
  SYMBOLS,
  VERSION,
  Distributions,
  Streams,
  lanes_of,
  side_by_side,
)

__all__ = [
  "coded_bytes",
  "decoded",
  "distributions_of",
  "encode_blocks",
  "encode_table",
  "indices",
  "sealed_header",
  "small_parts",
  "stored_parts",
]

MOST_DISTRIBUTIONS = 255
"""Most distributions; one more codes nothing in padding."""

AT_ONCE = 2**10
"""Lanes that are coded side by side; arrays of this many are about 150 megabytes."""

LEAST_WORDS = 2**17
"""Words of the least part that is decoded, so that blocks of other lengths share a program."""

SIZE_OF_HEADER = 1000
"""Bytes of a header, about."""

STORED_AS_THEY_ARE = ("words", "sums")
"""Parts that zlib cannot make smaller."""

Integers = Any
"""Integers [V, D]: an array, or what has a shape and gives rows as an array does."""


def _blocks_at_once(rows: int, columns: int, restart: int) -> int:
  """Restart blocks that are coded side by side: a power of 2, so that few programs are compiled."""
  blocks = 2 ** math.ceil(math.log2(-(-rows // restart)))
  return min(blocks, max(1, AT_ONCE // lanes_of(columns, restart)))


def _parts(rows: int, columns: int, restart: int = RESTART) -> list[slice]:
  """The rows in order, some whole restart blocks at a time."""
  step = restart * _blocks_at_once(rows, columns, restart)
  return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _filled(
  levels: Integers, row_group: np.ndarray, own: slice, row_groups: int, restart: int = RESTART
) -> tuple[Int[np.ndarray, "B R D"], UInt8[np.ndarray, "B R"]]:
  """Rows of whole restart blocks and their row groups; what is behind the last codes nothing."""
  rows = np.asarray(levels[own], np.int32)
  count = restart * _blocks_at_once(*levels.shape, restart)
  missing, columns = count - len(rows), -rows.shape[1] % lanes_of(rows.shape[1], restart)
  owner = np.pad(row_group[own], (0, missing), constant_values=row_groups)
  rows = np.pad(rows, ((0, missing), (0, columns))) if missing or columns else rows
  return rows.reshape(-1, restart, rows.shape[1]), owner.reshape(-1, restart)


def _by_lane(x_BRD: Array, lanes: int) -> Array:
  """[B, R, D] as [R, G, B, L]."""
  return x_BRD.reshape(*x_BRD.shape[:2], -1, lanes).transpose(1, 2, 0, 3)


def _trellis(levels_RGBL: Array) -> tuple[Array, Array, Array]:
  """Indices, quantisers, and whether each integer is one of its quantiser."""
  following = jnp.asarray(NEXT_STATE, jnp.int32)

  def column(state_BL, level_BL):
    size_BL, quantizer_BL = jnp.abs(level_BL), state_BL & 1
    odd_BL = size_BL & 1
    index_BL = (size_BL >> 1) + odd_BL
    is_own_BL = odd_BL == jnp.where(size_BL > 0, quantizer_BL, 0)
    found = jnp.sign(level_BL) * index_BL, quantizer_BL.astype(jnp.uint8), is_own_BL
    return following[state_BL, index_BL & 1], found

  start = jnp.zeros(levels_RGBL.shape[2:], jnp.int32)
  return lax.scan(lambda state, row: lax.scan(column, state, row), start, levels_RGBL)[1]


def symbols(index: Array, shift: Array) -> Array:
  """Symbols of indices; those that are far away have one of the two escapes."""
  high = index >> shift
  escape = ESCAPES[0] + (index & 1)
  return jnp.where(jnp.abs(high) > LARGEST, escape, high + LARGEST)


@functools.partial(jax.jit, static_argnames="lanes")
def _indices(
  levels: Int[Array, "B R D"], *, lanes: int
) -> tuple[Int[Array, "B R D"], UInt8[Array, "B R D"], Bool[Array, ""]]:
  index, quantizer, is_own = _trellis(_by_lane(levels, lanes))
  back = lambda x: x.transpose(2, 0, 1, 3).reshape(levels.shape)
  return back(index), back(quantizer), is_own.all()


def indices(levels: Int[np.ndarray, "R D"]) -> tuple[np.ndarray, np.ndarray]:
  """Indices of integers in their quantisers, and these, [R, D]; row 0 begins a restart block.

  Raises:
    ValueError: an integer is not one of its quantiser.
  """
  (rows, columns), none = levels.shape, np.zeros(len(levels), np.uint8)
  found = []
  for own in _parts(rows, columns):
    blocks, _ = _filled(levels, none, own, 1)
    *both, are_own = _indices(blocks, lanes=lanes_of(columns))
    _check(are_own)
    found.append([np.asarray(x).reshape(-1, x.shape[2])[:, :columns] for x in both])
  index, quantizer = (np.concatenate(part)[:rows] for part in zip(*found))
  return index, quantizer


def _check(are_own):
  if not are_own:
    raise ValueError(
      "`levels` must be those of the trellis; got integers that their quantiser does not have. Take"
      " them from vqjax.tables.coded_table."
    )


@functools.partial(jax.jit, static_argnames="lanes")
def _histogram_places(levels, owner, shift, *, lanes):
  """The place of each integer in histograms [2, C, D, SYMBOLS]; one behind the last for padding."""
  index, quantizer, are_own = _indices(levels, lanes=lanes)
  row_groups, columns = shift.shape
  column = jnp.arange(levels.shape[2])
  # The last row group is that of padding.
  which = jnp.minimum(owner, row_groups - 1).astype(jnp.int32)
  symbol = symbols(index, jnp.pad(shift, ((0, 0), (0, len(column) - columns)))[which])
  cell = (quantizer.astype(jnp.int32) * row_groups + which[..., None]) * columns + column
  nothing = (owner[..., None] >= row_groups) | (column >= columns)
  place = jnp.where(nothing, 2 * row_groups * columns * SYMBOLS, cell * SYMBOLS + symbol)
  return place, are_own


def distributions_of(
  levels: Integers,
  row_group: UInt8[np.ndarray, "V"],
  row_groups: int,
  *,
  restart: int = RESTART,
  weight: Float[np.ndarray, "C"] | None = None,
) -> tuple[Distributions, Float[np.ndarray, "C"]]:
  """Few distributions for row groups and columns of integers [V, D], and the bits of row groups.

  Histograms of quantisers, row groups and columns are clustered by the bits that they cost under
  the distribution of their cluster.

  Args:
    levels: the integers.
    row_group: row group of each row.
    row_groups: number of row groups, C.
    restart: rows that are coded together.
    weight: rows of the table for which one of a row group stands. Row groups are then coded too,
      and every distribution has escapes, for integers that no row here has. None: all rows of the
      table are here.
  """
  rows, columns = levels.shape
  count = np.bincount(row_group, minlength=row_groups)
  squares = np.zeros((row_groups, columns))
  parts = _parts(rows, columns, restart)
  for own in parts:
    of_group = (row_group[own] == np.arange(row_groups)[:, None]).astype(np.float32)
    squares += of_group @ np.square(levels[own], dtype=np.float32)
  root = np.sqrt(squares / np.maximum(count, 1)[:, None]) / 2
  # Bits below a twelfth of the deviation are as good as uniform.
  shift = np.clip(np.floor(np.log2(np.maximum(root, 1) / 12)), 0, 16).astype(np.uint8)

  def count_part(own):
    filled = _filled(levels, row_group, own, row_groups, restart)
    place, are_own = _histogram_places(*filled, shift, lanes=lanes_of(columns, restart))
    _check(are_own)
    return np.bincount(np.asarray(place).ravel(), minlength=cells + 1)[:cells]

  cells = 2 * row_groups * columns * SYMBOLS
  flat = np.zeros(cells, np.int64)
  for counted in side_by_side(count_part, parts):
    flat += counted
  flat = flat.reshape(-1, SYMBOLS)
  if weight is not None:
    count = count * weight
    flat = flat * np.repeat(np.tile(weight, 2), columns)[:, None]
    flat += 1e-6 * _may_be_seen(flat)
  most = min(MOST_DISTRIBUTIONS - (weight is not None), max(1, rows * columns // 2**15))
  frequencies, distribution = clusters(flat, most)
  bits = PRECISION - np.log2(np.maximum(frequencies, 1))
  bits[:, list(ESCAPES)] += 32
  total = np.empty(len(flat))
  for first in range(0, len(flat), 2**12):
    own = slice(first, first + 2**12)
    total[own] = (flat[own] * bits[distribution[own]]).sum(axis=1)
  total = total.reshape(2, row_groups, columns).sum(axis=(0, 2))
  total += count * shift.sum(axis=1, dtype=np.int64)
  distribution = distribution.reshape(2, row_groups, columns).astype(np.uint8)
  if weight is None:
    return Distributions(frequencies, distribution, shift, restart), total
  of_groups = _quantised(np.pad(count.astype(float), (0, SYMBOLS - row_groups)))
  total += count * (PRECISION - np.log2(np.maximum(of_groups[:row_groups], 1.0)))
  frequencies = np.concatenate([frequencies, of_groups[None]])
  return Distributions(frequencies, distribution, shift, restart, codes_groups=True), total


def _may_be_seen(histograms: Float[np.ndarray, "N S"]) -> Bool[np.ndarray, "N S"]:
  """Symbols that other rows than those that were counted may have: near seen ones, and escapes."""
  seen, number = histograms[:, : min(ESCAPES) - 1] > 0, np.arange(SYMBOLS)
  first = np.where(seen.any(axis=1), seen.argmax(axis=1), SYMBOLS)[:, None]
  last = (seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1))[:, None]
  more = (last - first) // 4 + 2
  is_near = (number >= first - more) & (number <= last + more) & (number < seen.shape[1])
  return is_near | np.isin(number, ESCAPES)


def clusters(histograms: np.ndarray, most: int, steps: int = 6) -> tuple[np.ndarray, np.ndarray]:
  """Distributions in 2^PRECISION parts, [K, SYMBOLS], and the one of each histogram, [N].

  Args:
    histograms: occurrences of each symbol, [N, SYMBOLS].
    most: most distributions.
    steps: times that histograms go to the distribution under which they cost the fewest bits.
  """
  total = histograms.sum(axis=1)
  seen = total > 0
  counts = histograms[seen].astype(np.float32)
  if not len(counts):
    empty = np.zeros((1, SYMBOLS), np.uint16)
    empty[0, LARGEST] = 2**PRECISION
    return empty, np.zeros(len(histograms), np.int64)
  p = counts / counts.sum(axis=1, keepdims=True)
  entropy = -(p * np.log2(np.maximum(p, 1e-30))).sum(axis=1)
  del p  # as large as the counts
  rank = np.argsort(np.argsort(entropy, kind="stable"), kind="stable")
  assigned = rank * min(most, len(counts)) // len(counts)
  for _ in range(steps):
    _, assigned = np.unique(assigned, return_inverse=True)
    smooth = _sums(assigned, counts) + 1e-3
    bits = -np.log2(smooth / smooth.sum(axis=1, keepdims=True)).astype(np.float32)
    assigned = (counts @ bits.T).argmin(axis=1)
  _, assigned = np.unique(assigned, return_inverse=True)
  sums = _sums(assigned, counts)
  distribution = np.zeros(len(histograms), np.int64)
  distribution[seen] = assigned
  return np.stack([_quantised(row) for row in sums]), distribution


def _sums(assigned: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Sums [K, SYMBOLS] of the histograms [N, SYMBOLS] of each cluster, where [N] names theirs."""
  order = np.argsort(assigned, kind="stable")
  starts = np.searchsorted(assigned[order], np.arange(assigned.max() + 1))
  return np.add.reduceat(counts[order], starts, axis=0, dtype=np.float64)


def _quantised(counts: np.ndarray) -> np.ndarray:
  """Counts [SYMBOLS] as parts of 2^PRECISION, at least 1 for each that is not 0."""
  parts = np.where(counts > 0, np.maximum(1, np.rint(counts / counts.sum() * 2**PRECISION)), 0)
  while excess := int(parts.sum()) - 2**PRECISION:
    # From the largest, of which a part is the least of the probability.
    order = np.argsort(-parts)[: max(1, min(abs(excess), np.count_nonzero(parts > 1)))]
    parts[order] -= np.sign(excess)
  return parts.astype(np.uint16)


@functools.lru_cache(maxsize=4)
def _arguments(model: Distributions) -> dict[str, Array]:
  """A model as arguments of compiled functions, of few shapes.

  `pairs` has a frequency in its high half and the sum of those before it in the low half.
  """
  distribution, shift = model.padded
  classes = (0, -shift.shape[0] % 16), (0, 0)
  by_group = lambda x: x.reshape(*x.shape[:-1], -1, model.lanes).astype(np.uint8)
  frequency, below, of_slots = model.tables
  pairs = np.zeros(256 * SYMBOLS, np.uint32)
  pairs[: len(frequency)] = frequency.astype(np.uint32) << 16 | below.astype(np.uint32)
  slots = np.zeros(256 << PRECISION, np.uint8)
  slots[: len(of_slots)] = of_slots
  padded = np.pad(distribution, ((0, 0), *classes)), np.pad(shift, classes)
  found = {"distribution": by_group(padded[0]), "shift": by_group(padded[1])}
  return {name: jnp.asarray(x) for name, x in (found | {"pairs": pairs, "slots": slots}).items()}


def _of_row(model_CGL: Array, owner_B: Array) -> Array:
  """What the row groups of a row of each block have, [G, B, L]."""
  return jnp.moveaxis(model_CGL[owner_B], 1, 0)


@functools.partial(jax.jit, static_argnames=("lanes", "has_low"))
def _encoded(
  levels: Int[Array, "B R D"],
  owner: UInt8[Array, "B R"],
  distribution: UInt8[Array, "2 C G L"],
  shift: UInt8[Array, "C G L"],
  pairs: UInt32[Array, "N"],
  *,
  lanes: int,
  has_low: bool,
) -> tuple[UInt16[Array, "B L W"], Int[Array, "B L"], Bool[Array, ""]]:
  """Words of each lane at the end of a row, where the first of them is, and `are_own`."""
  levels_RGBL = _by_lane(levels, lanes)
  rows, groups, blocks, _ = levels_RGBL.shape
  index, quantizer, is_own = _trellis(levels_RGBL)
  count = blocks * lanes

  def codes(row):
    """Distribution and symbol of each integer in 16 bits, and what is coded as it is."""
    index_GBL, quantizer_GBL, owner_B = row
    zero_GBL, one_GBL = (_of_row(own, owner_B) for own in distribution)
    shift_GBL = _of_row(shift, owner_B).astype(jnp.int32)
    of_GBL = jnp.where(quantizer_GBL > 0, one_GBL, zero_GBL).astype(jnp.int32)
    code_GBL = of_GBL * SYMBOLS + symbols(index_GBL, shift_GBL)
    if not has_low:
      return (code_GBL.astype(jnp.uint16).reshape(-1, count),)
    low_GBL = index_GBL & ((1 << shift_GBL) - 1)
    return tuple(x.astype(jnp.uint16).reshape(-1, count) for x in (code_GBL, low_GBL, shift_GBL))

  def flushed(state, place, out, is_full):
    """Write a word of each lane, and go on before it where the state is too large to go on."""
    out = out.at[place].set(state.astype(jnp.uint16), unique_indices=True, mode="promise_in_bounds")
    return jnp.where(is_full, state >> 16, state), place - is_full, out

  def step(carry, own):
    state, place, out = carry
    code, *low = own
    pair = pairs[code.astype(jnp.int32)]
    frequency, below = pair >> 16, pair & 0xFFFF
    is_full = state >> (32 - PRECISION) >= frequency
    state, place, out = flushed(state, place, out, is_full)
    quotient = state // frequency
    state = (quotient << PRECISION) + (state - quotient * frequency) + below
    if has_low:
      low, bits = (x.astype(jnp.uint32) for x in low)
      is_full = (bits > 0) & (state >> (32 - jnp.maximum(bits, 1)) > 0)
      state, place, out = flushed(state, place, out, is_full)
      state = state << bits | low
    return (state, place, out), None

  def backward(carry, row):
    return lax.scan(step, carry, codes(row), reverse=True)[0], None

  width = rows * groups * (1 + has_low) + 3
  end = jnp.arange(1, count + 1) * width - 1
  start = jnp.full(count, LOWEST, jnp.uint32), end, jnp.zeros(count * width, jnp.uint16)
  (state, place, out), _ = lax.scan(backward, start, (index, quantizer, owner.T), reverse=True)
  # The decoder begins with the high half of the state.
  state, place, out = flushed(state, place, out, jnp.ones(count, bool))
  out = out.at[place].set(state.astype(jnp.uint16))
  first = (place % width).reshape(blocks, lanes)
  return out.reshape(blocks, lanes, width), first, is_own.all()


def _encode_integers(
  levels: Integers,
  row_group: np.ndarray,
  model: Distributions,
  progress: Callable[[float], None] = lambda part: None,
) -> dict[str, np.ndarray]:
  """The parts of a table of integers [V, D] by their names."""
  (rows, columns), row_groups = levels.shape, len(model.shift)
  options = {"lanes": model.lanes, "has_low": bool(model.shift.any())}
  given = {k: v for k, v in _arguments(model).items() if k != "slots"}

  def encode(own):
    blocks_BRD, owner_BR = _filled(levels, row_group, own, row_groups)
    out, first, are_own = map(np.asarray, _encoded(blocks_BRD, owner_BR, **given, **options))
    _check(are_own)
    count = -(-(own.stop - own.start) // RESTART)
    words = [
      np.concatenate([lane[start:] for lane, start in zip(*block)])
      for block in zip(out[:count], first[:count])
    ]
    far, counts = _far_indices(blocks_BRD[:count, :, :columns], owner_BR[:count], model.shift)
    sums = [zlib.crc32(block.tobytes()) for block in words]
    return np.concatenate(words), out.shape[2] - first[:count], far, counts, sums, own.stop

  found = []
  for part in side_by_side(encode, _parts(rows, columns)):
    progress(part[-1] / rows)
    found.append(part[:-1])
  words, lengths, escapes, counts, sums = map(np.concatenate, zip(*found))
  return {
    "words": words,
    "lengths": lengths.astype(np.uint32),
    "escapes": escapes.astype(np.int32),
    "escape_counts": counts.astype(np.uint32),
    "sums": sums.astype(np.uint32),
  }


def _far_indices(levels_BRD, owner_BR, shift) -> tuple[np.ndarray, np.ndarray]:
  """Indices that have no symbol, in the order of blocks, rows and columns; their numbers."""
  size = np.abs(levels_BRD).max(axis=(1, 2))
  far, counts = [], np.zeros(len(levels_BRD), np.int64)
  for block in np.flatnonzero(size > 2 * LARGEST):
    own = levels_BRD[block]
    index = np.sign(own) * ((np.abs(own) >> 1) + (np.abs(own) & 1))
    # Rows behind the last are 0, whatever their row group is.
    bits = shift[np.minimum(owner_BR[block], len(shift) - 1)]
    found = index[np.abs(index >> bits) > LARGEST]
    far.append(found)
    counts[block] = len(found)
  return np.concatenate([np.zeros(0, np.int32), *far]), counts


def encode_blocks(
  levels: Int[np.ndarray, "B R D"], row_group: UInt8[np.ndarray, "B R"], model: Distributions
) -> tuple[UInt16[np.ndarray, "W"], Int[np.ndarray, "B"]]:
  """The words of blocks of a `PagedTable` one behind the other, and the number of each.

  By NumPy: of blocks with one lane each there are many, and most integers write no word.
  """
  (blocks, rows, columns), last = levels.shape, 2**PRECISION
  fill = 2 ** math.ceil(math.log2(blocks)) - blocks  # so that few programs are compiled
  *both, are_own = _indices(np.pad(levels, ((0, fill), (0, 0), (0, 0))), lanes=1)
  _check(are_own)
  index, quantizer = (np.asarray(x)[:blocks] for x in both)
  frequency, below, _ = model.tables
  shift = model.shift[row_group].astype(np.int32)
  of = model.distribution[quantizer, row_group[..., None], np.arange(columns)].astype(np.int64)
  high = index >> shift
  is_far = np.abs(high) > LARGEST
  at = of * SYMBOLS + np.where(is_far, 0, high + LARGEST)
  # What no row of the sample had has no probability.
  is_far |= frequency[at] == 0
  at = np.where(is_far, of * SYMBOLS + ESCAPES[0] + (index & 1), at)
  by_number = lambda x: np.ascontiguousarray(x.reshape(blocks, -1).T)
  frequencies, sums = by_number(frequency[at]), by_number(below[at])
  has_low = bool(model.shift.any())
  lows, bits = by_number(index & ((1 << shift) - 1)), by_number(shift)
  at_group = (len(model.frequencies) - 1) * SYMBOLS + row_group.T.astype(np.int64)

  width = rows * (columns * (1 + has_low) + 1) + 2
  out, place = np.zeros((blocks, width), np.uint16), np.full(blocks, width)
  state = np.full(blocks, LOWEST, np.int64)

  def put(lanes):
    place[lanes] -= 1
    out[lanes, place[lanes]] = state[lanes] & 0xFFFF
    state[lanes] >>= 16

  def code(own, sum_before):
    put(np.flatnonzero(state >> (32 - PRECISION) >= own))
    state[:] = state // own * last + state % own + sum_before

  for row in reversed(range(rows)):
    for number in reversed(range(row * columns, (row + 1) * columns)):
      code(frequencies[number], sums[number])
      if has_low:
        put(np.flatnonzero((bits[number] > 0) & (state >> (32 - bits[number]) > 0)))
        state[:] = state << bits[number] | lows[number]
    code(frequency[at_group[row]], below[at_group[row]])
  for _ in range(2):  # the decoder begins with the high half of the state
    put(np.arange(blocks))
  words, lengths = out[np.arange(width) >= place[:, None]], width - place
  far = is_far.sum(axis=(1, 2))
  if far.any():
    behind = index[is_far].astype("<i4").view("<u2")
    words = np.insert(words, np.repeat(np.cumsum(lengths), 2 * far), behind)
  return words, lengths + 2 * far


def decoded(
  streams: Streams, model: Distributions
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """The compiled form of `vqjax.tables.container.decoded`."""
  count, _ = streams.place.shape
  # Few shapes, so that few programs are compiled; blocks that are not there are again the first.
  blocks = 2 ** math.ceil(math.log2(count))
  fill = lambda x: np.concatenate([x, np.repeat(x[:1], blocks - count, axis=0)])
  length = max(LEAST_WORDS, 2 ** math.ceil(math.log2(len(streams.words))))
  words = np.pad(streams.words, (0, length - len(streams.words)))
  found = _decoded(
    words, fill(streams.place).astype(np.int32), fill(streams.owner).astype(np.uint8),
    **_arguments(model), has_low=bool(model.shift.any()),
    groups_of=len(model.frequencies) - 1 if model.codes_groups else None,
  )  # fmt: skip
  return tuple(np.asarray(x)[:count] for x in found)


@functools.partial(jax.jit, static_argnames=("has_low", "groups_of"))
def _decoded(
  words: UInt16[Array, "W"],
  place: Int[Array, "B L"],
  owner: UInt8[Array, "B R"],
  distribution: UInt8[Array, "2 C G L"],
  shift: UInt8[Array, "C G L"],
  pairs: UInt32[Array, "N"],
  slots: UInt8[Array, "M"],
  *,
  has_low: bool,
  groups_of: int | None,
) -> tuple[Int[Array, "B R D"], UInt32[Array, "B L"], Int[Array, "B L"], UInt8[Array, "B R"]]:
  following = jnp.asarray(NEXT_STATE, jnp.int32)
  last = len(words) - 1

  def refilled(state, place):
    is_short = state < LOWEST
    word = words[jnp.minimum(place, last)].astype(jnp.uint32)
    return jnp.where(is_short, state << 16 | word, state), place + is_short

  def symbol_of(of, state, place):
    slot = state & (2**PRECISION - 1)
    symbol = slots[(of << PRECISION) + slot.astype(jnp.int32)].astype(jnp.int32)
    pair = pairs[of * SYMBOLS + symbol]
    state = (pair >> 16) * (state >> PRECISION) + slot - (pair & 0xFFFF)
    return symbol, *refilled(state, place)

  def column(carry, own):
    before, state, place = carry
    zero, one, shift = own
    quantizer = before & 1
    if has_low:
      bits = shift.astype(jnp.uint32)
      low = (state & ((jnp.uint32(1) << bits) - 1)).astype(jnp.int32)
      state, place = refilled(state >> bits, place)
    of = jnp.where(quantizer > 0, one, zero).astype(jnp.int32)
    symbol, state, place = symbol_of(of, state, place)
    index = symbol - LARGEST
    odd = symbol & 1
    if has_low:
      index = index << shift.astype(jnp.int32) | low
      odd = jnp.where(shift > 0, low & 1, odd)
    level = 2 * index - jnp.sign(index) * quantizer
    level = jnp.where(symbol >= ESCAPES[0], FAR + quantizer, level)
    return (following[before, odd], state, place), level

  def row(carry, owner_B):
    if groups_of is not None:
      before, state, place = carry
      symbol, state, place = symbol_of(jnp.full_like(before, groups_of), state, place)
      carry, owner_B = (before, state, place), symbol[:, 0].astype(owner.dtype)
    own = [_of_row(x, owner_B) for x in (*distribution, shift)]
    # Unrolled: a step is short, and of few blocks the loop itself would take most of the time.
    carry, levels_GBL = lax.scan(column, carry, tuple(own), unroll=4)
    return carry, (levels_GBL, owner_B)

  state = words[place].astype(jnp.uint32) << 16 | words[place + 1].astype(jnp.uint32)
  start = jnp.zeros(place.shape, jnp.int32), state, place + 2
  (_, state, place), (levels_RGBL, owner_RB) = lax.scan(row, start, owner.T)
  levels = levels_RGBL.transpose(2, 0, 1, 3).reshape(*owner.shape, -1)
  return levels, state, place, owner_RB.T


def encode_table(coded: Any, progress: Callable[[float], None] = lambda part: None) -> dict:
  """A quantised table as arrays of bytes by the names of its parts.

  Args:
    coded: a `CodedTable`, or another object with its five arrays.
    progress: is called with the part that is done.
  """
  # Read a part of the rows at a time, as is what holds them in fewer bits.
  levels = coded.levels
  row_group = np.asarray(coded.row_group, np.uint8)
  row_groups, (rows, columns) = len(coded.steps), levels.shape
  model, _ = distributions_of(levels, row_group, row_groups)
  arrays = _encode_integers(levels, row_group, model, progress)
  stored, entries = stored_parts(arrays | {"row_group": row_group} | small_parts(coded, model))
  fields = {"rows": rows, "columns": columns, "classes": row_groups, "restart": RESTART}
  fields["lanes"] = model.lanes
  return {"header": sealed_header(VERSION, fields, entries)} | stored


def sealed_header(
  version: int, fields: dict[str, int], entries: dict[str, Any]
) -> UInt8[np.ndarray, "n"]:
  """The part that says what the others are, with its checksum."""
  header = {"format": FORMAT, "version": version, "parts": entries} | fields
  text = json.dumps(header, sort_keys=True)
  sealed = json.dumps({"crc32": zlib.crc32(text.encode()), "header": header}, sort_keys=True)
  return np.frombuffer(sealed.encode(), np.uint8)


def coded_bytes(coded: Any, model: Distributions | None = None, bits: float = 0.0) -> int:
  """Bytes that `encode_table` needs for a table, about, without coding it.

  Args:
    coded: the table; its levels may be missing where the others are given.
    model: distributions of its integers; None: those that `distributions_of` finds.
    bits: bits of all integers under the model.
  """
  row_group = np.asarray(coded.row_group, np.uint8)
  if model is None:
    model, of_groups = distributions_of(coded.levels, row_group, len(coded.steps))
    bits = of_groups.sum()
  # A lane has a state of 32 bits, of which 17 say something, and a length; a block a checksum.
  bits += -(-len(row_group) // RESTART) * (model.lanes * (15 + 12) + 32)
  small = stored_parts({"row_group": row_group} | small_parts(coded, model))[0]
  return int(bits / 8 + sum(array.nbytes for array in small.values()) + SIZE_OF_HEADER)


def small_parts(coded, model):
  """The parts of which nothing depends on the number of rows."""
  return {
    "frequencies": model.frequencies,
    "distribution": model.distribution,
    "shift": model.shift,
    "steps": np.asarray(coded.steps, np.float32),
    "mean": np.asarray(coded.mean, np.float32),
    "inverse": np.asarray(coded.inverse),
  }


def stored_parts(arrays):
  """Arrays as bytes, and what the header says of each."""
  stored, entries = {}, {}
  for name, array in arrays.items():
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    entry = {"dtype": array.dtype.str, "shape": list(array.shape)}
    data = array.reshape(-1).view(np.uint8)
    if name not in STORED_AS_THEY_ARE:
      # Bytes of equal weight side by side.
      planes = data.reshape(-1, array.dtype.itemsize).T
      data = np.frombuffer(zlib.compress(planes.tobytes(), 9), np.uint8)
      entry["zlib"] = True
    entry["crc32"] = zlib.crc32(data)
    stored[name], entries[name] = data, entry
  return stored, entries
