"""Benchmark of DPQ: training steps over K and M, lookup from packed codes, export."""

import functools
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.dpq.lstm import MEDIUM, LSTMSize
from experiments.bench import measure
from experiments.bench.measure import compare, process_cost
from experiments.bench.training_step import TrainingStep
from experiments.plan.isolated import isolated
from experiments.studies.dpq.rows import CodeSize, Task, centroids, full, softmax
from experiments.studies.dpq.tasks import PTB, lstm
from vqjax import CompactEmbedding, DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.embeddings.table_file import open_table
from vqjax.lab.config import with_vocab
from vqjax.lab.report.units import MISSING
from vqjax.lab.training.provenance import device
from vqjax.ops import bit_packing

V = 10_000
ROUNDS = 7

GRID = (8, 32, 128, 512), (25, 50, 130)
"""K x M of Figure 4; M divides the medium model's width of 650."""


class TableShape(NamedTuple):
  """Sizes of a compressed table."""

  vocab: int
  dim: int
  codes: int
  subspaces: int


PAPER_TABLE = TableShape(267_735, 768, 256, 96)
TOKENS = 16_384


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Time training steps and lookups, and export a whole table."""
  body, vocab, grid, table, tokens = MEDIUM, V, GRID, PAPER_TABLE, TOKENS
  if quick:
    tiny = LSTMSize(12, 5, 0.0, 0.1, 0.5, 1, 1, 3.0)
    body, vocab, grid = tiny, 100, ((4,), (3,))
    table, tokens = TableShape(300, 16, 16, 4), 64
  figures = {"training": training(body, vocab, grid)}
  yield figures
  figures |= {"look_up": look_up(table, tokens)}
  yield figures
  yield figures | {"export": export(table)}


def training(
  body: LSTMSize, vocab: int, grid: tuple[Sequence[int], Sequence[int]]
) -> dict[str, Any]:
  """Figure 4: training step time and temporaries relative to the full embedding's.

  The two steps are called in turn, since the noise of a machine changes over time.
  """
  choices = [CodeSize(k, m, False) for k in grid[0] for m in grid[1]]
  makers = {f"SX {codes}": functools.partial(softmax, codes=codes) for codes in choices}
  makers |= {f"VQ {codes}": functools.partial(centroids, codes=codes) for codes in choices}
  task = lstm(PTB, body)
  rows, dense = {}, _step(task, full, vocab)
  for name, make in makers.items():
    measure.log(f"measuring {name}")
    own = _step(task, make, vocab)
    times = [(dense(), own()) for _ in range(ROUNDS)]
    dense_seconds, seconds = (statistics.median(column) for column in zip(*times, strict=True))
    rows[name] = {
      "seconds": seconds,
      "time": seconds / dense_seconds,
      "temp_bytes": own.temp_bytes,
      "temp": own.temp_bytes / dense.temp_bytes,
    }
  measure.show_rows(
    f"training step of the LSTM of width {body.dim}, V={vocab:,}, {body.unroll * 20} tokens,"
    f" float32, {device()}",
    ("K x M", "time / full", "temp / full"),
    [[name, f"{row['time']:.3f}", f"{row['temp']:.3f}"] for name, row in rows.items()],
  )
  return rows


def _step(task: Task, make: Callable[[Task], Embedding], vocab: int) -> TrainingStep:
  step = TrainingStep(with_vocab(task.make("bench", make(task), seed=0), vocab))
  step()
  return step


def look_up(table: TableShape, tokens: int) -> dict[str, Any]:
  """Time of lookups in packed codes against a gather from the dense table."""
  small = random_compact(table)
  dense = jax.random.normal(jax.random.key(0), (table.vocab, table.dim))
  chosen = jax.random.randint(jax.random.key(1), (tokens,), 0, table.vocab)
  programs = {
    "dense gather": (lambda rows, token: rows[token], (dense, chosen)),
    "packed codes": (lambda small, token: small(token), (small, chosen)),
  }
  timed = compare(programs, rounds=9)
  rows = {
    name: {"seconds": one.seconds, "temp_bytes": one.temp_bytes} for name, one in timed.items()
  }
  rows["time"] = timed["packed codes"].seconds / timed["dense gather"].seconds
  measure.show_rows(
    f"lookup of {tokens:,} tokens, V={table.vocab:,} D={table.dim} K={table.codes}"
    f" M={table.subspaces}, float32, {device()}",
    ("", "ms", "time / dense"),
    [
      [name, f"{1e3 * one.seconds:.2f}", f"{one.seconds / timed['dense gather'].seconds:.2f}"]
      for name, one in timed.items()
    ],
  )
  return rows


def random_compact(table: TableShape) -> CompactEmbedding:
  """A compact embedding of random codes and values."""
  codes = np.random.default_rng(0).integers(0, table.codes, (table.vocab, table.subspaces))
  shape = table.subspaces, table.codes, table.dim // table.subspaces
  return CompactEmbedding(
    data=bit_packing.bit_packed(codes.astype(np.uint16), bit_packing.bits_for(table.codes)),
    values=np.asarray(jax.random.normal(jax.random.key(2), shape)),
    vocab=table.vocab,
    dim=table.dim,
    codes=table.codes,
    subspaces=table.subspaces,
    additive=False,
  )


def export(table: TableShape) -> dict[str, Any]:
  """Cost of `compact` and `save`, and of a lookup, each in its own process."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "embedding.safetensors")
    written = isolated(_exported, table, str(path))
    read = isolated(_read, str(path), table.vocab)
  rows = {"export": written, "open and look up": read}
  file = written["file_bytes"]
  measure.show_rows(
    f"export of V={table.vocab:,} D={table.dim} K={table.codes} M={table.subspaces}:"
    f" {file:,} bytes, {written['formula_bytes']:,} by the formula, ratio"
    f" {written['formula_ratio']:.2f} by the paper's formula, {written['file_ratio']:.2f} by the"
    " file",
    ("", "s", "peak, MiB", "of the file"),
    [
      [name, f"{r['seconds']:.2f}", measure.mib(r["memory_bytes"]), _part(r["memory_bytes"], file)]
      for name, r in rows.items()
    ],
  )
  return rows


def _exported(table: TableShape, path: str) -> dict[str, Any]:
  """Cost of the export; memory is the peak beyond the trained embedding."""
  quantizer = SoftmaxQuantizer(table.codes, table.subspaces, table.dim)
  embedding = DPQEmbedding(table.vocab, table.dim, quantizer)
  variables = jax.block_until_ready(
    jax.jit(embedding.init)(jax.random.key(0), jnp.zeros((1,), jnp.int32))
  )
  made = []

  def save():
    made.append(embedding.compact(variables))
    made[0].save(path)

  cost, small = process_cost(save), made[0]
  size = pathlib.Path(path).stat().st_size
  full = 4 * table.vocab * table.dim
  own = {
    "file_bytes": size,
    "formula_bytes": small.nbytes,
    "formula_ratio": small.compression_ratio(),
    "file_ratio": full / size,
  }
  return cost | own


def _part(count: int | None, whole: int) -> str:
  return MISSING if count is None else f"{count / whole:.2f}"


def _read(path: str, vocab: int) -> dict[str, float]:
  tokens = np.random.default_rng(0).integers(0, vocab, 100)
  return process_cost(lambda: open_table(path)[tokens])
