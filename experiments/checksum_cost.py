"""The cost of the checks: what opening and saving take with them and without.

python -m experiments.checksum_cost
python -m experiments.checksum_cost gemma-3-270m-q4_k_m.gguf
"""

import contextlib
import json
import logging
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vqjax.embeddings.compact import CompactEmbedding
from vqjax.embeddings.table_file import open_table
from vqjax.lab.training import checkpoint, log
from vqjax.lab.training.step import TrainState, state_checksums
from vqjax.lm import checkpoints, records
from vqjax.lm.sources import families, readers
from vqjax.tables import tensor_files

REPEATS = 9

CHECKS = {
  "schema": [
    (families, "read_config"),
    (readers, "_check_gguf_keys"),
    (readers, "_check_gguf_tokenizer"),
  ],
  "sizes": [(readers, "read_header"), (tensor_files, "open_file")],
  "checksums": [(tensor_files, "verify")],
}
"""Functions that check a model when it is loaded; those of sizes also read the header."""


def compared(with_checks: Callable[[], object], without: Callable[[], object]) -> tuple:
  """Median seconds of both, alternating."""
  times: tuple[list, list] = [], []
  for _ in range(REPEATS):
    for kept, act in zip(times, (with_checks, without)):
      began = time.perf_counter()
      act()
      kept.append(time.perf_counter() - began)
  return tuple(map(statistics.median, times))


def token_cache(folder: pathlib.Path) -> tuple:
  """A split of a hundred million tokens, read once as an epoch does."""
  path = folder / "tokens.npy"
  np.save(path, np.random.default_rng(0).integers(0, 50_000, 100_000_000, np.uint16))

  def read(check):
    if check:
      records.file_checksum(path)
    tokens = np.lib.format.open_memmap(path, mode="r")
    return int(tokens.sum(dtype=np.int64))

  return compared(lambda: read(True), lambda: read(False))


def table_file(folder: pathlib.Path) -> tuple:
  """A compact file of 50,257 tokens in 768 dimensions, opened and unpacked."""
  draw = np.random.default_rng(0)
  data = draw.integers(0, 256, 50_257 * 96, np.uint8)
  values = draw.standard_normal((96, 256, 8), np.float32)
  shape = {"vocab": 50_257, "dim": 768, "codes": 256, "subspaces": 96, "additive": False}
  CompactEmbedding(data, values, **shape).save(folder / "x.safetensors")

  def read(check):
    return open_table(folder / "x.safetensors", verify=check)[np.arange(5000)]

  return compared(lambda: read(True), lambda: read(False))


def state() -> TrainState:
  """A state of 25 million parameters with their moments: 300 MB."""
  params = {"w": jax.random.normal(jax.random.key(0), (25_000, 1000))}
  fresh = optax.adamw(1.0).init(params)
  # Moments of zero would be compressed to nothing.
  noise = lambda x: x + jax.random.normal(jax.random.key(1), x.shape) if x.ndim else x
  return TrainState(jnp.int32(0), params, {}, jax.tree.map(noise, fresh))


def save(folder: pathlib.Path) -> tuple:
  """A checkpoint, from its start until it is on the disk."""
  made, number = state(), iter(range(1, 1000))
  kept = checkpoint.Checkpoints(folder / "saved", keep=1)
  zeros = jnp.zeros(len(jax.tree.leaves(made)), jnp.uint32)

  def write():
    kept.save(made.replace(step=jnp.int32(next(number))), {})
    kept.wait()

  def write_without():
    with (
      mock.patch.object(checkpoint, "state_checksums", return_value=zeros),
      mock.patch.object(records, "sealed", lambda value, previous="": value),
    ):
      write()

  write()
  found = compared(write, write_without)
  kept.close()
  return found


def restore(folder: pathlib.Path) -> tuple:
  """The same checkpoint, read by a new process: the reading only."""
  made = state()
  kept = checkpoint.Checkpoints(folder / "restored", keep=1)
  kept.save(made.replace(step=jnp.int32(1)), {})
  kept.close()
  opened = checkpoint.Checkpoints(folder / "restored", keep=1)
  state_checksums(made)

  def read_without():
    with (
      mock.patch.object(checkpoint, "_check_sums"),
      mock.patch.object(checkpoint, "state_checksums"),
    ):
      opened.restore(made)

  opened.restore(made)
  return compared(lambda: opened.restore(made), read_without)


def rows(folder: pathlib.Path) -> tuple:
  """A thousand rows of metrics."""
  row = {"step": 1, "loss": 1.234567, "grad_norm": 0.1234567, "learning_rate": 1e-3}
  made = log.MetricsLog(folder, 0)
  made._events = mock.Mock()  # TensorBoard's are the same in both

  def write_without():
    for _ in range(1000):
      made._file.write(json.dumps(row, allow_nan=False) + "\n")
      made._file.flush()

  return compared(lambda: [made.write(row) for _ in range(1000)], write_without)


@contextlib.contextmanager
def timed(checks: dict[str, list[tuple[Any, str]]]) -> Iterator[Counter]:
  """The seconds that these functions take, by kind; threads that run at once count each."""
  seconds: Counter = Counter()

  def wrapped(kind: str, function: Callable) -> Callable:
    def call(*arguments: Any, **named: Any) -> Any:
      began = time.perf_counter()
      try:
        return function(*arguments, **named)
      finally:
        seconds[kind] += time.perf_counter() - began

    return call

  with contextlib.ExitStack() as stack:
    for kind, functions in checks.items():
      for module, name in functions:
        own = wrapped(kind, getattr(module, name))
        stack.enter_context(mock.patch.object(module, name, own))
    yield seconds


def large_model(folder: pathlib.Path) -> pathlib.Path:
  """A model of 0.5 GB in safetensors."""
  config = {"model_type": "llama", "vocab_size": 32_768, "hidden_size": 1024}
  config |= {"intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
  config |= {"max_position_embeddings": 512}
  model = families.decoder_of(config)
  tokens, draw = jnp.zeros((1, 1), jnp.int32), np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
  variables = jax.tree.map(lambda x: draw.standard_normal(x.shape, np.float32), shapes)
  checkpoints.save(folder / "model", model, variables)
  return folder / "model"


def of_model(path: pathlib.Path) -> None:
  """Print a row: seconds of loading and saving a model, and of the checks in them."""
  loads, saves = [], []
  for number in range(4):
    with timed(CHECKS) as checks:
      began = time.perf_counter()
      loaded = jax.block_until_ready(checkpoints.load(path))
      loads.append((time.perf_counter() - began, dict(checks)))
    crc = {"checksums": [(tensor_files.zlib, "crc32")]}
    with tempfile.TemporaryDirectory() as name, timed(crc) as checks:
      began = time.perf_counter()
      checkpoints.save(pathlib.Path(name) / f"{number}", *loaded)
      saves.append((time.perf_counter() - began, dict(checks)))
  # The first of each compiles.
  load, checks = min(loads[1:], key=lambda run: run[0])
  save, crc = min(saves[1:], key=lambda run: run[0])
  share = lambda part, whole: f"{part:.4f} ({100 * part / whole:.1f} %)"
  cells = [f"{load:.2f}", *(share(checks.get(kind, 0.0), load) for kind in CHECKS)]
  cells += [f"{save:.2f}", share(crc.get("checksums", 0.0), save)]
  print(f"| {path.name} | {' | '.join(cells)} |")


def main() -> None:
  """Print Markdown tables: of the checks of models, and without arguments of all checksums."""
  logging.getLogger("absl").setLevel(logging.CRITICAL)
  kinds = ", s | ".join(CHECKS)
  print(f"| model | load, s | {kinds}, s | save, s | checksums, s |\n|---|{'---:|' * 6}")
  with tempfile.TemporaryDirectory() as name:
    for path in [*map(pathlib.Path, sys.argv[1:]), large_model(pathlib.Path(name))]:
      of_model(path)
  if sys.argv[1:]:
    return
  print("| | with checks, s | without, s | difference |\n|---|---:|---:|---:|")
  for measure in (token_cache, table_file, save, restore, rows):
    with tempfile.TemporaryDirectory() as name:
      (pathlib.Path(name) / "saved").mkdir()
      (pathlib.Path(name) / "restored").mkdir()
      checked, plain = measure(pathlib.Path(name))
    what = measure.__doc__.rstrip(".")
    share = f"{checked - plain:.4f} s, {100 * (checked / plain - 1):.0f} %"
    print(f"| {what} | {checked:.4f} | {plain:.4f} | {share} |")


if __name__ == "__main__":
  main()
