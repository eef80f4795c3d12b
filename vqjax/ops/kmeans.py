"""k-means clustering of weighted points, and nearest centers.

Lloyd's algorithm follows a seeding that reads the points a few times instead of K times: k-means||
draws points by their cost in each of a few passes, and weighted k-means++ picks the seeds among
them. Every pass takes the points in chunks, scores a chunk by one matrix product and adds it to the
sums of its clusters, so that [N, K] never exists and the points are never copied.
"""

# One pass over the points does all of the work, and everything else is a use of it:
#
#   _assign    for each chunk: product with the centers, arg min, sums and masses of the clusters
#   _seeds     5 times: draw candidates by the cost of points, and pass with them as centers; then
#              `_plus_plus` picks K of all candidates, which have the mass of their points
#   _lloyd     passes until nothing changes
#
# With `sample` both take a few drawn points first, and `_lloyd` then all of them, twice.
#
# Over a mesh axis each device passes over its own points; sums of clusters and candidates travel.

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vqjax.ops import symbolic, topk, vocab_parallel
from vqjax.ops.tiles import default_tile, edge
from vqjax.ops.vocab_parallel import Sharded, own_promotion, varying
from vqjax.types import MeshAxes

__all__ = ["KMeansResult", "kmeans", "nearest_centers"]

# Passes over the points of the seeding, and candidates that each pass draws for every cluster.
_PASSES, _DRAWS = 5, 2


class KMeansResult(NamedTuple):
  """Clusters of points.

  Attributes:
    centers: weighted means of the clusters' points, float32.
    assignment: nearest center of each point, int32; the lowest of equally near ones.
    inertia: sum over points of weight times squared distance to its center.
  """

  centers: Float[Array, "K D"]
  assignment: Int[Array, "N"]
  inertia: Float[Array, ""]


@own_promotion
def kmeans(
  key: PRNGKeyArray,
  points: Float[Array, "N D"],
  clusters: int,
  *,
  weights: Float[Array, "N"] | None = None,
  iterations: int = 20,
  chunk: int | None = None,
  axis: MeshAxes | None = None,
  sample: int | None = None,
) -> KMeansResult:
  """k-means clusters by Lloyd's iterations from k-means|| seeds.

  The objective is sum_i w_i |x_i - c_a(i)|². Equal keys give equal clusters, on any number of
  devices up to the order of float32 sums. A cluster without weight moves to one of the points of
  highest cost; it can stay empty if fewer than `clusters` points are distinct. Iterations end early
  when one changes nothing. Sources: Lloyd 1982; Bahmani et al. 2012, Algorithm 2, with draws of a
  fixed number without replacement; Arthur and Vassilvitskii 2007, with the best of 2 + floor(ln K)
  draws at each step.

  Args:
    key: random key of the seeding.
    points: rows of any float type; sums and distances are computed in float32.
    clusters: K, at most N.
    weights: weight of each point, at least 0; None: 1.
    iterations: largest number of updates of the centers.
    chunk: number of points that are scored at once; None: that of `default_tile`.
    axis: axis of the mesh in context over which the points are sharded, or a tuple of several.
    sample: points for each cluster, drawn by weight, from which the centers are learned; all points
      are read in two last updates. None, or fewer points, or an axis: the centers are learned from
      all points.

  Raises:
    ValueError: `clusters` is not in [1, N], `iterations` is negative, `chunk` is below 1, or,
      outside of jit, a point or a weight is not finite, a weight is negative or all are zero.
  """
  _check_sizes(points.shape[0], clusters, iterations, chunk)
  _check_rows("points", points, "Remove such rows or set them to 0.")
  if weights is None:
    weights = jnp.ones(points.shape[0], jnp.float32)
  _check_weights(weights)
  if sample is not None and (axis is not None or points.shape[0] <= sample * clusters):
    sample = None
  return _kmeans(key, points, weights, clusters, iterations, chunk, axis, sample)


@own_promotion
@symbolic.for_any_batch("points")
def nearest_centers(
  points: Float[Array, "N D"], centers: Float[Array, "K D"], *, chunk: int | None = None
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
  """Nearest center of each point, the lowest of ties, and its squared distance.

  Raises:
    ValueError: there is no center, or `chunk` is below 1.
  """
  _check_sizes(max(1, centers.shape[0]), centers.shape[0], 0, chunk)
  if points.shape[0] == 0:
    return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32)
  return _nearest(points, centers, chunk)


@functools.partial(jax.jit, static_argnames="chunk")
def _nearest(points, centers, chunk):
  centers = centers.astype(jnp.float32)
  data = _Data(points, jnp.ones(points.shape[0], jnp.float32), centers.mean(axis=0), chunk, None)
  assigned = _assign(data, centers - data.shift)
  return assigned.assignment, assigned.cost


@functools.partial(jax.jit, static_argnames=("clusters", "iterations", "chunk", "axis", "sample"))
def _kmeans(key, points, weights, clusters, iterations, chunk, axis, sample):
  n = points.shape[0]
  noise_key, seed_key = random.split(key)
  # Drawn for all points at once, so that a point has equal noise on any number of devices.
  noise_NP = random.gumbel(noise_key, (n, _PASSES), jnp.float32)
  rows = (Sharded(points, 0), Sharded(weights.astype(jnp.float32), 0), Sharded(noise_NP, 0))

  def body(rows, key):
    points, weights, noise_NP = rows
    here = vocab_parallel.inside(axis)
    data = _Data(points, weights, jnp.zeros(points.shape[1], jnp.float32), chunk, here)
    # Distances of points far from the origin would cancel: all is computed relative to the mean,
    # which is the center of a single cluster.
    data = data._replace(shift=_means(data, _assign(data, data.shift[None]))[0][0])
    if sample is None:
      centers = _lloyd(data, _seeds(key, data, noise_NP, clusters), iterations)
    else:
      key, draw_key = random.split(key)
      drawn = data.drawn(draw_key, sample * clusters)
      seeds = _seeds(key, drawn, noise_NP[: len(drawn.points)], clusters)
      centers = _lloyd(data, _lloyd(drawn, seeds, iterations), 2)
    assigned = _assign(data, centers)
    inertia = _total((weights * assigned.cost).sum(), here)
    assignment = assigned.assignment
    if here is not None:
      assignment = vocab_parallel.gathered(assignment, here).reshape(-1)[:n]
    return KMeansResult(centers + data.shift, assignment, inertia)

  return vocab_parallel.over_vocabulary(axis, body, rows, seed_key)


class _Data(NamedTuple):
  """The points of this device, relative to `shift` for precision."""

  points: Array
  weights: Array
  shift: Array
  chunk: int | None
  axis: MeshAxes | None

  def rows(self, index: Array) -> Array:
    """Points of all devices with the given indices."""
    return (
      vocab_parallel.sharded_lookup(self.points, index, self.axis, jnp.dtype(jnp.float32))
      - self.shift
    )

  def drawn(self, key: Array, count: int) -> "_Data":
    """Points of weight 1 by their weight: a heavy one may be drawn several times."""
    order_key, offset_key = random.split(key)
    order_N = random.permutation(order_key, self.points.shape[0])
    upto_N = jnp.cumsum(self.weights[order_N])
    # At equal distances, so that no point of mean weight is drawn twice or missed for long.
    at = (random.uniform(offset_key) + jnp.arange(count)) / count * upto_N[-1]
    rows = order_N[jnp.minimum(jnp.searchsorted(upto_N, at, side="right"), len(order_N) - 1)]
    return self._replace(points=self.points[rows], weights=jnp.ones(count, jnp.float32))


class _Assigned(NamedTuple):
  """Result of a pass: center and cost of each point, sum and weight of each cluster."""

  assignment: Array
  cost: Array
  sums: Array
  mass: Array


def _assign(data: _Data, centers_KD: Array) -> _Assigned:
  """Nearest center of each point of this device, and sums of each cluster."""
  (n, d), k = data.points.shape, centers_KD.shape[0]
  here = vocab_parallel.devices()
  size = min(data.chunk or default_tile(n, k, here.platform, here.count).tokens, n)
  # |x - c|² / 2 without |x|² / 2, which all centers share.
  half_K = 0.5 * jnp.square(centers_KD).sum(axis=1)

  def step(total, index):
    start, fresh_n = edge(index, size, n)
    part = lambda x: lax.dynamic_slice_in_dim(x, start, size)
    rows_nD = part(data.points).astype(jnp.float32) - data.shift
    # The last chunk overlaps the one before, whose points have been added already.
    weights_n = jnp.where(fresh_n, part(data.weights), 0)
    # The default precision of a GPU or TPU would confuse centers that are near each other.
    product_nK = jnp.matmul(rows_nD, centers_KD.T, precision=lax.Precision.HIGHEST)
    # Two minima are vectors' work on a CPU, where an arg min takes three times as long.
    far_nK = half_K - product_nK
    is_least_nK = far_nK == far_nK.min(axis=1, keepdims=True)
    code_n = jnp.where(is_least_nK, jnp.arange(k, dtype=jnp.int32), k - 1).min(axis=1)
    # Not from the product, whose terms cancel for a point near its center.
    cost_n = jnp.square(rows_nD - centers_KD[code_n]).sum(axis=1)
    put = lambda whole, x: lax.dynamic_update_slice_in_dim(whole, x, start, axis=0)
    return _Assigned(
      put(total.assignment, code_n),
      put(total.cost, cost_n),
      total.sums.at[code_n].add(weights_n[:, None] * rows_nD),
      total.mass.at[code_n].add(weights_n),
    ), None

  zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
  empty = _Assigned(jnp.zeros(n, jnp.int32), zeros(n), zeros(k, d), zeros(k))
  empty = varying((empty, data.points, data.weights))[0]
  return lax.scan(step, empty, jnp.arange(-(-n // size), dtype=jnp.int32))[0]


def _total(value: Any, axis: MeshAxes | None) -> Any:
  return value if axis is None else lax.psum(value, axis)


def _means(data: _Data, assigned: _Assigned) -> tuple[Array, Array]:
  """Means of the clusters over all devices, and a mask of clusters without weight."""
  sums_KD, mass_K = _total((assigned.sums, assigned.mass), data.axis)
  empty_K = mass_K == 0
  return sums_KD / jnp.where(empty_K, 1, mass_K)[:, None], empty_K


def _lloyd(data: _Data, centers_KD: Array, iterations: int) -> Array:
  """The centers after at most `iterations` updates; fewer if one changes nothing."""

  def update(state):
    index, old_KD, _ = state
    assigned = _assign(data, old_KD)
    means_KD, empty_K = _means(data, assigned)
    reseed = lambda: _reseeded(
      data, assigned.cost, jnp.where(empty_K[:, None], old_KD, means_KD), empty_K
    )
    new_KD = lax.cond(empty_K.any(), reseed, lambda: means_KD)
    return index + 1, new_KD, (new_KD != old_KD).any()

  goes_on = lambda state: (state[0] < iterations) & state[2]
  return lax.while_loop(goes_on, update, (0, centers_KD, True))[1]


def _reseeded(data: _Data, cost_N: Array, centers_KD: Array, empty_K: Array) -> Array:
  """The centers, the j-th empty one moved to the point of j-th highest cost above 0."""
  # One top-k serves all empty clusters; points at a center (cost 0) would only split a cluster of
  # equal points.
  best = _best(data, data.weights * cost_N, centers_KD.shape[0])
  rank_K = jnp.minimum(jnp.cumsum(empty_K) - 1, best.tokens.shape[0] - 1)
  use_K = empty_K & (best.scores > 0)[rank_K]
  return jnp.where(use_K[:, None], data.rows(jnp.maximum(best.tokens, 0)[rank_K]), centers_KD)


def _best(data: _Data, scores_N: Array, k: int) -> topk.TopK:
  """The k highest scores of the points of all devices, and their indices."""
  n = scores_N.shape[0]
  names_N = vocab_parallel.first_row(data.axis, n) + jnp.arange(n, dtype=jnp.int32)
  best = varying((topk.empty((), k), scores_N))[0]
  return topk.across_devices(topk.merge(best, scores_N, names_N), data.axis)


def _seeds(key: Array, data: _Data, noise_NP: Array, clusters: int) -> Array:
  """K of the points, chosen by weighted k-means++ from k-means|| candidates."""
  n = data.points.shape[0]
  draws = min(vocab_parallel.rows_in_all(data.axis, n), max(64, _DRAWS * clusters))

  def draw(state, noise_and_index):
    code_N, cost_N = state
    noise_N, index = noise_and_index
    # The largest values of log p + Gumbel noise are draws from p without replacement.
    scores_N = jnp.log(_pull(data.weights, cost_N)) + noise_N
    rows = data.rows(jnp.maximum(_best(data, scores_N, draws).tokens, 0))
    assigned = _assign(data, rows)
    closer_N = assigned.cost < cost_N
    code_N = jnp.where(closer_N, assigned.assignment + index * draws, code_N)
    return (code_N, jnp.where(closer_N, assigned.cost, cost_N)), rows

  start = (jnp.zeros(n, jnp.int32), jnp.full(n, jnp.inf, jnp.float32))
  start = varying((start, data.points))[0]
  steps = (noise_NP.T, jnp.arange(_PASSES, dtype=jnp.int32))
  (code_N, cost_N), rows = lax.scan(draw, start, steps)
  zeros = varying((jnp.zeros(_PASSES * draws, jnp.float32), code_N))[0]
  sums = zeros.at[code_N].add(data.weights), zeros.at[code_N].add(data.weights * cost_N)
  mass_C, cost_C = _total(sums, data.axis)
  rows_CD = rows.reshape(_PASSES * draws, -1)
  own_C = cost_C / jnp.where(mass_C > 0, mass_C, 1)
  return rows_CD[_plus_plus(key, rows_CD, mass_C, own_C, clusters)]


def _pull(weights: Array, cost: Array) -> Array:
  """Sampling weights: weight times cost, or the weight before the first center."""
  return weights * jnp.where(jnp.isinf(cost), 1, cost)


def _plus_plus(key: Array, rows_CD: Array, mass_C: Array, own_C: Array, clusters: int) -> Array:
  """Indices of K rows, each the best of a few draws by weighted cost.

  A candidate represents points of weight `mass_C`, whose mean cost is `own_C` even with a seed at
  the candidate; no seed is assumed to reduce it further. Otherwise a second seed among many similar
  points that are far apart, as in a space of many dimensions, would seem to remove all their cost.
  """
  # Trials of greedy k-means++, as many as scikit-learn makes.
  count, tries = rows_CD.shape[0], 2 + int(math.log(clusters))
  norm_C = jnp.square(rows_CD).sum(axis=1)

  def pick(cost_C, index):
    at_t = random.choice(random.fold_in(key, index), count, (tries,), p=_pull(mass_C, cost_C))
    product_tC = jnp.matmul(rows_CD[at_t], rows_CD.T, precision=lax.Precision.HIGHEST)
    apart_tC = jnp.maximum(norm_C[at_t][:, None] + norm_C - 2 * product_tC, 0)
    # Exactly 0 to itself, or a chosen candidate could be chosen again for its rounding error.
    apart_tC = jnp.where(at_t[:, None] == jnp.arange(count), 0, apart_tC)
    cost_tC = jnp.minimum(cost_C, jnp.maximum(apart_tC, own_C))
    best = jnp.argmin(cost_tC @ mass_C)
    return cost_tC[best], at_t[best]

  start = jnp.full(count, jnp.inf, jnp.float32)
  return lax.scan(pick, start, jnp.arange(clusters, dtype=jnp.int32))[1]


def _check_sizes(n: int, clusters: int, iterations: int, chunk: int | None) -> None:
  if n < 1:
    raise ValueError("`points` must have at least 1 row; got 0. Give the vectors to cluster.")
  if clusters < 1:
    raise ValueError(f"`clusters` must be at least 1; got {clusters}. Give the number of centers.")
  if clusters > n:
    raise ValueError(
      f"`clusters` must be at most {n}, the number of points; got {clusters}. Give fewer."
    )
  if iterations < 0:
    raise ValueError(f"`iterations` must be at least 0; got {iterations}. 0 returns the seeds.")
  if chunk is not None and chunk < 1:
    raise ValueError(f"`chunk` must be at least 1; got {chunk}. None suits the device.")


_finite = jax.jit(lambda rows: jnp.isfinite(rows).reshape(rows.shape[0], -1).all(axis=1))


def _check_rows(name: str, rows: Array, remedy: str) -> None:
  if isinstance(rows, jax.core.Tracer):
    return
  bad = np.flatnonzero(~np.asarray(_finite(rows)))
  if bad.size:
    raise ValueError(
      f"`{name}` must be finite; got {bad.size} of {rows.shape[0]} that are not, first {bad[0]}."
      f" {remedy}"
    )


def _check_weights(weights: Array) -> None:
  if isinstance(weights, jax.core.Tracer):
    return
  _check_rows("weights", weights, "Give finite numbers.")
  values = np.asarray(weights, np.float32)
  if values.min() < 0:
    first = int(np.argmax(values < 0))
    raise ValueError(
      f"`weights` must be at least 0; got {values[first]} for point {first}. Give 0 to ignore it."
    )
  if not values.any():
    raise ValueError(
      "`weights` must not all be 0; got no point with a weight. Give some point one."
    )
