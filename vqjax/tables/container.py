"""Entropy-coded tables: the lossless half of the compression of a trained table [V, D].

The integers are those of dependent quantisation with an entropy coder behind it, which
`vqjax.tables.coded` chooses.

A table is row = mean + steps[group] · (levels @ inverse), with integers `levels` and a row group
for each row. The integers are coded by rANS with static distributions: each triple of row group,
quantiser and column uses one of a few distributions, and `RESTART` rows at a time are coded alone,
so that any row can be read without those before it.

A table of hundreds of millions of rows is coded in smaller blocks, and `PAGE` of them have an entry
of an index. Its row groups are coded with the integers, and what has no symbol is behind them, so
that nothing that grows with the table is read before a row is.

Quantisers are dependent: each integer belongs to one of two quantisers, the even integers or 0
and the odd ones, and the parities of the indices before it say to which. An index has
a bit less than its integer, and a distribution of its quantiser.

This file imports NumPy only, so it may be copied to a machine without JAX:

  from container import read_table

  table = read_table("folder", "embedding")
  table.rows(5, 7)                  # float32 [2, D]
  table[[17, 4, 17]]                # float32 [3, D]

Within the library the same integers are decoded by a compiled loop, several times as fast.

Coder: J. Duda (2013), Asymmetric numeral systems; streaming with 32-bit states and 16-bit words.
Quantisers: H. Schwarz et al. (2021), Quantization and entropy coding in the versatile video coding
standard, Section III, with 8 states.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["FORMAT", "MANIFEST", "VERSION", "CompressedTable", "PagedTable", "read_table"]

FORMAT = "vqjax-compressed-table"
VERSION, PAGED = 3, 4
"""Versions of tables in one index, and in pages."""

MANIFEST = "vqjax.json"
"""File of a folder that names its compressed tables."""

SEPARATOR = ".vqjax."
"""What separates the name of a table from that of its part, in names of tensors."""

RESTART = 256
"""Rows that are coded together, and decoded together, of a table that has no pages."""

PAGE = 64
"""Blocks that share a checksum in a table that has pages."""

PAGES = np.dtype([("start", "<u8"), ("crc32", "<u4"), ("lengths", "<u2", PAGE)])
"""What the index says of a page: its first word, its checksum, and the words of each block."""

MOST_LANES, NUMBERS_OF_A_LANE = 16, 2**13
"""Streams of such rows, which are decoded side by side, and integers for which one more pays."""

PRECISION = 14
"""Bits of a probability."""

SYMBOLS = 256
"""Symbols of a distribution; one of them has no use."""

LARGEST = 126
"""Indices of -126 to 126, in steps of 2^shift, are the symbols 0 to 252."""

ESCAPES = 254, 255
"""Symbols of all other indices, which are parts of their own: of even and of odd ones."""

FAR = -(2**31)
"""Stands for such an integer of the first quantiser in decoded rows; one more: of the second."""

LOWEST = 2**16
"""Smallest state; states are below 2^32."""

AT_ONCE = 2**11
"""Lanes that are decoded side by side."""

DECODED = 2**22
"""Integers that a lookup decodes in a part."""

MOST_WORKERS = 4
"""Parts that are at work at a time, which are in memory together."""

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


def side_by_side(function: Callable, parts: Iterable) -> Iterator:
  """The results for all parts in order, of which each core of the machine has one at work."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
  workers = min(MOST_WORKERS, cores)
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    waiting = []
    for part in parts:
      waiting.append(pool.submit(function, part))
      if len(waiting) >= workers:
        yield waiting.pop(0).result()
    for one in waiting:
      yield one.result()


@dataclasses.dataclass(frozen=True, eq=False)
class Distributions:
  """The distributions of a table of integers.

  Attributes:
    frequencies: probability of each symbol times 2^PRECISION, [K, SYMBOLS].
    distribution: which of them a quantiser, a row group and a column use, [2, C, D].
    shift: low bits of the indices of a row group and a column that are coded as they are, [C, D].
    restart: rows that are coded together.
    codes_groups: whether the row group of a row is coded before its integers, by the last of
      `frequencies`; such blocks have one lane.
  """

  frequencies: np.ndarray
  distribution: np.ndarray
  shift: np.ndarray
  restart: int = RESTART
  codes_groups: bool = False

  @property
  def lanes(self) -> int:
    """Streams of a restart block."""
    return lanes_of(self.shift.shape[1], self.restart)

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
    frequency[-1, LARGEST] = 2**PRECISION
    if (frequency.sum(axis=1) != 2**PRECISION).any():
      raise _damaged("probabilities that do not add up to 1")
    below = np.cumsum(frequency, axis=1) - frequency
    symbols = np.repeat(
      np.tile(np.arange(SYMBOLS, dtype=np.uint8), len(frequency)), frequency.ravel()
    )
    return frequency.ravel(), below.ravel(), symbols


def lanes_of(columns: int, restart: int = RESTART) -> int:
  """Streams of a restart block of so many columns; column j is in stream j modulo their number."""
  return min(MOST_LANES, max(1, restart * columns // NUMBERS_OF_A_LANE))


class Streams(NamedTuple):
  """The words of some restart blocks.

  Attributes:
    words: words of all lanes, and one more that none has, uint16.
    place: first word of each lane, [B, L].
    owner: row group of each row, [B, R]; that of padding is behind the last. Row groups that are
      coded are 0 here.
  """

  words: np.ndarray
  place: np.ndarray
  owner: np.ndarray


def decoded(
  streams: Streams, model: Distributions
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """The integers of restart blocks, [B, R, D and padding], last states, places [B, L], row groups.

  An integer without a symbol is `FAR`, or one more if it is of the second quantiser.
  """
  frequency, below, symbols_of = model.tables
  distribution, shift = model.padded
  count, lanes = streams.place.shape
  groups = shift.shape[1] // lanes
  by_group = lambda x: x.reshape(*x.shape[:-1], groups, lanes)
  which, shift = by_group(distribution), by_group(shift)
  words, place, last = streams.words.astype(np.int64), streams.place.ravel(), len(streams.words) - 1
  state, place = words[place] << 16 | words[place + 1], place + 2
  result, owner = np.empty((model.restart, groups, count, lanes), np.int32), streams.owner.copy()
  following = NEXT_STATE.astype(np.int64)
  before = np.zeros(count * lanes, np.int64)

  def refilled(state, place):
    is_short = state < LOWEST
    word = words[np.minimum(place, last)]
    return np.where(is_short, state << 16 | word, state), place + is_short

  def symbol_of(of, state, place):
    slot = state & 2**PRECISION - 1
    symbol = symbols_of[(of << PRECISION) + slot].astype(np.int64)
    at = of * SYMBOLS + symbol
    return symbol, *refilled(frequency[at] * (state >> PRECISION) + slot - below[at], place)

  for row in range(model.restart):
    if model.codes_groups:
      owner[:, row], state, place = symbol_of(len(model.frequencies) - 1, state, place)
    own = owner[:, row]
    both, low_bits = which[:, own], shift[own]
    for group in range(groups):
      quantizer = before & 1
      of = np.where(quantizer, both[1, :, group].ravel(), both[0, :, group].ravel())
      bits = low_bits[:, group].ravel()
      if has_low := bits.any():
        low = state & (1 << bits) - 1
        state, place = refilled(state >> bits, place)
      symbol, state, place = symbol_of(of, state, place)
      index, odd = symbol - LARGEST, symbol & 1
      if has_low:
        index, odd = index << bits | low, np.where(bits > 0, low & 1, odd)
      level = 2 * index - np.sign(index) * quantizer
      level = np.where(symbol >= ESCAPES[0], FAR + quantizer, level)
      before = following[before, odd]
      result[row, group] = level.reshape(count, lanes)
  levels = result.transpose(2, 0, 1, 3).reshape(count, model.restart, groups * lanes)
  return levels, state.reshape(count, lanes), place.reshape(count, lanes), owner


def _decoder(compiled: bool) -> Callable:
  """The compiled form of `decoded`, unless this is a copy of the file."""
  if compiled and __name__ == "vqjax.tables.container":
    from vqjax.tables.entropy_coder import decoded as decode

    return decode
  return decoded


def _put_far(levels: np.ndarray, index: np.ndarray) -> np.ndarray:
  """A copy of the integers with those that have no symbol, in the order of their indices."""
  is_far = levels <= FAR + 1
  levels = levels.copy()
  levels[is_far] = 2 * index - np.sign(index) * (levels[is_far] - FAR)
  return levels


def _decode_blocks(
  parts: Mapping[str, np.ndarray],
  row_group: np.ndarray,
  model: Distributions,
  columns: int,
  blocks: np.ndarray,
  compiled: bool = True,
) -> np.ndarray:
  """The integers of the given restart blocks, [N, RESTART, D]; rows behind the last are 0."""
  decode = _decoder(compiled)
  lengths = parts["lengths"].astype(np.int64)
  by_block = lengths.sum(axis=1)
  begins = np.cumsum(by_block) - by_block
  words, counts = parts["words"], parts["escape_counts"].astype(np.int64)
  if len(words) != by_block.sum() or len(parts["escapes"]) != counts.sum():
    raise _damaged("another number of words")
  found = [np.empty((0, RESTART, columns), np.int32)]
  row_groups = np.pad(
    row_group, (0, -len(row_group) % RESTART), constant_values=len(model.shift)
  ).reshape(-1, RESTART)
  at_once = AT_ONCE // model.lanes
  for at in range(0, len(blocks), at_once):
    chosen = blocks[at : at + at_once]
    coded = [words[begins[block] : begins[block] + by_block[block]] for block in chosen]
    for block, own in zip(chosen, coded):
      if zlib.crc32(own.tobytes()) != parts["sums"][block]:
        raise _damaged(f"another checksum of rows {block * RESTART} to {(block + 1) * RESTART - 1}")
    own = lengths[chosen]
    end = np.cumsum(own).reshape(own.shape)
    if (own < 2).any():
      raise _damaged("a lane without words")
    streams = Streams(
      np.concatenate([*coded, np.zeros(1, np.uint16)]), end - own, row_groups[chosen]
    )
    levels, state, place, _ = decode(streams, model)
    levels = levels[..., :columns]
    if (state != LOWEST).any() or (place != end).any():
      raise _damaged("integers that do not end where they began")
    of_block = [parts["escapes"][counts[:b].sum() :][: counts[b]] for b in chosen if counts[b]]
    if of_block or levels.min() <= FAR + 1:
      is_far = levels <= FAR + 1
      if (is_far.sum(axis=(1, 2)) != counts[chosen]).any():
        raise _damaged("another number of escapes")
      levels = _put_far(levels, np.concatenate(of_block))
    found.append(levels)
  # Most calls decode one part, of which no copy is made.
  return found[-1] if len(found) <= 2 else np.concatenate(found)


PARTS = "words", "lengths", "escapes", "escape_counts", "sums"
"""Parts of the integers."""


class CompressedTable:
  """An entropy-coded table, of which rows are decoded when they are read.

  Attributes:
    is_paged: whether its integers have pages, as those of `PagedTable`.
    shape: (V, D).
    stored: the parts, as `encode_table` returned them.
    nbytes: bytes of all parts.
    restart: rows that are decoded together, R.
    row_group: row group of each row, [V].
    steps: step of each row group, [C].
    inverse: map from integers to rows, [D, D].
    mean: row that is added to each, [D].
  """

  is_paged = False

  def __init__(self, stored: Mapping[str, np.ndarray]):
    """Read the arrays that `encode_table` returned.

    Raises:
      DamagedTableError: a part is not as it was written.
    """
    self.stored = dict(stored)
    self.nbytes = sum(array.nbytes for array in stored.values())
    header = _header(stored)
    self.shape, self.restart = (header["rows"], header["columns"]), header["restart"]
    arrays = {name: _part(name, stored, entry) for name, entry in header["parts"].items()}
    try:
      self.steps, self.mean, self.inverse = (arrays[n] for n in ("steps", "mean", "inverse"))
      self._model = Distributions(
        arrays["frequencies"],
        arrays["distribution"],
        arrays["shift"],
        self.restart,
        codes_groups=header["version"] == PAGED,
      )
      self._read(arrays)
    except KeyError as error:
      raise _damaged(f"no part {error}") from None

  def _read(self, arrays):
    self.row_group = arrays["row_group"]
    self._parts = {name: arrays[name] for name in PARTS}

  def levels(self, first: int = 0, last: int | None = None) -> np.ndarray:
    """Rows `first` to `last` of the integers, int32."""
    return self._range(first, last)[0]

  def _range(self, first, last):
    """Rows `first` to `last` of the integers, and their row groups."""
    (rows, columns), restart = self.shape, self.restart
    last = rows if last is None else last
    if not 0 <= first <= last <= rows:
      raise IndexError(
        f"rows must be in [0, {rows}]; got {first} to {last}. Use those of the table."
      )
    if first == last:
      return np.empty((0, columns), np.int32), np.empty(0, np.uint8)
    start, stop = first // restart, -(-last // restart)
    own = slice(first - start * restart, last - start * restart)
    levels, row_group = self._levels_of(np.arange(start, stop))
    return levels.reshape(-1, columns)[own], row_group.reshape(-1)[own]

  def _levels_of(self, blocks, compiled=True):
    """The integers of blocks, [N, R, D], and their row groups, [N, R]."""
    columns = self.shape[1]
    levels = _decode_blocks(self._parts, self.row_group, self._model, columns, blocks, compiled)
    ids = blocks[:, None] * self.restart + np.arange(self.restart)
    return levels, self.row_group[ids.clip(max=self.shape[0] - 1)]

  def rows(self, first: int = 0, last: int | None = None) -> np.ndarray:
    """Rows `first` to `last` of the table, float32."""
    return self._composed(*self._range(first, last))

  def __getitem__(self, ids: np.ndarray) -> np.ndarray:
    """The rows of tokens [*B], float32 [*B, D]; see `take`."""
    return self.take(ids)

  def take(self, ids: np.ndarray, compiled: bool = True) -> np.ndarray:
    """The rows of tokens [*B], float32 [*B, D]; no block is decoded but theirs.

    Args:
      ids: the tokens.
      compiled: whether the decoder may be a compiled one. Inside of a callback of a JAX program it
        must not, since the program may hold its devices.

    Raises:
      IndexError: a token is outside [0, V).
    """
    ids = np.asarray(ids)
    rows, columns = self.shape
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= rows):
      got = f"{ids.min()} to {ids.max()}" if ids.dtype.kind in "iu" else ids.dtype
      raise IndexError(
        f"`ids` must be integers in [0, {rows}); got {got}. Use the tokenizer of the table."
      )
    flat = ids.ravel().astype(np.int64)
    blocks, where = np.unique(flat // self.restart, return_inverse=True)
    found = np.empty((len(flat), columns), np.float32)
    # Some blocks at a time: all of a large table would be a copy of it.
    at_once = max(32, DECODED // (self.restart * columns))

    def of_part(first):
      levels, row_group = self._levels_of(blocks[first : first + at_once], compiled)
      own = (where >= first) & (where < first + at_once)
      place = where[own] - first, flat[own] % self.restart
      found[own] = self._composed(levels[place], row_group[place])

    firsts = range(0, len(blocks), at_once)
    for _ in side_by_side(of_part, firsts) if len(firsts) > 1 else map(of_part, firsts):
      pass
    return found.reshape(*ids.shape, columns)

  def _composed(self, levels, row_group):
    scaled = np.multiply(levels, self.steps[row_group][..., None], dtype=np.float32)
    rows = scaled @ self.inverse.astype(np.float32)
    rows += self.mean
    return rows

  def blocks(self, size: int = 64 * RESTART) -> Iterator[np.ndarray]:
    """All rows in order, `size` at a time; each core of the machine decodes some."""
    of = lambda first: self.rows(first, min(first + size, self.shape[0]))
    return side_by_side(of, range(0, self.shape[0], size))


class PagedTable(CompressedTable):
  """A table in small blocks, whose index and integers stay in the file until they are read.

  A page is compared with its checksum when a block of it is read for the first time. Memory does
  not grow with the table, but for a byte a page.
  """

  is_paged = True

  def _read(self, arrays):
    self._words, self._pages = arrays["words"], arrays["pages"].view(PAGES).reshape(-1)
    self._is_checked = np.zeros(len(self._pages), bool)
    if len(self._pages) * PAGE * self.restart < self.shape[0]:
      raise _damaged("fewer pages than rows")

  def _levels_of(self, blocks, compiled=True):
    found, model = [], self._model
    for at in range(0, len(blocks), AT_ONCE):
      chosen = blocks[at : at + AT_ONCE]
      numbers, where = np.unique(chosen // PAGE, return_inverse=True)
      pages = self._pages[numbers]
      self._check(numbers, pages)
      lengths = pages["lengths"].astype(np.int64)
      begins = pages["start"].astype(np.int64)[:, None] + np.cumsum(lengths, axis=1) - lengths
      length, begin = lengths[where, chosen % PAGE], begins[where, chosen % PAGE]
      end = np.cumsum(length)
      words = self._words[np.arange(end[-1]) + np.repeat(begin - end + length, length)]
      streams = Streams(
        np.append(words, np.uint16(0)),
        (end - length)[:, None],
        np.zeros((len(chosen), self.restart), np.uint8),
      )
      levels, state, place, owner = _decoder(compiled)(streams, model)
      far = (levels <= FAR + 1).sum(axis=(1, 2)) if levels.min() <= FAR + 1 else 0 * end
      if (state != LOWEST).any() or (place[:, 0] + 2 * far != end).any():
        raise _damaged("integers that do not end where they began")
      if far.any():
        # Behind the integers of a block, two words each.
        at_far = np.repeat(end - 2 * np.cumsum(far), far) + 2 * np.arange(far.sum())
        low, high = words[at_far].astype(np.uint32), words[at_far + 1].astype(np.uint32)
        levels = _put_far(levels, (high << 16 | low).view(np.int32))
      found.append((levels, owner))
    return tuple(np.concatenate(part) for part in zip(*found)) if len(found) != 1 else found[0]

  def _check(self, numbers, pages):
    for number, page in zip(numbers, pages):
      if not self._is_checked[number]:
        start, size = int(page["start"]), int(page["lengths"].sum())
        own = self._words[start : start + size]
        if len(own) != size or page_checksum(own, page["lengths"]) != page["crc32"]:
          first = number * PAGE * self.restart
          raise _damaged(f"another checksum of rows {first} to {first + PAGE * self.restart - 1}")
        self._is_checked[number] = True


def page_checksum(words: np.ndarray, lengths: np.ndarray) -> int:
  """The CRC-32 of the words of a page and of their numbers."""
  return zlib.crc32(lengths.tobytes(), zlib.crc32(words.tobytes()))


def table_of(stored: Mapping[str, np.ndarray]) -> CompressedTable:
  """The table of the parts of either version."""
  return (PagedTable if _header(stored)["version"] == PAGED else CompressedTable)(stored)


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
  if found != wanted and found[:2] != (FORMAT, PAGED):
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
  # Of the words each block or page has a checksum, which is checked where it is decoded.
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
    return table_of(_bytes_of(folder, "table" + SEPARATOR))
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
    checksum = manifest.pop("checksum")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    tensors = {name: table["tensor"] for name, table in manifest["tables"].items()}
    found = manifest["format"], manifest["version"]
    runtime = manifest.get("runtime", UNPACKED)
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise _damaged(f"{path} that does not name the tables") from None
  if checksum != f"{zlib.crc32(text.encode()):08x}":
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
