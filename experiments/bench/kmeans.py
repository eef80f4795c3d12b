"""Benchmark of k-means against scikit-learn on the same cores."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import measure
from experiments.plan.isolated import isolated
from vqjax.lab.report.units import MISSING
from vqjax.lab.training.provenance import device
from vqjax.ops.kmeans import kmeans

ITERATIONS = 20
BLOCK = 4096
COMPONENTS = 4
"""Components of the mixture per cluster: words, too, have more kinds than there are codes."""


class PointsShape(NamedTuple):
  """Sizes of a fit: N points of width D, K clusters."""

  points: int
  dim: int
  clusters: int

  def __str__(self) -> str:
    return f"N={self.points} D={self.dim} K={self.clusters}"


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Fit two tables with both libraries, each fit in a process of its own."""
  size = PointsShape(509, 16, 31) if quick else PointsShape(267_735, 768, 1024)
  figures = {"size": size._asdict(), "data": {}}
  for draw in (mixture,) if quick else (mixture, gaussian):
    figures["data"][draw.__name__] = against_sklearn(size, draw)
    yield figures


def against_sklearn(size: PointsShape, draw: Callable[[PointsShape], np.ndarray]) -> dict:
  """Print and return the cost of both fits of a table, and their ratios.

  Memory is the peak of the process beyond its memory before the fit.
  """
  rows = {
    "scikit-learn": isolated(fit_sklearn, size, draw),
    "vqjax": isolated(fit_vqjax, size, draw),
  }
  theirs, ours = rows.values()
  compared = ("seconds", "cpu_seconds", "inertia", "memory_bytes")
  # Memory is None on systems that do not report its peak.
  known = [name for name in compared if None not in (ours[name], theirs[name])]
  ratios = {name: ours[name] / max(theirs[name], 1e-9) for name in known}
  cells = lambda name, row: [
    name,
    *(f"{row[key]:.2f}" for key in ("seconds", "cpu_seconds")),
    f"{row['inertia']:.6g}",
    measure.mib(row["memory_bytes"]),
  ]
  measure.show_rows(
    f"k-means of a {draw.__name__}, {ITERATIONS} iterations, {size} float32, {device()}",
    ("", "s", "CPU s", "inertia", "MiB beyond the input"),
    [
      *(cells(name, row) for name, row in rows.items()),
      ["vqjax / scikit-learn", *(f"{ratios[n]:.4f}" if n in ratios else MISSING for n in compared)],
    ],
  )
  measure.say(
    f"compiled before in {ours['compile_seconds']:.1f} s; by the compiler's account"
    f" {measure.mib(ours['compiler_bytes'])} MiB"
  )
  return {"rows": rows, "ratios": ratios}


def fit_sklearn(size: PointsShape, draw: Callable[[PointsShape], np.ndarray]) -> dict:
  """Cost of scikit-learn's Lloyd iterations."""
  from sklearn.cluster import KMeans as SklearnKMeans

  points = draw(size)
  model = SklearnKMeans(
    size.clusters,
    init="k-means++",
    n_init=1,
    max_iter=ITERATIONS,
    tol=0,
    algorithm="lloyd",
    random_state=0,
  )
  cost = measure.process_cost(lambda: model.fit(points))
  return cost | {"inertia": float(model.inertia_)}


def fit_vqjax(size: PointsShape, draw: Callable[[PointsShape], np.ndarray]) -> dict:
  """Cost of `vqjax.ops.kmeans`, with the compiler's account of memory."""
  points = jnp.asarray(draw(size))
  fit = jax.jit(functools.partial(kmeans, clusters=size.clusters, iterations=ITERATIONS))
  start = time.perf_counter()
  compiled = fit.lower(jax.random.key(0), points).compile()
  compile_seconds = time.perf_counter() - start
  results = []
  cost = measure.process_cost(
    lambda: results.append(jax.block_until_ready(compiled(jax.random.key(0), points)))
  )
  memory = compiled.memory_analysis()
  return cost | {
    "inertia": float(results[0].inertia),
    "compiler_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
    "compile_seconds": compile_seconds,
  }


def gaussian(size: PointsShape) -> np.ndarray:
  """Normal points of unit variance, without clusters."""
  return _filled(size, lambda draw, block: draw.standard_normal(block.shape, np.float32, block))


def mixture(size: PointsShape) -> np.ndarray:
  """Points around centers with sizes by Zipf's law; half of the variance is noise."""
  count = COMPONENTS * size.clusters
  centers = np.random.default_rng(1).standard_normal((count, size.dim), np.float32)
  share = 1 / np.arange(1, count + 1)

  def fill(draw, block):
    draw.standard_normal(block.shape, np.float32, block)
    block += centers[draw.choice(count, len(block), p=share / share.sum())]
    block *= np.float32(0.5**0.5)

  return _filled(size, fill)


def _filled(size, fill):
  """A table filled in blocks: a temporary copy would hide the peak of the fit."""
  draw, points = np.random.default_rng(0), np.empty((size.points, size.dim), np.float32)
  for start in range(0, size.points, BLOCK):
    fill(draw, points[start : start + BLOCK])
  return points
