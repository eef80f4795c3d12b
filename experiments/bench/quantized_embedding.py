"""What does DPQ cost: a training step over K and M, a look-up from packed codes, an export?

make bench-dpq
python -m experiments.bench.quantized_embedding --json docs/results/dpq/cost.json
"""

import functools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.dpq.lstm import MEDIUM, LSTMSize, language_model
from experiments.bench import benching
from experiments.bench.process import measured
from experiments.bench.stepping import Stepping
from experiments.bench.timing import compare
from experiments.plan.apart import apart
from experiments.studies.dpq.rows import centroids, full, softmax
from experiments.studies.dpq.settings import Codes, Setting
from vqjax import CompactEmbedding, DPQEmbedding, Embedding, SoftmaxQuantizer
from vqjax.embeddings.compact_file import open_compact
from vqjax.lab.config import with_vocab
from vqjax.lab.data import PennTreebank
from vqjax.lab.training.provenance import device, provenance
from vqjax.ops import packing

V = 10_000

GRID = (8, 32, 128, 512), (25, 50, 130)
"""K x M of Figure 4; M divides the medium model's width of 650."""


class Table(NamedTuple):
  """A compressed table."""

  vocab: int
  dim: int
  codes: int
  subspaces: int


WHOLE = Table(267_735, 768, 256, 96)
TOKENS = 16_384


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  options = benching.parser(
    "experiments.bench.quantized_embedding", __doc__.splitlines()[0]
  ).parse_args(arguments)
  body, grid, whole, tokens = MEDIUM, GRID, WHOLE, TOKENS
  if options.quick:
    tiny = LSTMSize(12, 5, 0.0, 0.1, 0.5, 1, 1, 3.0)
    body, grid, whole, tokens = tiny, ((2, 4), (3,)), Table(300, 16, 16, 4), 64
  figures = {
    "training": training(body, 100 if options.quick else V, grid),
    "look_up": look_up(whole, tokens),
    "export": export(whole),
    "provenance": provenance(),
  }
  benching.write(options.json, figures)
  return 0


def training(
  body: LSTMSize, vocab: int, grid: tuple[Sequence[int], Sequence[int]]
) -> dict[str, Any]:
  """Figure 4: the time of a whole training step beside that of the full embedding, and memory.

  Each step goes on from the state of the one before. All in turn, in one process.
  """
  choices = [Codes(k, m, False) for k in grid[0] for m in grid[1]]
  makers = {f"SX {codes}": functools.partial(softmax, codes=codes) for codes in choices}
  makers |= {f"VQ {codes}": functools.partial(centroids, codes=codes) for codes in choices}
  setting = _setting(body)
  rows, dense = {}, _step(setting, full, vocab)
  for name, make in makers.items():
    print(f"measuring {name}", file=sys.stderr)
    rows[name] = _beside(dense, _step(setting, make, vocab))
  benching.show(
    f"training step of the LSTM of width {body.dim}, V={vocab:,}, {body.unroll * 20} tokens,"
    f" float32, {device()}",
    ("K x M", "time / full", "temp / full"),
    [[name, f"{row['time']:.3f}", f"{row['temp']:.3f}"] for name, row in rows.items()],
  )
  return rows


def _setting(body: LSTMSize) -> Setting:
  make = lambda row, embedding, seed: language_model(
    row, embedding, body, PennTreebank(), 929_589, seed
  )
  none = Codes(2, 1)
  return Setting(make, body.dim, body.begin, (), none, none, weight=body.weight)


def _step(setting: Setting, make: Callable[[Setting], Embedding], vocab: int) -> Stepping:
  step = Stepping(with_vocab(setting.make("", make(setting), 0), vocab))
  step()
  return step


ROUNDS = 7


def _beside(full: Stepping, own: Stepping) -> dict[str, float]:
  """In turn, since a noisy machine is not as noisy all the time."""
  times = [(full(), own()) for _ in range(ROUNDS)]
  of_full, seconds = (statistics.median(column) for column in zip(*times, strict=True))
  return {
    "seconds": seconds,
    "time": seconds / of_full,
    "temp_bytes": own.temp_bytes,
    "temp": own.temp_bytes / full.temp_bytes,
  }


def look_up(table: Table, tokens: int) -> dict[str, Any]:
  """Vectors of random tokens from packed codes, beside a gather from the dense table, jitted."""
  small = random_compact(table)
  dense = jax.random.normal(jax.random.key(0), (table.vocab, table.dim))
  chosen = jax.random.randint(jax.random.key(1), (tokens,), 0, table.vocab)
  programs = {
    "dense gather": (lambda rows, token: rows[token], (dense, chosen)),
    "packed codes": (lambda small, token: small(token), (small, chosen)),
  }
  found = compare(programs, rounds=9)
  rows = {
    name: {"seconds": one.seconds, "temp_bytes": one.temp_bytes} for name, one in found.items()
  }
  rows["time"] = found["packed codes"].seconds / found["dense gather"].seconds
  benching.show(
    f"look-up of {tokens:,} tokens, V={table.vocab:,} D={table.dim} K={table.codes}"
    f" M={table.subspaces}, float32, {device()}",
    ("", "ms", "time / dense"),
    [
      [name, f"{1e3 * one.seconds:.2f}", f"{one.seconds / found['dense gather'].seconds:.2f}"]
      for name, one in found.items()
    ],
  )
  return rows


def random_compact(table: Table) -> CompactEmbedding:
  """A compact embedding of random codes and values."""
  codes = np.random.default_rng(0).integers(0, table.codes, (table.vocab, table.subspaces))
  shape = table.subspaces, table.codes, table.dim // table.subspaces
  return CompactEmbedding(
    data=packing.packed(codes.astype(np.uint16), packing.bits_for(table.codes)),
    values=np.asarray(jax.random.normal(jax.random.key(2), shape)),
    vocab=table.vocab,
    dim=table.dim,
    codes=table.codes,
    subspaces=table.subspaces,
    additive=False,
  )


def export(table: Table) -> dict[str, Any]:
  """`compact` and `save` of a whole embedding, and a look-up in the file, each in a process."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "embedding.safetensors")
    written = apart(_exported, table, str(path))
    read = apart(_read, str(path), table.vocab)
  rows = {"export": written, "open and look up": read}
  file = written["file_bytes"]
  benching.show(
    f"export of V={table.vocab:,} D={table.dim} K={table.codes} M={table.subspaces}:"
    f" {file:,} bytes, {written['formula_bytes']:,} by the formula, ratio"
    f" {written['formula_ratio']:.2f} by the paper's formula, {written['file_ratio']:.2f} by the"
    " file",
    ("", "s", "peak, MiB", "of the file"),
    [
      [name, f"{r['seconds']:.2f}", benching.mib(r["memory_bytes"]), _part(r["memory_bytes"], file)]
      for name, r in rows.items()
    ],
  )
  return rows


def _exported(table: Table, path: str) -> dict[str, Any]:
  """Memory is that at the peak, beyond what the process had with the trained embedding."""
  quantizer = SoftmaxQuantizer(table.codes, table.subspaces, table.dim)
  embedding = DPQEmbedding(table.vocab, table.dim, quantizer)
  variables = jax.block_until_ready(
    jax.jit(embedding.init)(jax.random.key(0), jnp.zeros((1,), jnp.int32))
  )
  made = []

  def save():
    made.append(embedding.compact(variables))
    made[0].save(path)

  cost, small = measured(save), made[0]
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
  return "—" if count is None else f"{count / whole:.2f}"


def _read(path: str, vocab: int) -> dict[str, float]:
  tokens = np.random.default_rng(0).integers(0, vocab, 100)
  return measured(lambda: open_compact(path)[tokens])


if __name__ == "__main__":
  sys.exit(main())
