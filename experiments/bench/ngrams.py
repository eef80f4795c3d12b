"""Benchmark of tables of 10^8 n-grams: training from disk and on eight devices, and lookups."""

import functools
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from experiments.bench import measure
from experiments.plan.isolated import isolated
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.plan.compiling import simulated_devices
from vqjax.lab.training.provenance import device
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.row_updates import update_rows
from vqjax.sharding import MeshShape, make_mesh
from vqjax.tables import HostTable, tensor_files

DEVICES, RATE = 8, 0.03
WIDTH = 32


class Sizes(NamedTuple):
  """Sizes of the benchmark.

  Attributes:
    least: smallest size of each of the hash's 16 heads.
    lookup_rows: rows of the tables whose lookups are timed, of which one is in memory.
    batch: texts of a step.
    length: tokens of a text.
    vocab: number of tokens.
    dim: width of the model.
    steps: training steps.
  """

  least: int
  lookup_rows: int
  batch: int
  length: int
  vocab: int
  dim: int
  steps: int

  @property
  def ngrams(self) -> XorHash:
    """The hash of pairs and triples, eight heads each."""
    return XorHash.qwen4(self.vocab, end=0, heads=8, least=self.least)


FULL = Sizes(6_250_000, 10_000_000, 16, 256, 8_192, 128, 20)
QUICK = Sizes(61, 1_000, 2, 16, 101, 8, 3)


class Model(nn.Module):
  """An embedding, a memory and a head: what a step needs beside its n-grams."""

  sizes: Sizes
  vocab_axis: str | None = None

  def setup(self):
    size, axis = self.sizes, self.vocab_axis
    table = DenseEmbedding(of_devices(size.ngrams.rows), WIDTH)
    self.embedding = DenseEmbedding(size.vocab, size.dim)
    self.memory = NGramMemory(NGramEmbedding(size.ngrams, table), size.dim, has_table=False)
    self.head = DenseHead(size.vocab, size.dim, vocab_axis=axis)

  def __call__(self, tokens, vectors):
    hidden = self.embedding(tokens[:, :-1])
    hidden = hidden + self.memory(hidden, tokens[:, :-1], vectors)
    return -self.head.log_prob(hidden, tokens[:, 1:]).mean()


def of_devices(rows: int) -> int:
  """The next number of rows that the devices divide."""
  return rows + -rows % DEVICES


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Train a table on disk and on devices, and time lookups, each in a process of its own."""
  size = QUICK if quick else FULL
  figures = {"size": size._asdict(), "rows": size.ngrams.rows, "width": WIDTH}
  # What is in memory anyway is measured by itself.
  for name, part in (("disk", on_disk), ("devices", on_devices), ("lookups", lookups)):
    figures[name] = isolated(part, size)
    yield figures


def texts(size: Sizes) -> np.ndarray:
  """Tokens by Zipf's law, [steps, batch, length + 1]."""
  share = 1 / np.arange(1, size.vocab + 1)
  shape = (size.steps, size.batch, size.length + 1)
  return np.random.default_rng(0).choice(size.vocab, shape, p=share / share.sum()).astype(np.int32)


def random_rows(first: int, last: int) -> np.ndarray:
  """Rows of a table that is not trained, of standard deviation 0.05."""
  draw = np.random.default_rng(first)
  return 0.05 * draw.standard_normal((last - first, WIDTH), np.float32)


def on_disk(size: Sizes) -> dict[str, Any]:
  """Print and return seconds and memory of training a float32 table in files."""
  tokens, ngrams, model = texts(size), size.ngrams, Model(size)
  shape = (size.batch, size.length, ngrams.heads * WIDTH)
  rule = optax.adam(1e-3)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, tokens, vectors):
    loss = lambda params, vectors: model.apply({"params": params}, tokens, vectors)
    value, (of_params, of_vectors) = jax.value_and_grad(loss, (0, 1))(params, vectors)
    updates, state = rule.update(of_params, state)
    return optax.apply_updates(params, updates), state, value, of_vectors

  begin = jax.jit(lambda: model.init(jax.random.key(0), tokens[0], np.zeros(shape, np.float32)))
  params = begin()["params"]
  state = jax.jit(rule.init)(params)
  parts = {name: [] for name in ("read", "device", "update", "step")}
  losses, distinct = [], []
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    made = HostTable.create(
      pathlib.Path(folder, "table"), of_devices(ngrams.rows), WIDTH, init=random_rows
    )
    creating = time.perf_counter() - start
    with made as table:
      files = [*pathlib.Path(folder, "table").iterdir()]
      size_bytes = sum(path.stat().st_size for path in files)
      forget(table, files)
      ids = ngrams(tokens[0, :, :-1])
      for i in range(size.steps):
        times = [time.perf_counter()]
        vectors = table.rows(ids).reshape(shape)
        times.append(time.perf_counter())
        following = ngrams(tokens[(i + 1) % size.steps, :, :-1])
        table.prefetch(following)
        params, state, loss, gradients = step(params, state, tokens[i], vectors)
        gradients = np.asarray(gradients).reshape(*ids.shape, WIDTH)
        times.append(time.perf_counter())
        table.update(ids, gradients, RATE)
        times.append(time.perf_counter())
        for name, seconds in zip(parts, [*np.diff(times), times[-1] - times[0]]):
          parts[name].append(float(seconds))
        losses.append(float(loss))
        distinct.append(len(np.unique(ids)))
        ids = following
      start = time.perf_counter()
      table.flush(size.steps)
      flushing = time.perf_counter() - start
  # The first step also compiles.
  medians = {f"{name}_seconds": statistics.median(x[1:]) for name, x in parts.items()}
  found = {
    "file_bytes": size_bytes,
    "peak_resident_bytes": measure.peak_resident_bytes(),
    "create_seconds": creating,
    "flush_seconds": flushing,
    "distinct_rows": statistics.median(distinct),
    "first_seconds": parts["step"][0],
    "loss": [losses[0], losses[-1]],
  } | medians
  measure.show_rows(
    f"training of {ngrams.rows:,} x {WIDTH} float32 in files, {size.batch * size.length} tokens a"
    f" step, {found['distinct_rows']:,.0f} different rows, {device()}",
    ("", "GiB of files", "GiB resident, peak", "s to create", "s a step", "of it read", "device",
     "update", "s to flush"),
    [["HostTable", *(f"{found[key] / 2**30:.2f}" for key in ("file_bytes", "peak_resident_bytes")),
      f"{creating:.0f}", *(f"{medians[f'{name}_seconds']:.3f}" for name in ("step", "read",
      "device", "update")), f"{flushing:.1f}"]],
  )  # fmt: skip
  return found


def on_devices(size: Sizes) -> dict[str, Any]:
  """Print and return memory and seconds of training a bfloat16 table on simulated devices."""
  mesh = make_mesh(MeshShape(model=DEVICES), simulated_devices(DEVICES))
  tokens, ngrams, model = texts(size), size.ngrams, Model(size, "model")
  rows = of_devices(ngrams.rows)
  lookup = NGramEmbedding(
    ngrams, DenseEmbedding(rows, WIDTH, param_dtype=jnp.bfloat16, vocab_axis="model")
  )
  variables = lambda table: {"params": {"table": {"weight": table}}}

  # The table is held as integers between steps: XLA for CPUs has no scatter of bfloat16 in place.
  def step(bits, moment, params, tokens):
    table = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    inputs = tokens[:, :-1]
    vectors = lookup.apply(variables(table), inputs)
    loss = lambda params, vectors: model.apply({"params": params}, tokens, vectors)
    value, (of_params, of_vectors) = jax.value_and_grad(loss, (0, 1))(params, vectors)
    ids = ngrams(inputs)
    table, moment = update_rows(
      table, moment, ids, of_vectors.reshape(*ids.shape, WIDTH), RATE, vocab_axis="model"
    )
    params = jax.tree.map(lambda x, g: x - 0.1 * g, params, of_params)
    return jax.lax.bitcast_convert_type(table, jnp.uint16), moment, params, value

  with jax.set_mesh(mesh):
    by_rows, everywhere = (jax.NamedSharding(mesh, spec) for spec in (P("model"), P()))
    vectors = np.zeros((size.batch, size.length, lookup.dim), np.float32)
    begin = jax.jit(
      lambda: (
        jnp.zeros((rows, WIDTH), jnp.uint16),
        jnp.zeros((rows,), jnp.float32),
        model.init(jax.random.key(0), tokens[0], vectors)["params"],
      ),
      out_shardings=(by_rows, by_rows, everywhere),
    )
    places = by_rows, by_rows, everywhere, everywhere
    shapes = jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
      jax.eval_shape(begin),
      (by_rows, by_rows, jax.tree.map(lambda _: everywhere, jax.eval_shape(begin)[2])),
    )
    given = jax.ShapeDtypeStruct(tokens[0].shape, tokens.dtype, sharding=everywhere)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=places)
    program = jitted.lower(*shapes, given).compile()
    memory = program.memory_analysis()
    held, losses, times = begin(), [], []
    for text in tokens:
      start = time.perf_counter()
      *held, loss = program(*held, jax.device_put(text, everywhere))
      losses.append(float(loss))
      times.append(time.perf_counter() - start)
  found = {
    "held_bytes": int(memory.argument_size_in_bytes),
    "temporary_bytes": int(memory.temp_size_in_bytes),
    "not_in_place": int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
    "peak_resident_bytes": measure.peak_resident_bytes(),
    "step_seconds": statistics.median(times[1:]),
    "loss": [losses[0], losses[-1]],
  }
  measure.show_rows(
    f"training of {ngrams.rows:,} x {WIDTH} bfloat16 on {DEVICES} simulated devices",
    ("", "MiB held a device", "MiB of temporaries", "GiB resident, all devices", "s a step"),
    [["update_rows", *(measure.mib(found[f"{key}_bytes"]) for key in ("held", "temporary")),
      f"{found['peak_resident_bytes'] / 2**30:.2f}", f"{found['step_seconds']:.3f}"]],
  )  # fmt: skip
  return found


def forget(table: HostTable, files: list[pathlib.Path]) -> None:
  """Drop files of a table that is not changed from memory, so that they are read from the disk."""
  for part in (table.weight, table.moment):
    if part is not None:
      tensor_files.release(part)
  drop(files)


def drop(files: list[pathlib.Path]) -> None:
  """Drop files that no process has mapped from the system's memory, on Linux."""
  for file in files:
    if hasattr(os, "posix_fadvise"):
      with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Int8Rows:
  """A memory-mapped table of int8, with a scale a row: what people serve."""

  def __init__(self, folder: pathlib.Path, rows: int):
    self.files = [folder / "levels", folder / "scales"]
    shapes = (rows, WIDTH), (rows,)
    for file, shape, dtype in zip(self.files, shapes, (np.int8, np.float32)):
      with file.open("wb") as opened:
        block = max(1, 2**24 // WIDTH)
        for first in range(0, rows, block):
          count = min(block, rows - first)
          np.random.default_rng(first).integers(-127, 128, (count, *shape[1:])).astype(
            dtype
          ).tofile(opened)
        os.fsync(opened.fileno())
    kinds = zip(self.files, shapes, (np.int8, np.float32))
    self.levels, self.scales = (np.memmap(f, dtype, "r", shape=s) for f, s, dtype in kinds)
    if hasattr(mmap, "MADV_RANDOM"):  # as the table has it
      for part in (self.levels, self.scales):
        tensor_files.map_of(part).madvise(mmap.MADV_RANDOM)

  def rows(self, ids: np.ndarray) -> np.ndarray:
    """The rows of ids, float32."""
    return self.levels.take(ids, axis=0) * self.scales.take(ids)[..., None]

  def forget(self) -> None:
    """Drop the files from memory."""
    for part in (self.levels, self.scales):
      tensor_files.release(part)
    drop(self.files)


class Reader(NamedTuple):
  """A way to read rows.

  Attributes:
    rows: ids -> rows.
    before: called with the ids of each lookup before it, which is not timed.
  """

  rows: Callable[[np.ndarray], np.ndarray]
  before: Callable[[np.ndarray], object] = lambda ids: None


def lookups(size: Sizes) -> dict[str, Any]:
  """Print and return lookups a second of a table in memory, in a mapped file, and of int8."""
  rows, is_quick = size.lookup_rows, size == QUICK
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    table = HostTable.create(folder / "table", rows, WIDTH, init=random_rows, resident=2**40)
    files = [*(folder / "table").iterdir()]
    in_memory, int8 = HostTable(np.array(table.weight)), Int8Rows(folder, rows)

    def prefetched(ids):
      forget(table, files)
      table.prefetch(ids)
      time.sleep(0.01 if is_quick else 0.5)  # as the step of a model

    cold = {
      "float32 mapped, cold": Reader(table.rows, lambda ids: forget(table, files)),
      "float32 mapped, cold, prefetched for 0.5 s": Reader(table.rows, prefetched),
      "int8 mapped, cold": Reader(int8.rows, lambda ids: int8.forget()),
    }
    found = read_in_turn(cold, size, 3 if is_quick else 20)
    for file in (*files, *int8.files):
      with file.open("rb") as opened:
        while opened.read(2**24):
          pass
    warm = {
      "float32 in memory": Reader(in_memory.rows),
      "float32 mapped, warm": Reader(table.rows),
      "int8 mapped, warm": Reader(int8.rows),
    }
    found = read_in_turn(warm, size, 3 if is_quick else 200) | found
    # Not in turn with the others, whose pages count too.
    table.close()
    tensor_files.release(table.weight)
    bounded = HostTable(table.weight, resident=2**28)
    alone = {"float32 mapped, warm, 256 MiB resident": Reader(bounded.rows)}
    found |= read_in_turn(alone, size, 3 if is_quick else 200)
    bounded.close()
  columns = [f"{what}, batch {batch}" for batch in (1, 4096) for what in ("ms", "lookups/s")]
  cell = lambda row: (f"{1e3 * row['seconds']:.3f}", f"{row['lookups_per_s']:,.0f}")
  measure.show_rows(
    f"rows of {rows:,} x {WIDTH}, {size.ngrams.heads} a token, one thread",
    ("", *columns),
    [[case, *(x for b in (1, 4096) for x in cell(own[b]))] for case, own in found.items()],
  )
  return found


def read_in_turn(readers: dict[str, Reader], size: Sizes, calls: int) -> dict[str, Any]:
  """Median seconds and lookups a second of random rows, for a batch of 1 and of 4,096 tokens."""
  draw, heads = np.random.default_rng(1), size.ngrams.heads
  found: dict[str, Any] = {name: {} for name in readers}
  for batch, times in ((1, calls), (4096, max(3, calls // 10))):
    seconds = {name: [] for name in readers}
    for _ in range(times):
      for name, reader in readers.items():
        ids = draw.integers(0, size.lookup_rows, (batch, heads))
        reader.before(ids)
        start = time.perf_counter()
        reader.rows(ids)
        seconds[name].append(time.perf_counter() - start)
    for name, own in seconds.items():
      median = statistics.median(own)
      found[name][batch] = {"seconds": median, "lookups_per_s": batch * heads / median}
  return found
