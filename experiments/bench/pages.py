"""Benchmark of a table of n-grams in pages: its compression, and lookups beside an int8 array.

Rows are random numbers, longer where they are read more often; counts fall like Zipf's law, and
most rows have none. Lookups are those of tokens of 16 rows, drawn by the counts. "cold" drops the
file from the system's cache before each call; a disk's own cache stays.
"""

import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.bench import measure
from vqjax.tables import container
from vqjax.tables.paged import compress_rows
from vqjax.tables.stored import KeptRows

DIM, HEADS, BITS = 32, 16, 0.5
PART = 2**18
"""Rows that are made at a time."""


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Figures of the compression, then those of lookups."""
  rows = 2**13 if quick else 2**25
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    counts = _make(path, rows)
    table = np.load(path / "table.npy", mmap_mode="r")
    size, out, reports = int(BITS * rows * DIM / 8), path / "table.safetensors", []
    given = {"size": max(size, 6000), "drop": True}
    cost = measure.process_cost(lambda: reports.append(compress_rows(table, counts, out, **given)))
    (report,) = reports
    figures: dict[str, Any] = {
      "rows": rows,
      "dim": DIM,
      "table_bytes": table.nbytes,
      "file_bytes": out.stat().st_size,
      "bits_per_weight": report.bits_per_weight,
      "unread": report.unread,
      "error": report.error,
      "passes": report.passes,
      **{f"compress_{name}": value for name, value in cost.items()},
    }
    measure.say(f"{table.nbytes:,} bytes: {report}; {measure.mib(cost['memory_bytes'])}")
    yield figures
    figures["lookups"] = _lookups(path, counts, quick)
    yield figures


def _make(path: pathlib.Path, rows: int) -> np.ndarray:
  """The counts; the table in float16 and in int8 are written."""
  rng = np.random.default_rng(0)
  rank = rng.permutation(rows)
  counts = rng.poisson(rows / np.log(rows) / (1 + rank)).astype(np.uint32)
  table = np.lib.format.open_memmap(path / "table.npy", "w+", np.float16, (rows, DIM))
  narrow = np.lib.format.open_memmap(path / "int8.npy", "w+", np.int8, (rows, DIM))
  for first in range(0, rows, PART):
    own = slice(first, first + PART)
    long = 0.02 + 0.1 * np.minimum(1, np.sqrt(counts[own]) / 5)
    table[own] = rng.standard_normal((len(long), DIM), np.float32) * long[:, None]
    narrow[own] = np.rint(table[own] * 127)
  for array in (table, narrow):
    array.flush()
  return counts


def _lookups(path: pathlib.Path, counts: np.ndarray, quick: bool) -> list[dict[str, Any]]:
  """Tokens a second of each reader, with a token and with many at a time."""
  rng, ends = np.random.default_rng(1), np.cumsum(counts, dtype=np.float64)
  small, narrow = path / "table.safetensors", path / "int8.npy"
  kept = KeptRows(container.read_table(small))
  mapped, array = container.read_table(small), np.load(narrow, mmap_mode="r")
  readers: dict[str, tuple[pathlib.Path | None, Callable]] = {
    "int8, mapped, cold": (narrow, lambda ids: np.load(narrow, mmap_mode="r")[ids]),
    "int8, mapped": (None, lambda ids: array[ids]),
    "pages, cold": (small, lambda ids: container.read_table(small)[ids]),
    "pages": (None, lambda ids: mapped[ids]),
    "pages, NumPy alone": (None, lambda ids: mapped.take(ids, compiled=False)),
    "pages, NumPy alone, rows kept": (None, kept),
  }
  found = []
  for tokens in (1, 64 if quick else 4096):
    # More calls where they are short; the first ones compile, and fill what is kept.
    warm, calls = (20, 50) if tokens == 1 and not quick else (1, 2)
    drawn = np.searchsorted(ends, rng.random((warm + calls, tokens * HEADS)) * ends[-1])
    for name, (cold, read) in readers.items():
      times = []
      for ids in drawn:
        if cold is not None:
          _forget(cold)
        start = time.perf_counter()
        read(ids)
        times.append(time.perf_counter() - start)
      seconds = float(np.median(times[warm:]))
      found.append({"reader": name, "tokens": tokens, "seconds": seconds})
      found[-1]["tokens_per_s"] = tokens / seconds
  rows = [
    [x["reader"], f"{x['tokens']:,}", f"{1e3 * x['seconds']:.2f}", f"{x['tokens_per_s']:,.0f}"]
    for x in found
  ]
  measure.show_rows("lookups", ["reader", "tokens a call", "ms", "tokens/s"], rows)
  return found


def _forget(path: pathlib.Path) -> None:
  """Ask the system to drop the pages of a file that it has read."""
  handle = os.open(path, os.O_RDONLY)
  try:
    if hasattr(os, "posix_fadvise"):
      os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
  finally:
    os.close(handle)
