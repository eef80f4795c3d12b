"""Tables of any size made small: streamed, by the counts of their rows, and read at random.

A table of n-grams has hundreds of millions of rows, whose counts fall like Zipf's law. It is read a
part at a time and written as a `PagedTable`: memory does not grow with it. The rules are those of
`vqjax.tables.coded`: the step of a row is proportional to count^-1/2, in row groups a factor
sqrt(2) apart, and the mean and the transform are those of the rows that are read. The distributions
are learned from some rows of each row group.

Rows that no text has read have the coarsest step, or are dropped: they are then the mean row, and
cost only the bits that say so.
"""

# compress_rows
#   _RowGroups            one pass over the counts: which row groups there are
#   _sample               one pass over the counts, some rows of the table; the basis
#   search                the step, from the bits of the sample
#   _write                one pass over the table; another one if the sample erred about the bytes
#
# The file is that of a `SmallTable`, with the words first, since their number is known last.

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
import types
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num, UInt8

from vqjax import outputs
from vqjax.embeddings import table_file
from vqjax.ops.vocabulary import is_count
from vqjax.tables import container, entropy_coder
from vqjax.tables.coded import (
  LANES,
  MOST_LEVELS,
  MOST_ROW_GROUPS,
  OF_ROW_GROUP,
  SMOOTHING,
  Sample,
  Transform,
  dependent_levels,
  learned_rates,
  transform,
)
from vqjax.tables.container import PAGE, PAGES
from vqjax.tables.moments import Moments
from vqjax.tables.search import AIM, Point, search, step_limits
from vqjax.tables.tensor_files import release

__all__ = ["RowsReport", "compress_rows"]

NUMBERS = 2**11
"""Numbers of a block. Fewer are read faster, and cost more: about 33 bits a block."""

BITS_OF_BLOCK = 15
"""Bits of the state that a block ends with, which say nothing."""

OF_COUNTS = 2**20
"""Counts that are read at a time."""

LEAST_ROWS, SHARED_ROWS = 2**11, 2**15
"""Rows of a row group in the sample, at least, and rows that all share by their numbers."""

HEADER = 2**12
"""Bytes that are kept for the header of the file."""

FIRST_DOUBLING = -40
"""Row group of the most frequent rows: doublings of the inverse of a count."""

MARGIN, CLOSE = 0.98, 0.99
"""Part of a size that is aimed at, because the sample errs by a hundredth; what is close to it."""

MOST_PASSES = 4
"""Most times that the table is written to meet a size."""

NAME = "table" + container.SEPARATOR


@dataclasses.dataclass(frozen=True)
class RowsReport:
  """The size of a table in a file, and the errors of its rows.

  Attributes:
    bytes: bytes of the parts of the table; the header of the file takes 4 kB more.
    bits_per_weight: their bits over the numbers of the table.
    ratio: bytes of the table as given over `bytes`.
    rows_of_block: rows that are decoded together.
    unread: rows that have a count of 0.
    is_dropped: whether these are the mean row.
    error: squared distance of the rows to the table over the table's squared length, rows as often
      as their counts.
    unread_error: the same measure of the rows that have a count of 0: what one costs if it is read.
    passes: times that the table was read.
    seconds: duration of the compression.
  """

  bytes: int
  bits_per_weight: float
  ratio: float
  rows_of_block: int
  unread: int
  is_dropped: bool
  error: float
  unread_error: float
  passes: int
  seconds: float

  def __str__(self) -> str:
    """The report in one line."""
    unread = f"{self.unread:,} rows that the text does not read"
    what = "are the mean row" if self.is_dropped else "have the coarsest step"
    return (
      f"{self.bits_per_weight:.3f} bits a weight, {self.bytes:,} bytes (1/{self.ratio:.1f});"
      f" relative squared error {self.error:.3g} of rows as they are read; {unread} {what}, with"
      f" an error of {self.unread_error:.3g}; blocks of {self.rows_of_block} rows;"
      f" {self.seconds:.1f} s"
    )


class _RowGroups:
  """Row groups of rows by their counts, a part at a time.

  Attributes:
    unit: step of each row group, where that of a row of probability 1/V is 1/2, [C].
    rows: rows of each, [C].
    total: occurrences of all rows.
    unread: rows that have a count of 0.
    dropped: the row group whose integers are 0; None: there is none.
  """

  def __init__(self, counts: Num[np.ndarray, "V"], smoothing: float, drop: bool):
    self._counts, self._smoothing, self._drop = counts, smoothing, drop
    tally = np.zeros(MOST_ROW_GROUPS, np.int64)
    self.total, self.unread = 0.0, 0
    for first in range(0, len(counts), OF_COUNTS):
      own = self.counts(slice(first, first + OF_COUNTS))
      if not np.isfinite(own).all() or own.min() < 0:
        bad = int(np.flatnonzero(~(np.isfinite(own) & (own >= 0)))[0])
        raise ValueError(
          f"`counts` must be finite and not negative; got {own[bad]} for row {first + bad}. Count"
          " the rows again."
        )
      with np.errstate(over="ignore"):  # an infinite sum is an error below
        self.total += own.sum()
      self.unread += int((own == 0).sum())
      tally += np.bincount(self._doublings(own), minlength=len(tally))
    if not np.isfinite(self.total):
      raise ValueError(
        f"`counts` must have a finite sum; got {self.total}. Divide them by the largest one."
      )
    if not self.total:
      raise ValueError(
        "`counts` must not be all 0: the text reads no row. Count the rows of a text that the model"
        " will read."
      )
    present = np.flatnonzero(tally)
    self._number = np.cumsum(tally > 0) - 1
    self.rows = tally[present]
    mean = self.total / len(counts) + smoothing
    self.unit = (mean**0.5 * 2.0 ** ((present + FIRST_DOUBLING) / 2 - 1)).astype(np.float32)
    self.dropped = len(present) - 1 if drop and self.unread else None

  def counts(self, rows: slice | np.ndarray) -> Float[np.ndarray, "n"]:
    """The counts of some rows."""
    return np.asarray(self._counts[rows], np.float64)

  def __call__(self, rows: slice) -> UInt8[np.ndarray, "n"]:
    """The row groups of some rows."""
    return self._number[self._doublings(self.counts(rows))].astype(np.uint8)

  def _doublings(self, counts):
    found = np.round(-np.log2(counts + self._smoothing)).astype(int) - FIRST_DOUBLING
    found = found.clip(0, MOST_ROW_GROUPS - 1 - self._drop)
    return np.where(counts == 0, MOST_ROW_GROUPS - 1, found) if self._drop else found


class _Coordinates(NamedTuple):
  """The coordinates of rows where the step of a row of probability 1/V is 1."""

  mean: Float[np.ndarray, "D"]
  basis: Transform
  groups: _RowGroups

  @property
  def steps(self) -> Float[np.ndarray, "C"]:
    """The steps of row groups."""
    return self.groups.unit * np.float32(self.basis.scale)

  def of(
    self, rows: Float[np.ndarray, "n D"], owner: UInt8[np.ndarray, "n"]
  ) -> Float[np.ndarray, "n D"]:
    """The coordinates of rows; those of rows that are dropped are 0."""
    x = (rows - self.mean) @ self.basis.forward.astype(np.float32)
    x /= self.steps[owner][:, None]
    if self.groups.dropped is not None:
      x[owner == self.groups.dropped] = 0
    return x


def compress_rows(
  table: Any,
  counts: Num[np.ndarray, "V"],
  path: str | os.PathLike[str],
  *,
  size: int,
  drop: bool = False,
  rows_of_block: int | None = None,
  seed: int = 0,
) -> RowsReport:
  """Write a table of any size as the file of a small table, whose rows are read at random.

  `SmallTable.load`, `vqjax.torch` and, with NumPy alone, `container.read_table` read it.

  Args:
    table: [V, D], floating-point numbers: an array, a memory map, or what has a shape and a dtype
      and gives slices of rows.
    counts: how often a text reads each row, [V], such as `vqjax.ops.ngrams.count_rows` counts.
    path: the file.
    size: most bytes of the table.
    drop: whether rows that have a count of 0 are dropped. They are then the mean row; otherwise
      they have the coarsest step.
    rows_of_block: rows that are decoded together; None: those of 2,048 numbers. A block costs about
      33 bits, and the time of a lookup is that of a block.
    seed: seed of the sample from which steps and distributions are learned.

  Raises:
    ValueError: the table or the counts have a wrong shape or value, or no step reaches the size.
  """
  started = time.perf_counter()
  counts = np.asanyarray(counts)
  vocab, dim = _checked(table, counts)
  restart = max(1, NUMBERS // dim) if rows_of_block is None else rows_of_block
  most = (2 * container.NUMBERS_OF_A_LANE - 1) // dim
  if not is_count(restart) or not 1 <= restart <= most:
    raise ValueError(
      f"`rows_of_block` must be in [1, {most}] for rows of {dim} numbers; got {restart}. Leave it"
      " out, or compress a table of wider rows with vqjax.compress."
    )
  groups = _RowGroups(counts, SMOOTHING, drop)
  coordinates, some = _sampled(table, groups, np.random.default_rng(seed))
  limits = step_limits([float(np.abs(some.x).max())])
  known: dict[float, tuple[container.Distributions, int]] = {}

  def measure(step: float) -> Point:
    if step not in known:
      options = {"block": LANES * restart, "dropped": groups.dropped, "weight": some.weight}
      model, bits = learned_rates(some, step, restart, **options)
      known[step] = model, _bytes_of(model, coordinates, vocab, float(bits.sum()))
    return Point(step, known[step][1], None)

  aim, passes = int(MARGIN * size), 0
  with outputs.atomic_path(path) as partial:
    while True:
      point, _ = search(measure, size=aim, limits=limits, close=CLOSE)
      if point.bytes > aim or passes == MOST_PASSES:
        # Files that were written were larger than the sample says.
        lowest = max(known[limits[1]][1], size + 1 if passes else 0)
        raise ValueError(
          f"`size` must be reachable: the least size of this table is about {lowest:,} bytes; got"
          f" {size:,}. Give more, larger blocks, or drop the rows that are not read."
        )
      passes += 1
      written, errors = _write(partial, table, coordinates, point.step, known[point.step][0])
      if written <= size:
        break
      # The sample errs by about as large a part at a step near this one.
      aim = int(AIM * point.bytes * size / written)
  return RowsReport(
    bytes=written,
    bits_per_weight=8 * written / (vocab * dim),
    ratio=vocab * dim * np.dtype(table.dtype).itemsize / written,
    rows_of_block=restart,
    unread=groups.unread,
    is_dropped=groups.dropped is not None,
    error=errors[0] / (errors[1] or 1.0),
    unread_error=errors[2] / (errors[3] or 1.0),
    passes=passes,
    seconds=time.perf_counter() - started,
  )


def _checked(table, counts):
  if len(table.shape) != 2 or 0 in table.shape or not jnp.issubdtype(table.dtype, jnp.floating):
    raise ValueError(
      f"`table` must be floating-point numbers [V, D]; got {table.dtype} {tuple(table.shape)}. Give"
      " a row for each token or n-gram."
    )
  vocab, dim = table.shape
  if counts.shape != (vocab,) or counts.dtype.kind not in "biuf":
    raise ValueError(
      f"`counts` must have a number for each of the {vocab} rows of the table; got {counts.dtype}"
      f" {counts.shape}. Count by the hash of this table, padded with 0 for rows that no"
      " n-gram has: count_rows(hash, tokens, rows=...)."
    )
  return vocab, dim


def _sampled(table, groups, rng):
  """The mean and the basis of the rows that are read, and the sample."""
  keep = (LEAST_ROWS + SHARED_ROWS * groups.rows / groups.rows.sum()) / groups.rows
  found = []
  for first in range(0, table.shape[0], OF_COUNTS):
    owner = groups(slice(first, first + OF_COUNTS))
    own = np.flatnonzero(rng.random(len(owner)) < keep[owner])
    found.append((first + own, owner[own], groups.counts(first + own) > 0))
  ids, owner, is_read = map(np.concatenate, zip(*found))
  rows = np.empty((len(ids), table.shape[1]), np.float32)
  for place, i in enumerate(ids.tolist()):
    rows[place] = (part := table[i : i + 1])[0]
    release(part)
  _check_finite(rows, ids)
  number = np.bincount(owner, minlength=len(groups.rows))
  weight = groups.rows / np.maximum(number, 1)
  read = weight[owner] * is_read
  read /= read.sum()
  mean = (read @ rows).astype(np.float32)
  centred = rows - mean
  covariance = (centred * read[:, None]).T.astype(np.float64) @ centred
  basis = transform(Moments(np.eye(rows.shape[1]), np.ones(1), 1), covariance)
  coordinates = _Coordinates(mean, basis, groups)
  first = [np.flatnonzero(owner == c) for c in range(len(number))]
  first = np.sort(np.concatenate([own[:: -(-len(own) // OF_ROW_GROUP)] for own in first]))
  return coordinates, Sample(coordinates.of(rows, owner), owner, first, weight)


def _check_finite(rows, ids):
  bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if len(bad):
    raise ValueError(
      f"`table` must be finite; got nan or infinity in row {ids[bad[0]]}. Use an earlier"
      " checkpoint, or set such rows to zero."
    )


def _small(coordinates, step, model):
  """The parts that do not grow with the rows, and what the header says of them."""
  coded = types.SimpleNamespace(
    steps=coordinates.steps * np.float32(step),
    mean=coordinates.mean,
    inverse=coordinates.basis.inverse,
  )
  return entropy_coder.stored_parts(entropy_coder.small_parts(coded, model))


def _bytes_of(model, coordinates, vocab, bits):
  """Bytes of the parts, about, from the bits of all rows."""
  blocks = -(-vocab // model.restart)
  small = sum(array.nbytes for array in _small(coordinates, 1.0, model)[0].values())
  pages = -(-blocks // PAGE) * PAGES.itemsize
  return int((bits + blocks * BITS_OF_BLOCK) / 8) + pages + small + entropy_coder.SIZE_OF_HEADER


def _write(partial, table, coordinates, step, model):
  """Write the file; its bytes, and the sums of errors and lengths of rows that are read and not."""
  vocab, dim = table.shape
  restart, groups, steps = model.restart, coordinates.groups, coordinates.steps * np.float32(step)
  inverse = coordinates.basis.inverse.astype(np.float32)
  padding = int(groups.rows.argmax())

  def of_part(first):
    own = slice(first, min(first + LANES * restart, vocab))
    part = table[own]
    rows, owner = np.asarray(part, np.float32), groups(own)
    _check_finite(rows, np.arange(own.start, own.stop))
    x = coordinates.of(rows, owner) / np.float32(step)
    missing = -len(x) % restart
    x = np.pad(x, ((0, missing), (0, 0))).clip(-MOST_LEVELS, MOST_LEVELS)
    padded = np.pad(owner, (0, missing), constant_values=padding)
    levels = dependent_levels(x, padded, model, groups.dropped)
    by_block = lambda y: y.reshape(-1, restart, *y.shape[1:])
    words, lengths = entropy_coder.encode_blocks(by_block(levels), by_block(padded), model)
    found = (levels[: len(rows)] * steps[owner][:, None]) @ inverse + coordinates.mean
    wide = (y.astype(np.float64) for y in (found - rows, rows))  # squares may leave float32
    error, length = (np.einsum("nd,nd->n", y, y) for y in wide)
    counts = groups.counts(own)
    release(part)
    unread = counts == 0
    sums = counts @ error, counts @ length, error[unread].sum(), length[unread].sum()
    return words, lengths, np.array(sums, np.float64)

  count, sums = 0, np.zeros(4)
  with partial.open("wb") as file, tempfile.TemporaryFile(dir=partial.parent) as index:
    file.write(bytes(HEADER))
    for words, lengths, own in container.side_by_side(of_part, range(0, vocab, LANES * restart)):
      file.write(np.asarray(words, "<u2"))
      index.write(_pages(words, lengths, count))
      count, sums = count + len(words), sums + own
    size = index.tell()
    small, entries = _small(coordinates, step, model)
    entries["words"] = {"dtype": "<u2", "shape": [count]}
    entries["pages"] = {"dtype": "|u1", "shape": [size]}
    fields = {"rows": vocab, "columns": dim, "classes": len(steps), "restart": restart, "lanes": 1}
    small = {"header": entropy_coder.sealed_header(container.PAGED, fields, entries)} | small
    index.seek(0)
    while piece := index.read(2**20):
      file.write(piece)
    for array in small.values():
      file.write(array)
    sizes = {"words": 2 * count, "pages": size} | {name: x.nbytes for name, x in small.items()}
    _write_header(file, (vocab, dim), sizes)
  return sum(sizes.values()), sums


def _pages(words, lengths, start):
  """The entries of pages whose words begin at word `start` of the file."""
  lengths = np.pad(lengths, (0, -len(lengths) % PAGE)).reshape(-1, PAGE)
  pages = np.zeros(len(lengths), PAGES)
  pages["lengths"] = lengths
  ends = np.cumsum(lengths.sum(axis=1))
  pages["start"] = start + ends - lengths.sum(axis=1)
  for page, end in zip(pages, ends):
    own = words[int(page["start"]) - start : end]
    page["crc32"] = container.page_checksum(own, page["lengths"])
  return pages.tobytes()


def _write_header(file: BinaryIO, shape: tuple[int, int], sizes: dict[str, int]) -> None:
  """Write the header of safetensors before the tensors, filled with spaces."""
  metadata = {"format": table_file.FORMAT, "version": table_file.VERSION, "codec": "integers"}
  metadata |= {"V": str(shape[0]), "d": str(shape[1]), "pages": "true"}
  header: dict[str, Any] = {"__metadata__": metadata}
  first = 0
  for name, size in sizes.items():
    offsets = [first, first := first + size]
    header[NAME + name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
  text = json.dumps(header, separators=(",", ":")).encode()
  file.seek(0)
  file.write((HEADER - 8).to_bytes(8, "little") + text.ljust(HEADER - 8))
