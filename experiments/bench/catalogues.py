"""Catalogues of a million items with Zipf counts: what every head needs of a process's memory."""

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

import vqjax
from experiments.bench import measure
from experiments.plan.isolated import isolated
from vqjax import assign
from vqjax.assign import trees
from vqjax.heads.unigram import UnigramProposal

ITEMS, DIM, TOKENS = 1_000_000, 128, 256
MOST_BYTES = 4 * 10**9
"""Memory in which each head must do all of it."""


def counts(items: int) -> np.ndarray:
  """Counts of items by Zipf's law with exponent 1.1, the most frequent first."""
  return np.maximum(1e9 / np.arange(1, items + 1) ** 1.1, 1).astype(np.int64)


_FEW = assign.FrequentAlone()

HEADS: dict[str, Callable[[int], vqjax.Head]] = {
  "dense": lambda v: vqjax.DenseHead(v, DIM),
  "sampled": lambda v: vqjax.SampledSoftmaxHead(
    v, DIM, samples=min(v, 8192), proposal=UnigramProposal(counts(v))
  ),
  "codebook": lambda v: vqjax.CodebookHead(v, DIM, 1024, _FEW, token_bias=True),
  "learned codebook": lambda v: vqjax.LearnedCodebookHead(v, DIM, 1024, 4),
  "residual codebook": lambda v: vqjax.ResidualCodebookHead(v, DIM, 1024, 16, _FEW),
  "product": lambda v: vqjax.ProductHead(v, DIM, 256, 16),
  "learned product": lambda v: vqjax.LearnedProductHead(v, DIM, 256, 16),
  "DPQ": lambda v: vqjax.DPQHead(v, DIM, vqjax.SoftmaxQuantizer(256, 16)),
  "grouped": lambda v: vqjax.GroupedHead(v, DIM),
  "unshared grouped": lambda v: vqjax.UnsharedGroupedHead(v, DIM),
  "adaptive": lambda v: vqjax.AdaptiveHead(v, DIM, (v // 50, v // 5)),
  "low rank": lambda v: vqjax.LowRankHead(v, DIM, 32),
  "mixture": lambda v: vqjax.MixtureHead(v, DIM, 4),
  "packed": lambda v: vqjax.PackedHead(v, DIM),
  "certified": lambda v: vqjax.CertifiedHead(v, DIM),
  "routed": lambda v: vqjax.RoutedHead(v, DIM, clusters=1024, budget=32),
  "class based": lambda v: vqjax.ClassBasedHead(v, DIM, 1024, _FEW),
  "hierarchical": lambda v: vqjax.HierarchicalHead(v, DIM, trees.Huffman(counts(v))),
}


def measured(name: str, items: int) -> dict[str, float]:
  """Seconds of each task, compilation included, and the peak of the process in bytes.

  Raises:
    ValueError: a loss or gradient is not finite, a result is no item, or a saved head scores
      otherwise once it is loaded.
  """
  head, seconds = HEADS[name](items), {}
  random, share = np.random.default_rng(0), counts(items) / counts(items).sum()
  tokens = random.choice(items, TOKENS, p=share).astype(np.int32)
  hidden = random.standard_normal((TOKENS, DIM), np.float32)

  def timed(task, call):
    start = time.perf_counter()
    found = jax.block_until_ready(call())
    seconds[task] = time.perf_counter() - start
    return found

  run = lambda method, *static: jax.jit(
    lambda v, *given: head.apply(v, *given, *static, method=method)
  )
  init = jax.jit(lambda: head.init(jax.random.key(0), hidden[:1]))
  variables = timed("init", init)
  tables = {kind: tree for kind, tree in variables.items() if kind != "params"}

  def loss(params, tables, hidden, tokens):
    return -head.apply({"params": params, **tables}, hidden, tokens, method="log_prob").mean()

  both = jax.jit(jax.value_and_grad(loss))
  value, gradient = timed(
    "loss and gradient", lambda: both(variables["params"], tables, hidden, tokens)
  )
  finite = all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradient)))
  del gradient
  drawn = timed("sample", lambda: run("sample")(variables, hidden[:64], jax.random.key(1)))
  _, best = timed("top-k", lambda: run("top_k", 10)(variables, hidden[:64]))
  log_prob = run("log_prob")(variables, hidden[:64], tokens[:64])
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "head.safetensors"
    flat = flatten_dict(variables, sep="/")
    timed("save", lambda: save_file({key: np.asarray(x) for key, x in flat.items()}, file))
    del variables, flat
    loaded = timed("load", lambda: jax.device_put(unflatten_dict(load_file(file), sep="/")))
  again = run("log_prob")(loaded, hidden[:64], tokens[:64])
  inside = all(((x >= 0) & (x < items)).all() for x in (np.asarray(drawn), np.asarray(best)))
  if not (finite and inside and np.array_equal(log_prob, again)):
    raise ValueError(
      f"`{name}` must have a finite loss, items as results and equal scores once loaded; got loss"
      f" {float(value)}. Look at its hooks."
    )
  return seconds | {"peak_bytes": measure.peak_resident_bytes()}


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Print and return the cost of every head, each in a process of its own."""
  items, rows = 10_000 if quick else ITEMS, {}
  for name in HEADS:
    measure.log(name)
    rows[name] = isolated(measured, name, items)
    yield {"items": items, "rows": rows}
  tasks = [task for task in next(iter(rows.values())) if task != "peak_bytes"]
  measure.show_rows(
    f"{items:,} items, D = {DIM}, {TOKENS:,} tokens; seconds with compilation",
    ("head", *tasks, "peak MiB"),
    [
      [name, *(f"{row[task]:.2f}" for task in tasks), measure.mib(row["peak_bytes"])]
      for name, row in rows.items()
    ],
  )
