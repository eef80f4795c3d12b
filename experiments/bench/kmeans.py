"""How do time, inertia and memory of k-means compare with scikit-learn's, on the same cores?

python -m experiments.bench.kmeans
python -m experiments.bench.kmeans --points 60000 --json kmeans.json
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans as SklearnKMeans

from experiments.bench import benching
from experiments.bench.process import measured
from experiments.plan.apart import apart
from vqjax.lab.training.provenance import device, provenance
from vqjax.ops.kmeans import kmeans

ITERATIONS = 20
BLOCK = 4096
COMPONENTS = 4
"""Components of the mixture, per cluster: as with words, there are more kinds than codes."""


class Size(NamedTuple):
  """N points, D their width, K clusters."""

  points: int
  dim: int
  clusters: int

  def __str__(self) -> str:
    return f"N={self.points} D={self.dim} K={self.clusters}"


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  parser = benching.parser("experiments.bench.kmeans", __doc__.splitlines()[0])
  parser.add_argument("--points", type=int, default=267_735, help="rows of the table")
  options = parser.parse_args(arguments)
  size = Size(509, 16, 31) if options.quick else Size(options.points, 768, 1024)
  figures = {"size": size._asdict(), "data": {}, "provenance": provenance()}
  for draw in (mixture, gaussian):
    figures["data"][draw.__name__] = against_sklearn(size, draw)
    benching.write(options.json, figures)  # a fit takes minutes: what is there is kept
  return 0


def against_sklearn(size: Size, draw: Callable[[Size], np.ndarray]) -> dict:
  """Prints both fits of one table, each in a fresh process, and ours relative to theirs.

  Memory is what the process had at its peak beyond what it had when the fit began.
  """
  rows = {"scikit-learn": apart(fit_sklearn, size, draw), "vqjax": apart(fit_vqjax, size, draw)}
  theirs, ours = rows.values()
  compared = ("seconds", "cpu_seconds", "inertia", "memory_bytes")
  ratios = {name: _ratio(ours[name], theirs[name]) for name in compared}
  benching.show(
    f"k-means of a {draw.__name__}, {ITERATIONS} iterations, {size} float32, {device()}",
    ("", "s", "CPU s", "inertia", "MiB beyond the input"),
    [
      *(_cells(name, row) for name, row in rows.items()),
      ["vqjax / scikit-learn", *map(_shown, ratios.values())],
    ],
  )
  benching.say(
    f"compiled before in {ours['compile_seconds']:.1f} s; by the compiler's account"
    f" {benching.mib(ours['compiler_bytes'])} MiB"
  )
  return {"rows": rows, "ratios": ratios}


def _ratio(ours: float | None, theirs: float | None) -> float | None:
  return None if ours is None or theirs is None else ours / max(theirs, 1e-9)


def _shown(ratio: float | None) -> str:
  return "—" if ratio is None else f"{ratio:.4f}"


def _cells(name: str, row: dict) -> list[str]:
  times = (f"{row[key]:.2f}" for key in ("seconds", "cpu_seconds"))
  return [name, *times, f"{row['inertia']:.6g}", benching.mib(row["memory_bytes"])]


def fit_sklearn(size: Size, draw: Callable[[Size], np.ndarray]) -> dict:
  """Cost of scikit-learn's Lloyd."""
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
  cost = measured(lambda: model.fit(points))
  return cost | {"inertia": float(model.inertia_)}


def fit_vqjax(size: Size, draw: Callable[[Size], np.ndarray]) -> dict:
  """Cost of ours, with the compiler's account of temporaries and results."""
  points = jnp.asarray(draw(size))
  fit = jax.jit(functools.partial(kmeans, clusters=size.clusters, iterations=ITERATIONS))
  start = time.perf_counter()
  compiled = fit.lower(jax.random.key(0), points).compile()
  compile_seconds = time.perf_counter() - start
  found = []
  cost = measured(lambda: found.append(jax.block_until_ready(compiled(jax.random.key(0), points))))
  memory = compiled.memory_analysis()
  return cost | {
    "inertia": float(found[0].inertia),
    "compiler_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
    "compile_seconds": compile_seconds,
  }


def gaussian(size: Size) -> np.ndarray:
  """Points without structure, of unit variance."""
  return _filled(size, lambda draw, block: draw.standard_normal(block.shape, np.float32, block))


def mixture(size: Size) -> np.ndarray:
  """Points of unit variance, half of it noise around centers whose sizes follow Zipf's law."""
  count = COMPONENTS * size.clusters
  centers = np.random.default_rng(1).standard_normal((count, size.dim), np.float32)
  share = 1 / np.arange(1, count + 1)

  def fill(draw, block):
    draw.standard_normal(block.shape, np.float32, block)
    block += centers[draw.choice(count, len(block), p=share / share.sum())]
    block *= np.float32(0.5**0.5)

  return _filled(size, fill)


def _filled(size, fill):
  """A table filled a block at a time: a temporary copy would hide the peak of what comes after."""
  draw, points = np.random.default_rng(0), np.empty((size.points, size.dim), np.float32)
  for start in range(0, size.points, BLOCK):
    fill(draw, points[start : start + BLOCK])
  return points


if __name__ == "__main__":
  sys.exit(main())
