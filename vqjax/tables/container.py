"""Entropy-coded tables: the lossless half of the compression of a trained table [V, D].

The integers are those of dependent quantisation with an entropy coder behind it, which
`vqjax.tables.coded` chooses.

A table is row = mean + steps[group] · (levels @ inverse), with integers `levels` and a row group
for each row. The integers are coded by rANS with static distributions: each triple of row group,
quantiser and column uses one of a few distributions, and `RESTART` rows at a time are coded alone,
so that any row can be read without those before it.

Quantisers are dependent: each integer belongs to one of two quantisers, the even integers or 0
and the odd ones, and the parities of the indices before it say to which. An index has
a bit less than its integer, and a distribution of its quantiser.

This file imports NumPy only, so it may be copied to a machine without JAX:

  from container import read_table

  table = read_table("folder", "embedding")
  table.rows(5, 7)                  # float32 [2, D]

Coder: J. Duda (2013), Asymmetric numeral systems; streaming with 63-bit states and 32-bit words.
Quantisers: H. Schwarz et al. (2021), Quantization and entropy coding in the versatile video coding
standard, Section III, with 8 states.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = [
  "FORMAT",
  "MANIFEST",
  "VERSION",
  "CompressedTable",
  "coded_bytes",
  "encode_table",
  "read_table",
]

FORMAT = "vqjax-compressed-table"
VERSION = 2

MANIFEST = "vqjax.json"
"""File of a folder that names its compressed tables."""

SEPARATOR = ".vqjax."
"""What separates the name of a table from that of its part, in names of tensors."""

RESTART = 256
"""Rows that are coded together, and decoded together."""

MOST_LANES, NUMBERS_OF_A_LANE = 16, 2**13
"""Streams of such rows, which are decoded side by side, and integers for which one more pays."""

PRECISION = 14
"""Bits of a probability."""

SYMBOLS = 256
"""Symbols of a distribution: -127 to 127 in steps of 2^shift, and the escape."""

ESCAPE = 0
LARGEST = 127

LOWEST = 2**31
"""Smallest state; states are below 2^63."""

AT_ONCE = 2**10
"""Lanes that are coded side by side."""

MOST_DISTRIBUTIONS = 255
"""Most distributions; one more codes nothing in padding."""

WIDTH_OF_ROW_GROUPS = 1024
"""Row groups are coded as a table of this width."""

NEXT_STATE = np.array([[0, 2], [5, 7], [1, 3], [6, 4], [2, 0], [4, 6], [3, 1], [7, 5]], np.uint8)
"""State of the dependent quantiser after an even and an odd index; a stream begins in state 0.

An integer is of the quantiser `state & 1`: 0 has the even ones, 1 has 0 and the odd ones.
"""


class DamagedTableError(ValueError):
  """The bytes of a table are not those that were written."""


def _damaged(what: str) -> DamagedTableError:
  return DamagedTableError(
    f"the compressed table must be as it was written; got {what}. It is damaged: copy it again."
  )


@dataclasses.dataclass(frozen=True)
class Distributions:
  """The distributions of a table of integers.

  Attributes:
    frequencies: probability of each symbol times 2^PRECISION, [K, SYMBOLS].
    distribution: which of them a quantiser, a row group and a column use, [Q, C, D]. Q is 2, or 1
      for integers that are their own indices.
    shift: low bits of the indices of a row group and a column that are coded as they are, [C, D].
  """

  frequencies: np.ndarray
  distribution: np.ndarray
  shift: np.ndarray

  @property
  def lanes(self) -> int:
    """Streams of a restart block."""
    return lanes_of(self.shift.shape[1])

  @property
  def at_once(self) -> int:
    """Restart blocks that are coded side by side."""
    return AT_ONCE // self.lanes

  @functools.cached_property
  def padded(self) -> tuple[np.ndarray, np.ndarray]:
    """Distribution and shift with a row group and columns of padding that take no bits."""
    nothing = len(self.frequencies)
    last = (0, 1), (0, -self.shift.shape[1] % self.lanes)
    distribution = np.pad(
      self.distribution.astype(np.int64), ((0, 0), *last), constant_values=nothing
    )
    return distribution, np.pad(self.shift.astype(np.int64), last)

  @functools.cached_property
  def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frequencies and their sums so far by symbol, and symbols by slot; all flat."""
    frequency = np.zeros((len(self.frequencies) + 1, SYMBOLS), np.int64)
    frequency[:-1] = self.frequencies
    # The distribution of padding has one symbol, of probability 1.
    frequency[-1, LARGEST + 1] = 2**PRECISION
    if (frequency.sum(axis=1) != 2**PRECISION).any():
      raise _damaged("probabilities that do not add up to 1")
    below = np.cumsum(frequency, axis=1) - frequency
    symbols = np.repeat(
      np.tile(np.arange(SYMBOLS, dtype=np.uint8), len(frequency)), frequency.ravel()
    )
    return frequency.ravel(), below.ravel(), symbols


def lanes_of(columns: int) -> int:
  """Streams of a restart block of so many columns; column j is in stream j modulo their number."""
  return min(MOST_LANES, max(1, RESTART * columns // NUMBERS_OF_A_LANE))


Integers = Any
"""Integers [V, D]: an array, or what has a shape and gives rows as an array does."""


def distributions_of(
  levels: Integers,
  row_group: np.ndarray,
  row_groups: int,
  quantizers: int = 2,
  most: int = MOST_DISTRIBUTIONS,
) -> tuple[Distributions, float]:
  """Few distributions for row groups and columns of integers [V, D], and the bits that all cost.

  Histograms of quantisers, row groups and columns are clustered by the bits that they cost under
  the distribution of their cluster.
  """
  rows, columns = levels.shape
  count = np.bincount(row_group, minlength=row_groups)
  squares = np.zeros((row_groups, columns))
  for some in _ranges(rows, columns):
    of_group = (row_group[some] == np.arange(row_groups)[:, None]).astype(np.float64)
    squares += of_group @ levels[some].astype(np.float64) ** 2
  root = np.sqrt(squares / np.maximum(count, 1)[:, None]) / quantizers
  # Bits below a twelfth of the deviation are as good as uniform.
  shift = np.clip(np.floor(np.log2(np.maximum(root, 1) / 12)), 0, 16).astype(np.uint8)
  shape = quantizers, row_groups, columns
  flat = np.zeros((quantizers, row_groups * columns * SYMBOLS), np.int64)
  for some in _ranges(rows, columns):
    owner = row_group[some].astype(np.int64)
    index, quantizer = indices(levels[some], quantizers)
    place = owner[:, None] * columns + np.arange(columns)
    place = place * SYMBOLS + _symbols(index, shift[owner])
    for number, counted in enumerate(flat):
      counted += np.bincount(place[quantizer == number], minlength=counted.size)
  flat = flat.reshape(-1, SYMBOLS)
  most = min(most, max(1, rows * columns // 2**15))
  frequencies, distribution = _clusters(flat, most)
  bits = PRECISION - np.log2(np.maximum(frequencies, 1))
  total = np.einsum("ns,ns->", flat, bits[distribution]) + 32 * flat[:, ESCAPE].sum()
  total += float((count[:, None] * shift.astype(np.int64)).sum())
  distribution = distribution.reshape(shape).astype(np.uint8)
  return Distributions(frequencies, distribution, shift), float(total)


def _ranges(rows: int, columns: int) -> Iterator[slice]:
  """The rows in order, some whole restart blocks at a time."""
  step = RESTART * max(1, 2**21 // (RESTART * columns))
  return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def indices(levels: np.ndarray, quantizers: int = 2) -> tuple[np.ndarray, np.ndarray]:
  """Indices of integers in their quantisers, and these, [R, D]; row 0 begins a restart block.

  Raises:
    ValueError: an integer is not one of its quantiser.
  """
  if quantizers == 1:
    return levels, np.zeros(levels.shape, np.uint8)
  rows, columns = levels.shape
  lanes = lanes_of(columns)
  padded = np.pad(levels, ((0, -rows % RESTART), (0, -columns % lanes)))
  value = padded.reshape(-1, RESTART, padded.shape[1] // lanes, lanes)
  magnitude = np.abs(value)
  index = (magnitude >> 1) + (magnitude & 1)
  odd = (index & 1).astype(np.uint8)
  state = np.zeros((len(value), lanes), np.uint8)
  quantizer = np.empty(value.shape, np.uint8)
  for row in range(RESTART):
    for group in range(value.shape[2]):
      quantizer[:, row, group] = state & 1
      state = NEXT_STATE[state, odd[:, row, group]]
  wrong = (magnitude & 1) != (quantizer & (magnitude > 0))
  if wrong.any():
    raise ValueError(
      f"`levels` must be those of the trellis; got {value[wrong][0]} where the quantiser has other"
      " integers. Take them from vqjax.tables.coded_table."
    )
  back = lambda x: x.reshape(padded.shape)[:rows, :columns]
  return back(np.sign(value) * index), back(quantizer)


def _symbols(levels: np.ndarray, shift: np.ndarray) -> np.ndarray:
  """Symbols of integers [R, D]: 1 to 255, and the escape for those that are far away."""
  high = levels >> shift
  return np.where(np.abs(high) > LARGEST, ESCAPE, high + LARGEST + 1)


def _clusters(histograms: np.ndarray, most: int, steps: int = 6) -> tuple[np.ndarray, np.ndarray]:
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
    empty[0, LARGEST + 1] = 2**PRECISION
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


def _encode_integers(
  levels: Integers,
  row_group: np.ndarray,
  model: Distributions,
  progress: Callable[[float], None] = lambda part: None,
) -> dict[str, np.ndarray]:
  """The parts of a table of integers [V, D] by their names, those of `PARTS`."""
  _, shift = model.padded
  quantizers = len(model.distribution)
  blocks = -(-len(levels) // RESTART)
  words, lengths, escapes, counts = [], [], [], []
  for first in range(0, blocks, model.at_once):
    some = range(first, min(first + model.at_once, blocks))
    rows, owner = _padded_rows(levels, row_group, some, model.lanes)
    symbols, quantizer = np.empty(rows.shape, np.uint8), np.empty(rows.shape, np.uint8)
    # Some at a time: what this makes beside them is several times as large as the rows.
    for part in _ranges(*rows.shape):
      rows[part], quantizer[part] = indices(rows[part], quantizers)
      symbols[part] = _symbols(rows[part], shift[owner[part]])
    # Padding is a zero, and the escape has no low bits.
    escaped = symbols == ESCAPE
    escapes.append(rows[escaped].astype(np.int32))
    counts.append(escaped.reshape(len(some), -1).sum(axis=1))
    coded, length = _encoded(rows, symbols, quantizer, owner, model)
    words += coded
    lengths.append(length)
    del rows, symbols, quantizer, escaped  # before there are those of the next blocks
    progress(some.stop / blocks)
  escapes, counts = np.concatenate(escapes), np.concatenate(counts)
  sums = np.array([zlib.crc32(block.tobytes()) for block in words], np.uint32)
  return {
    "words": np.concatenate(words),
    "lengths": np.concatenate(lengths),
    "escapes": escapes,
    "escape_counts": counts.astype(np.uint32),
    "sums": sums,
  }


def _padded_rows(
  levels: Integers, row_group: np.ndarray, blocks: range, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
  """Rows of blocks and their row groups, [blocks · RESTART, D and padding], both copies."""
  rows = np.array(levels[blocks.start * RESTART : blocks.stop * RESTART])
  owner = row_group[blocks.start * RESTART : blocks.stop * RESTART]
  missing = len(blocks) * RESTART - len(rows)
  nothing = -1  # the last row group, which codes nothing
  owner = np.pad(owner.astype(np.int64), (0, missing), constant_values=nothing)
  columns = -levels.shape[1] % lanes
  if missing or columns:
    rows = np.pad(rows, ((0, missing), (0, columns)))
  return rows, owner


def _encoded(
  rows: np.ndarray,
  symbols: np.ndarray,
  quantizer: np.ndarray,
  owner: np.ndarray,
  model: Distributions,
) -> tuple[list[np.ndarray], np.ndarray]:
  """Words of each block, and their numbers by lane: [blocks], uint32 [blocks, lanes].

  Args:
    rows: indices, [blocks · RESTART, D and padding].
    symbols: their symbols, of the same shape.
    quantizer: their quantisers, of the same shape.
    owner: row group of each row, [blocks · RESTART].
    model: the distributions.
  """
  frequency, below, _ = model.tables
  distribution, shift = model.padded
  width = model.lanes
  groups = rows.shape[1] // width
  blocks = len(rows) // RESTART
  lanes = blocks * width
  # By row of a block and group of columns: [RESTART, groups, blocks · lanes].
  order = lambda x: x.reshape(blocks, RESTART, groups, width).transpose(1, 2, 0, 3)
  rows, symbols, quantizer = order(rows), order(symbols), order(quantizer)
  owner = owner.reshape(blocks, RESTART)
  by_group = lambda x: x.reshape(*x.shape[:-1], groups, width)
  distribution, shift = by_group(distribution), by_group(shift)
  lane = np.arange(width)
  state = np.full(lanes, LOWEST, np.int64)
  out = np.empty((lanes, 256), np.uint32)
  used = np.zeros(lanes, np.int64)
  for row in reversed(range(RESTART)):
    own = owner[:, row]
    if (own < 0).all():  # padding, at the end of the last block
      continue
    for group in reversed(range(groups)):
      symbol = symbols[row, group].astype(np.int64).ravel()
      low = shift[own, group].ravel()
      of = distribution[quantizer[row, group], own[:, None], group, lane]
      at = of.ravel() * SYMBOLS + symbol
      f = frequency[at]
      # `f << (63 - PRECISION - low)` may be 2^63, which is no int64.
      full = np.flatnonzero(state >> 1 >= f << (62 - PRECISION - low))
      if len(full):
        if used.max() >= out.shape[1] - 2:
          out = np.concatenate([out, np.empty_like(out)], axis=1)
        out[full, used[full]] = state[full] & 0xFFFFFFFF
        used[full] += 1
        state[full] >>= 32
      quotient = state // f
      state = (quotient << PRECISION) + (state - quotient * f) + below[at]
      if low.any():
        state = state << low | rows[row, group].astype(np.int64).ravel() & (1 << low) - 1
  for half in (state & 0xFFFFFFFF, state >> 32):
    if used.max() >= out.shape[1]:
      out = np.concatenate([out, np.empty_like(out)], axis=1)
    out[np.arange(lanes), used] = half
    used += 1
  # A decoder reads backwards what the encoder wrote.
  coded = []
  for block in range(blocks):
    own = range(block * width, (block + 1) * width)
    coded.append(np.concatenate([out[lane, : used[lane]][::-1] for lane in own]))
  return coded, used.reshape(blocks, width).astype(np.uint32)


def _decode_integers(
  parts: Mapping[str, np.ndarray],
  row_group: np.ndarray,
  model: Distributions,
  columns: int,
  first: int,
  last: int,
) -> np.ndarray:
  """Rows `first` to `last` of the integers, from the restart blocks that hold them."""
  start, stop = first // RESTART, -(-last // RESTART)
  found = _decode_blocks(parts, row_group, model, columns, np.arange(start, stop))
  return found.reshape(-1, columns)[first - start * RESTART : last - start * RESTART]


def _decode_blocks(
  parts: Mapping[str, np.ndarray],
  row_group: np.ndarray,
  model: Distributions,
  columns: int,
  blocks: np.ndarray,
) -> np.ndarray:
  """The integers of the given restart blocks, [N, RESTART, D]; rows behind the last are 0."""
  frequency, below, symbols_of = model.tables
  distribution, shift = model.padded
  lengths = parts["lengths"].astype(np.int64)
  by_block = lengths.sum(axis=1)
  begins = np.cumsum(by_block) - by_block
  words = parts["words"]
  if len(words) != by_block.sum() or len(parts["escapes"]) != parts["escape_counts"].sum():
    raise _damaged("another number of words")
  out = np.empty((len(blocks), RESTART, columns), np.int32)
  lanes = model.lanes
  groups = -(-columns // lanes)
  row_groups = np.pad(row_group, (0, -len(row_group) % RESTART)).reshape(-1, RESTART)
  for at in range(0, len(blocks), model.at_once):
    chosen = blocks[at : at + model.at_once]
    count = len(chosen)
    coded = [words[begins[block] : begins[block] + by_block[block]] for block in chosen]
    for block, own in zip(chosen, coded):
      if zlib.crc32(own.tobytes()) != parts["sums"][block]:
        raise _damaged(f"another checksum of rows {block * RESTART} to {(block + 1) * RESTART - 1}")
    own = lengths[chosen].ravel()
    pointer = np.cumsum(own) - own
    # A last word that is read by no lane, for lanes that read behind the end.
    some = np.concatenate([*coded, np.zeros(1, np.uint32)]).astype(np.int64)
    state = some[pointer] << 32 | some[pointer + 1]
    pointer += 2
    owner = row_groups[chosen].astype(np.int64)
    # Rows behind the last have a row group of their own, which codes nothing.
    owner[(chosen[:, None] * RESTART + np.arange(RESTART)) >= len(row_group)] = -1
    by_group = lambda x: x.reshape(*x.shape[:-1], groups, lanes)
    which, bits = by_group(distribution), by_group(shift)
    result = np.empty((RESTART, groups, count, lanes), np.int32)
    mask = 2**PRECISION - 1
    far = _Escapes(parts, chosen)
    quantizer_state, lane = np.zeros((count, lanes), np.uint8), np.arange(lanes)
    for row in range(RESTART):
      own = owner[:, row]
      if (own < 0).all():
        result[row] = 0
        continue
      for group in range(groups):
        low = bits[own, group].ravel()
        has_low = low.any()
        if has_low:
          remainder = state & (1 << low) - 1
          state = state >> low
        slot = state & mask
        quantizer = quantizer_state & 1 if len(which) > 1 else 0
        of = which[quantizer, own[:, None], group, lane].ravel()
        symbol = symbols_of[(of << PRECISION) + slot]
        index = of * SYMBOLS + symbol
        state = frequency[index] * (state >> PRECISION) + slot - below[index]
        level = symbol.astype(np.int64) - (LARGEST + 1)
        if has_low:
          level = (level << low) | remainder
        level = level.reshape(count, lanes)
        escaped = (symbol == ESCAPE).reshape(count, lanes)
        if escaped.any():
          level[escaped] = far.next(escaped)
        if len(which) > 1:
          quantizer_state = NEXT_STATE[quantizer_state, level & 1]
          level = 2 * level - np.sign(level) * quantizer
        result[row, group] = level
        short = np.flatnonzero(state < LOWEST)
        if len(short):
          place = np.minimum(pointer[short], len(some) - 1)
          state[short] = state[short] << 32 | some[place]
          pointer[short] += 1
    if (state != LOWEST).any():
      raise _damaged("integers that do not end where they began")
    far.check()
    table = result.transpose(2, 0, 1, 3).reshape(count, RESTART, groups * lanes)
    out[at : at + count] = table[..., :columns]
  return out


class _Escapes:
  """The indices of some restart blocks that have no symbol, in the order of their blocks."""

  def __init__(self, parts: Mapping[str, np.ndarray], blocks: np.ndarray):
    ends = np.cumsum(parts["escape_counts"].astype(np.int64))
    self._next = ends[blocks] - parts["escape_counts"][blocks]
    self._ends = ends[blocks]
    self._values = parts["escapes"]

  def next(self, escaped: np.ndarray) -> np.ndarray:
    """The values where the mask [blocks, lanes] of some columns of a row is true, in its order."""
    block, _ = np.nonzero(escaped)
    count = escaped.sum(axis=1)
    rank = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
    at, self._next = self._next[block] + rank, self._next + count
    if (self._next > self._ends).any():
      raise _damaged("another number of escapes")
    return self._values[at]

  def check(self) -> None:
    """Check that all of them were read."""
    if (self._next != self._ends).any():
      raise _damaged("another number of escapes")


PARTS = ("words", "lengths", "escapes", "escape_counts", "sums")
SIZE_OF_HEADER = 1600
"""Bytes of a header and of the distribution of row groups, about."""

STORED_AS_THEY_ARE = ("words", "sums")
"""Parts that zlib cannot make smaller."""


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
  parts = _encode_integers(levels, row_group, model, progress)
  width = min(WIDTH_OF_ROW_GROUPS, rows)
  of_rows = np.pad(row_group.astype(np.int32), (0, -rows % width), mode="edge").reshape(-1, width)
  class_model, _ = distributions_of(of_rows, np.zeros(len(of_rows), np.uint8), 1, 1, most=1)
  class_parts = _encode_integers(of_rows, np.zeros(len(of_rows), np.uint8), class_model)
  arrays = {name: parts[name] for name in PARTS}
  arrays |= {f"class_{name}": class_parts[name] for name in PARTS}
  arrays |= _small(coded, model) | {"class_frequencies": class_model.frequencies}
  stored, entries = _stored(arrays)
  header = {"format": FORMAT, "version": VERSION, "rows": rows, "columns": columns}
  header |= {"classes": row_groups, "restart": RESTART, "lanes": model.lanes, "parts": entries}
  text = json.dumps(header, sort_keys=True)
  sealed = json.dumps({"crc32": zlib.crc32(text.encode()), "header": header}, sort_keys=True)
  return {"header": np.frombuffer(sealed.encode(), np.uint8)} | stored


def coded_bytes(coded: Any, rows: int | None = None, quantizers: int = 2) -> int:
  """Bytes that `encode_table` needs for a table, about, without coding it.

  Args:
    coded: the table, or some of its rows.
    rows: rows of the table that these stand for; None: these are all.
    quantizers: 1 if the integers are not those of the dependent quantiser.
  """
  levels, row_group = coded.levels, np.asarray(coded.row_group)
  model, bits = distributions_of(levels, row_group, len(coded.steps), quantizers)
  share = np.unique(row_group, return_counts=True)[1] / len(levels)
  bits -= len(levels) * (share * np.log2(share)).sum()
  rows = rows or len(levels)
  bits *= rows / len(levels)
  # A lane has a state of 64 bits, of which 33 say something, and a length; a block a checksum.
  bits += -(-rows // RESTART) * (model.lanes * (31 + 12) + 32)
  small = sum(array.nbytes for array in _stored(_small(coded, model))[0].values())
  return int(bits / 8 + small + SIZE_OF_HEADER)


def _small(coded, model):
  """The parts of which nothing depends on the number of rows."""
  return {
    "frequencies": model.frequencies,
    "distribution": model.distribution,
    "shift": model.shift,
    "steps": np.asarray(coded.steps, np.float32),
    "mean": np.asarray(coded.mean, np.float32),
    "inverse": np.asarray(coded.inverse),
  }


def _stored(arrays):
  """Arrays as bytes, and what the header says of each."""
  stored, entries = {}, {}
  for name, array in arrays.items():
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    entry = {"dtype": array.dtype.str, "shape": list(array.shape)}
    data = array.reshape(-1).view(np.uint8)
    if not name.endswith(STORED_AS_THEY_ARE):
      # Bytes of equal weight side by side.
      planes = data.reshape(-1, array.dtype.itemsize).T
      data = np.frombuffer(zlib.compress(planes.tobytes(), 9), np.uint8)
      entry["zlib"] = True
    entry["crc32"] = zlib.crc32(data)
    stored[name], entries[name] = data, entry
  return stored, entries


class CompressedTable:
  """An entropy-coded table, of which rows are decoded when they are read.

  Attributes:
    shape: (V, D).
    stored: the parts, as `encode_table` returned them.
    nbytes: bytes of all parts.
    row_group: row group of each row, [V].
    steps: step of each row group, [C].
    inverse: map from integers to rows, [D, D].
    mean: row that is added to each, [D].
  """

  def __init__(self, stored: Mapping[str, np.ndarray]):
    """Read the arrays that `encode_table` returned.

    Raises:
      DamagedTableError: a part is not as it was written.
    """
    self.stored = dict(stored)
    self.nbytes = sum(array.nbytes for array in stored.values())
    header = _header(stored)
    self.shape = header["rows"], header["columns"]
    arrays = {name: _part(name, stored, entry) for name, entry in header["parts"].items()}
    rows = self.shape[0]
    width = min(WIDTH_OF_ROW_GROUPS, rows)
    height = -(-rows // width)
    zeros = np.zeros((1, width), np.uint8)
    try:
      class_model = Distributions(arrays["class_frequencies"], zeros[None], zeros)
      class_parts = {name: arrays[f"class_{name}"] for name in PARTS}
      owner = np.zeros(height, np.uint8)
      row_groups = _decode_integers(class_parts, owner, class_model, width, 0, height)
      self.row_group = row_groups.ravel()[:rows].astype(np.uint8)
      self.steps, self.mean, self.inverse = (arrays[n] for n in ("steps", "mean", "inverse"))
      self._model = Distributions(arrays["frequencies"], arrays["distribution"], arrays["shift"])
      self._parts = {name: arrays[name] for name in PARTS}
    except KeyError as error:
      raise _damaged(f"no part {error}") from None

  def levels(self, first: int = 0, last: int | None = None) -> np.ndarray:
    """Rows `first` to `last` of the integers, int32."""
    last = self.shape[0] if last is None else last
    if not 0 <= first <= last <= self.shape[0]:
      raise IndexError(
        f"rows must be in [0, {self.shape[0]}]; got {first} to {last}. Use those of the table."
      )
    if first == last:
      return np.empty((0, self.shape[1]), np.int32)
    return _decode_integers(self._parts, self.row_group, self._model, self.shape[1], first, last)

  def rows(self, first: int = 0, last: int | None = None) -> np.ndarray:
    """Rows `first` to `last` of the table, float32."""
    levels = self.levels(first, last)
    return self._composed(levels, self.row_group[first : first + len(levels)])

  def blocks_of_rows(self, blocks: np.ndarray) -> np.ndarray:
    """The rows of the given blocks of `RESTART` rows, float32 [N, RESTART, D].

    What is behind the last row of the table is not a row.
    """
    levels = _decode_blocks(self._parts, self.row_group, self._model, self.shape[1], blocks)
    ids = (blocks[:, None] * RESTART + np.arange(RESTART)).clip(max=self.shape[0] - 1)
    return self._composed(levels, self.row_group[ids])

  def _composed(self, levels, row_group):
    scaled = levels.astype(np.float32) * self.steps[row_group][..., None]
    return scaled @ self.inverse.astype(np.float32) + self.mean

  def blocks(self, size: int = 256 * RESTART) -> Iterator[np.ndarray]:
    """All rows in order, `size` at a time."""
    for first in range(0, self.shape[0], size):
      yield self.rows(first, min(first + size, self.shape[0]))


def _header(stored):
  if "header" not in stored:
    raise _damaged("no header")
  try:
    sealed = json.loads(bytes(stored["header"]))
    header = sealed["header"]
    if sealed["crc32"] != zlib.crc32(json.dumps(header, sort_keys=True).encode()):
      raise _damaged("another checksum of the header")
  except (UnicodeDecodeError, KeyError, TypeError, json.JSONDecodeError):
    raise _damaged("a header that is not JSON") from None
  found = header["format"], header["version"], header["restart"]
  wanted = FORMAT, VERSION, RESTART
  if found != wanted:
    raise ValueError(
      f"format, version and restart of the table must be {wanted}; got {found}. Read it with"
      " the version of vqjax that wrote it."
    )
  if absent := sorted(header["parts"].keys() - stored.keys()):
    raise _damaged(f"no part {', '.join(absent)}")
  return header


def _part(name, stored, entry):
  data = np.asarray(stored[name])
  dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
  if entry.get("zlib"):
    data = data.tobytes()
    if zlib.crc32(data) != entry["crc32"]:
      raise _damaged(f"another checksum of {name}")
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(dtype.itemsize, -1)
    data = np.ascontiguousarray(planes.T).ravel()
  elif data.nbytes % dtype.itemsize or data.nbytes != np.prod(shape) * dtype.itemsize:
    raise _damaged(f"{data.nbytes} bytes of {name}")
  # Of the words each restart block has a checksum, which is checked where it is decoded.
  elif name.endswith("sums") and zlib.crc32(data.tobytes()) != entry["crc32"]:
    raise _damaged(f"another checksum of {name}")
  return data.view(dtype).reshape(shape)


def read_table(folder: str | pathlib.Path, name: str = "embedding") -> CompressedTable:
  """A table that `vqjax compress` or `SmallTable.save` wrote; its large part is memory-mapped.

  Args:
    folder: the folder, or the file of a single table.
    name: name of the table in `vqjax.json`, "embedding" or "head".

  Raises:
    FileNotFoundError: the folder has no compressed tables.
    ValueError: it has no such table, or the table is damaged.
  """
  folder = pathlib.Path(folder)
  if folder.is_file():
    return CompressedTable(_bytes_of(folder, "table" + SEPARATOR))
  manifest = folder / MANIFEST
  if not manifest.is_file():
    raise FileNotFoundError(
      f"`folder` must have {MANIFEST}; got {folder} without. Write it with vqjax compress."
    )
  read = read_manifest(folder)
  tensors = read.tensors
  if read.runtime == PACKED:
    raise ValueError(
      f"`folder` must have entropy-coded tables; those of {folder} are packed bits. Read them with"
      " vqjax.lm.checkpoints.load."
    )
  if name not in tensors:
    raise ValueError(
      f"`name` must be a table of {folder}, {', '.join(sorted(tensors))}; got {name}. Use one of"
      " them."
    )
  stored = {}
  for file in sorted(folder.glob("*.safetensors")):
    stored |= _bytes_of(file, tensors[name] + SEPARATOR)
  return CompressedTable(stored)


PACKED, UNPACKED = "packed", "unpacked"
"""Forms of the tables in memory that readers of the file know of; the first is also its form."""


class Manifest(NamedTuple):
  """What a folder that `vqjax compress` wrote says of its tables.

  Attributes:
    tensors: the names of their tensors by those of the tables.
    runtime: the name of their form in memory.
  """

  tensors: dict[str, str]
  runtime: str


def read_manifest(folder: pathlib.Path) -> Manifest:
  """What a folder says of its compressed tables.

  Raises:
    ValueError: the manifest is damaged, or of another version.
  """
  path = folder / MANIFEST
  try:
    manifest = json.loads(path.read_text("utf-8"))
    checksum = manifest.pop("checksum", None)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    tensors = {name: table["tensor"] for name, table in manifest["tables"].items()}
    found = manifest["format"], manifest["version"]
    runtime = manifest.get("runtime", UNPACKED)
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise _damaged(f"{path} that does not name the tables") from None
  if checksum is not None and checksum != f"{zlib.crc32(text.encode()):08x}":
    raise _damaged(f"{path} with another checksum")
  if found != (FORMAT, VERSION):
    raise ValueError(
      f"format and version of {path} must be {(FORMAT, VERSION)}; got {found}. Read it with the"
      " version of vqjax that wrote it."
    )
  if not all(isinstance(text, str) for text in (runtime, *tensors.values())):
    raise _damaged(f"{path} that does not name the tables")
  return Manifest(tensors, runtime)


def _bytes_of(file, prefix):
  """Tensors of uint8 of a safetensors file whose names begin with the prefix."""
  size = file.stat().st_size
  if size < 8:
    raise _damaged(f"{file} of {size} bytes")
  data = np.memmap(file, np.uint8, "r")
  start = 8 + int.from_bytes(data[:8].tobytes(), "little")
  if size < start:
    raise _damaged(f"{file} that ends in its header")
  found = {}
  try:
    for name, entry in json.loads(data[8:start].tobytes()).items():
      if name.startswith(prefix):
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - start:
          raise _damaged(f"{file} that ends before {name}")
        found[name.removeprefix(prefix)] = np.asarray(data[start + begin : start + end])
  except DamagedTableError:
    raise
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise _damaged(f"{file} with a header that is not one of safetensors") from None
  return found
