"""Variables of compressed embeddings from a trained table [V, D].

`to_levels` and `to_int8` quantise numbers, `to_clusters` quantises rows by k-means, and
`reconstruct` trains any embedding to have the rows of the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vqjax.assign.checks import check_codes
from vqjax.assign.multiple import code_dtype
from vqjax.assign.rows import SAMPLE, product_kmeans, rotated_kmeans
from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import (
  DPQEmbedding,
  Embedding,
  GuidedEmbedding,
  Int8Embedding,
  ProductEmbedding,
  ScalarEmbedding,
)
from vqjax.embeddings.int8 import int8_levels
from vqjax.embeddings.scalar import scalar_levels
from vqjax.ops import product
from vqjax.ops.kmeans import kmeans, nearest_centers
from vqjax.quantizers import CentroidQuantizer, Quantizer

__all__ = [
  "Guide",
  "LearnedCodes",
  "clustered",
  "reconstruct",
  "squared_error",
  "to_clusters",
  "to_int8",
  "to_levels",
]

CHUNK = 200
"""Number of steps of `reconstruct` between two reports of the error."""

ROWS, BINS = 2**12, 2**16
"""Rows that are read at a time, and bins of the histogram that scalar quantisation clusters."""

SWEEPS = 8
"""Passes of coordinate descent over the subspaces, where hidden states weight the error."""


def _check_table(embedding, table):
  if table.shape != (embedding.vocab, embedding.dim):
    raise ValueError(
      f"`table` must have shape {[embedding.vocab, embedding.dim]}, as the embedding; got"
      f" {list(table.shape)}. Give the embedding the table's sizes."
    )
  if not np.isfinite(table).all():
    raise ValueError(
      "`table` must be finite; got nan or infinity. Use an earlier checkpoint of its run."
    )


def to_levels(embedding: ScalarEmbedding, table: Float[np.ndarray, "V D"]) -> Variables:
  """Scalar quantisation: embedding variables with the nearest levels.

  Raises:
    ValueError: the table has another shape than the embedding, or is not finite.
  """
  _check_table(embedding, table)
  levels, low, high = scalar_levels(table, embedding.bits)
  params = {"low": np.float32(low), "high": np.float32(high)}
  return {"params": params, "codes": {"levels": levels}}


def to_int8(embedding: Int8Embedding, table: Float[np.ndarray, "V D"]) -> Variables:
  """Embedding variables with the nearest 8-bit levels, a block of rows at a time.

  Raises:
    ValueError: the table has another shape than the embedding, or is not finite.
  """
  _check_table(embedding, table)
  embedding.check()
  levels, scale = np.empty(table.shape, np.int8), []
  for first in range(0, len(table), ROWS):
    some = slice(first, first + ROWS)
    levels[some], own = int8_levels(table[some], embedding.group)
    scale.append(own)
  return {"params": {"scale": np.concatenate(scale)}, "codes": {"levels": levels}}


def to_clusters(
  embedding: ProductEmbedding,
  table: Float[np.ndarray, "V D"],
  *,
  key: PRNGKeyArray,
  iterations: int = 25,
  weights: Float[np.ndarray, "V"] | None = None,
  second: Float[np.ndarray, "D D"] | None = None,
) -> Variables:
  """Product quantisation: k-means of sub-vectors, joint if codes are shared.

  For an additive embedding it is residual quantisation: each codebook clusters what the codebooks
  before it leave of the rows. With one code for each number and shared values it is scalar
  quantisation with the values of least squared error.

  With `second`, the second moment E[h hᵀ] of the hidden states h that multiply the rows, the error
  is E[(h · (row - approximation))²] instead of the squared distance. Each subspace is clustered in
  the metric of its own block; then codes and values descend on the whole error, one subspace at a
  time. Shared values are clustered by distance, and only the codes descend. With `rotated` it is
  optimised product quantisation, in the metric of `second`, of which nothing has to descend.

  Args:
    embedding: the embedding whose variables are made.
    table: the rows, of any float dtype; a part of the columns at a time is copied to float32.
    key: source of randomness of the initial centroids.
    iterations: maximum number of Lloyd iterations.
    weights: weight of each row's error; None: 1.
    second: a positive definite matrix; None: the identity.

  Raises:
    ValueError: the table has another shape than the embedding, is not finite, or has fewer rows
      than codes; the embedding is shared, and additive or rotated; it is additive, with `second`.
  """
  _check_table(embedding, table)
  embedding.check()
  by_number = embedding.shared and embedding.subspaces == embedding.dim
  if not by_number:
    check_codes(len(table), embedding.codes)
  if (embedding.additive or embedding.rotated) and embedding.shared:
    kind = "rotated" if embedding.rotated else "additive"
    raise ValueError(
      f"`embedding.shared` must be False for clusters of {kind} codes; got True. Give"
      " shared=False, or use `reconstruct`."
    )
  if embedding.additive and second is not None:
    raise ValueError(
      "`second` must be None for clusters of additive codes; got a matrix. Give additive=False."
    )
  subspaces, basis = embedding.subspaces, {}
  keys = jax.random.split(key, subspaces)

  def cluster(key, points, weights=weights):
    points = jnp.asarray(points, jnp.float32)
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    clusters = kmeans(
      key, points, embedding.codes, weights=weights, iterations=iterations, sample=SAMPLE
    )
    return np.asarray(clusters.centers), np.asarray(clusters.assignment)

  if embedding.additive:
    # The vector of a token is the mean of its codewords.
    rest, values, codes = np.asarray(table, np.float32) * subspaces, [], []
    for key in keys:
      centers, code = cluster(key, rest)
      rest = rest - centers[code]
      values.append(centers)
      codes.append(code)
    values, codes = np.stack(values), np.stack(codes, axis=1)
  elif by_number:
    values, codes = _levels_of_least_error(table, embedding.codes, key, weights, iterations)
  elif embedding.shared:
    parts = np.split(np.asarray(table, np.float32), subspaces, axis=1)
    repeated = None if weights is None else np.tile(weights, subspaces)
    centers, code = cluster(keys[0], np.concatenate(parts), repeated)
    values, codes = centers[None], code.reshape(subspaces, -1).T
  elif embedding.rotated:
    values, codes, basis["basis"] = rotated_kmeans(
      table,
      embedding.codes,
      subspaces,
      key=key,
      weights=weights,
      second=second,
    )
  else:
    values, codes = product_codes(
      table,
      embedding.codes,
      subspaces,
      key=key,
      weights=weights,
      second=second,
      iterations=iterations,
    )
  if embedding.shared and second is not None:
    repeated = np.broadcast_to(values, (subspaces, *values.shape[1:]))
    _, codes = _descend(table, repeated, codes, second, weights, fit=False)
  return {
    "params": {"values": values} | basis,
    "codes": {"codes": codes.astype(code_dtype(embedding.codes))},
  }


def _levels_of_least_error(table, codes, key, weights, iterations):
  """K numbers [1, K, 1], by k-means of a histogram, and each number's nearest."""
  ends = float(table.min()), float(table.max())
  weights = np.ones(len(table)) if weights is None else weights
  blocks = [slice(first, first + ROWS) for first in range(0, len(table), ROWS)]

  def numbers_and_weights(block):
    numbers = np.asarray(table[block], np.float64)
    return numbers.ravel(), np.repeat(weights[block], numbers.shape[1])

  mass = np.zeros(BINS)
  for numbers, own in map(numbers_and_weights, blocks):
    mass += np.histogram(numbers, BINS, ends, weights=own)[0]
  edges = np.histogram_bin_edges([], BINS, ends)
  middles = jnp.asarray((edges[1:] + edges[:-1])[:, None] / 2, jnp.float32)
  found = kmeans(key, middles, codes, weights=jnp.asarray(mass / mass.max()), iterations=iterations)
  centers = np.sort(np.asarray(found.centers, np.float64)[:, 0])
  bounds = (centers[1:] + centers[:-1]) / 2
  # The means of the numbers themselves, which the histogram has rounded to its bins.
  level = np.empty(table.shape, code_dtype(codes))
  total, sums = np.zeros(codes), np.zeros(codes)
  for block, (numbers, own) in zip(blocks, map(numbers_and_weights, blocks)):
    nearest_level = np.searchsorted(bounds, numbers)
    level[block] = nearest_level.reshape(-1, table.shape[1])
    total += np.bincount(nearest_level, own, codes)
    sums += np.bincount(nearest_level, own * numbers, codes)
  values = np.where(total > 0, sums / np.where(total > 0, total, 1), centers)
  return values.astype(np.float32)[None, :, None], level


def product_codes(
  rows: Float[np.ndarray, "V D"],
  codes: int,
  subspaces: int,
  *,
  key: PRNGKeyArray,
  weights: Float[np.ndarray, "V"] | None = None,
  second: Float[np.ndarray, "D D"] | None = None,
  iterations: int = 25,
) -> tuple[Float[np.ndarray, "M K C"], Int[np.ndarray, "V M"]]:
  """The values and the codes of product quantisation, with `to_clusters`' arguments."""
  values, assigned = product_kmeans(
    rows, codes, subspaces, key=key, weights=weights, second=second, iterations=iterations
  )
  if second is not None and subspaces > 1:
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    values, assigned = _descend(rows, values, assigned, second, weights, fit=True)
  return values, assigned


@functools.partial(jax.jit, static_argnames="fit", donate_argnums=0)
def _sweep(error_VD, values_MKC, codes_MV, second, roots_MCC, weights_V, fit):
  """One pass of coordinate descent over the subspaces.

  The error (e Σ eᵀ, with e the difference of a row and its approximation) is quadratic in the part
  of a subspace. Given the other parts, its minimum lies at the row's own part plus a pull that
  corrects their errors; the code is the value that is nearest to it in the subspace's metric.
  """
  subspaces, codes, width = values_MKC.shape

  def step(m, state):
    error_VD, values_MKC, codes_MV = state
    part = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, m * width, width, axis)
    own_VC, root = part(error_VD, 1), roots_MCC[m]
    pull_VC = jnp.matmul(error_VD, part(second, 1), precision="highest")
    # The subspace's own error is in the product, so this is its part plus the pull.
    metric = part(part(second, 0), 1)
    pull_VC = jax.scipy.linalg.solve(metric, pull_VC.T, assume_a="pos").T
    values_KC = values_MKC[m]
    goal_VC = values_KC[codes_MV[m]] + pull_VC
    rotate = lambda x: jnp.matmul(x, root, precision="highest")
    code_V, _ = nearest_centers(rotate(goal_VC), rotate(values_KC))
    row_VC = values_KC[codes_MV[m]] + own_VC
    if fit:
      mass_K = jax.ops.segment_sum(weights_V, code_V, codes)
      sums_KC = jax.ops.segment_sum(weights_V[:, None] * goal_VC, code_V, codes)
      values_KC = jnp.where(
        mass_K[:, None] > 0, sums_KC / jnp.maximum(mass_K, 1e-30)[:, None], values_KC
      )
    error_VC = row_VC - values_KC[code_V]
    return (
      jax.lax.dynamic_update_slice_in_dim(error_VD, error_VC, m * width, 1),
      values_MKC.at[m].set(values_KC),
      codes_MV.at[m].set(code_V),
    )

  return jax.lax.fori_loop(0, subspaces, step, (error_VD, values_MKC, codes_MV))


def _descend(rows, values, codes, second, weights, fit):
  """Codes, and values if `fit`, that lower the error in the metric `second`."""
  subspaces, _, width = values.shape
  blocks = np.asarray(second, np.float64).reshape(subspaces, width, subspaces, width)
  roots = np.linalg.cholesky(blocks[range(subspaces), :, range(subspaces)])
  weights = jnp.ones(len(rows)) if weights is None else weights
  values, codes = jnp.asarray(values), jnp.asarray(codes.T.astype(np.int32))
  second, roots = jnp.asarray(second, jnp.float32), jnp.asarray(roots, jnp.float32)
  for _ in range(SWEEPS):
    error = jnp.asarray(np.asarray(rows, np.float32)) - product.compose(codes.T, values)
    _, values, codes = _sweep(error, values, codes, second, roots, weights, fit=fit)
  return np.asarray(values), np.asarray(codes).T


def reconstruct(
  embedding: Embedding,
  variables: Variables,
  table: Float[np.ndarray, "V D"],
  *,
  key: PRNGKeyArray,
  steps: int,
  batch: int = 128,
  learning_rate: float = 1e-3,
  trainable: tuple[str, ...] = (),
  report: Callable[[int, float], None] = lambda step, error: None,
) -> Variables:
  """Train an embedding to have the rows of a table: mean squared distance, by Adam.

  The collections that training writes, such as running statistics, are returned too. With a
  `DPQEmbedding` of an `EncoderQuantizer`, whose query table is the table and is not trained, this
  learns the codes of Shu and Nakayama, 2018; with the quantisers of DPQ it is the reconstruction of
  Chen et al., 2020, Table 11.

  Args:
    embedding: the embedding to train.
    variables: its initial variables.
    table: the rows to reconstruct.
    key: source of randomness for batches and for noise.
    steps: number of steps.
    batch: rows in a step.
    learning_rate: learning rate of Adam.
    trainable: dotted prefixes of the trained parameters; () trains all of them.
    report: called with the step and the mean squared distance every `CHUNK` steps.

  Returns:
    The trained variables.

  Raises:
    ValueError: the table has another shape than the embedding, or is not finite.
  """
  _check_table(embedding, table)
  rule = optax.adam(learning_rate)
  flat = traverse_util.flatten_dict(variables["params"], sep=".")
  below = lambda name: any(f"{name}.".startswith(f"{prefix}.") for prefix in trainable)
  params = {name: x for name, x in flat.items() if not trainable or below(name)}
  fixed = {name: x for name, x in flat.items() if name not in params}
  others = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params, others, fixed, table, key):
    row_key, noise_key = jax.random.split(key)
    tokens = jax.random.randint(row_key, (batch,), 0, embedding.vocab)
    (vectors, terms), written = embedding.apply(
      {"params": traverse_util.unflatten_dict(params | fixed, sep="."), **others},
      tokens,
      deterministic=False,
      method="loss_terms",
      mutable=list(others),
      rngs={"sample": noise_key},
    )
    error = ((vectors - table[tokens]) ** 2).sum(axis=-1).mean()
    return sum(terms.values(), error), (error, others | written)

  @jax.jit
  def train(params, others, moments, fixed, table, key, count):
    def step(index, carry):
      params, others, moments, _ = carry
      step_key = jax.random.fold_in(key, index)
      gradient, (error, others) = jax.grad(loss, has_aux=True)(
        params, others, fixed, table, step_key
      )
      updates, moments = rule.update(gradient, moments, params)
      return optax.apply_updates(params, updates), others, moments, error

    return jax.lax.fori_loop(0, count, step, (params, others, moments, jnp.float32(0)))

  moments, table = rule.init(params), jnp.asarray(table)
  for first in range(0, steps, CHUNK):
    count, chunk_key = min(CHUNK, steps - first), jax.random.fold_in(key, first)
    params, others, moments, error = train(params, others, moments, fixed, table, chunk_key, count)
    report(first + count, float(error))
  return {"params": traverse_util.unflatten_dict(params | fixed, sep="."), **others}


def squared_error(vectors: Float[Array, "V D"], table: Float[Array, "V D"]) -> float:
  """The squared distance between two rows, mean over the rows, in float64."""
  difference = np.asarray(vectors, np.float64) - np.asarray(table, np.float64)
  return float((difference**2).sum(axis=-1).mean())


@dataclasses.dataclass(frozen=True)
class Guide:
  """Fills a `GuidedEmbedding`, whose vectors are trained towards the table."""

  def __call__(self, embedding: Embedding, fresh: Variables, table: np.ndarray) -> Variables:
    """The fresh variables with the table as the guide."""
    if not isinstance(embedding, GuidedEmbedding):
      raise ValueError(
        f"`embedding` must be a GuidedEmbedding; got a {type(embedding).__name__}. Wrap it in one."
      )
    return {**fresh, "guide": {"table": np.asarray(table, np.float32)}}


@dataclasses.dataclass(frozen=True)
class LearnedCodes:
  """Fills a `ProductEmbedding` with codes and values that rebuild the table.

  With an `EncoderQuantizer` these are the codes of Shu and Nakayama, 2018.

  Attributes:
    quantizer: the quantiser to train; its codes, subspaces, `additive` and `shared` are those of
      the embedding.
    steps: number of Adam steps.
    seed: seed of the initial parameters and of the noise.
  """

  quantizer: Quantizer
  steps: int
  seed: int = 0

  def __call__(self, embedding: Embedding, fresh: Variables, table: np.ndarray) -> Variables:
    """Embedding variables with the codes and values of the trained quantiser."""
    form = lambda x: (x.codes, x.subspaces, x.shared, x.additive)
    if not isinstance(embedding, ProductEmbedding) or form(embedding) != form(self.quantizer):
      raise ValueError(
        "`embedding` must be a ProductEmbedding with the quantizer's (codes, subspaces, shared,"
        f" additive) {form(self.quantizer)}; got a {type(embedding).__name__} with"
        f" {form(embedding) if isinstance(embedding, ProductEmbedding) else 'no codes'}."
        " Give both the same."
      )
    # The network is trained on numbers of unit size, for any scale of the table.
    size = float(np.sqrt(np.mean(np.square(table, dtype=np.float64)))) or 1.0
    learned, variables = self.learned(table / np.float32(size))
    encode = jax.jit(lambda tokens: learned.apply(variables, tokens, method="codes_of"))
    codes = np.asarray(encode(jnp.arange(embedding.vocab)))
    values = size * np.asarray(learned.apply(variables, method="values"))
    dtype = np.asarray(fresh["codes"]["codes"]).dtype
    return {"params": {"values": values}, "codes": {"codes": codes.astype(dtype)}}

  def learned(self, table: np.ndarray) -> tuple[DPQEmbedding, Variables]:
    """A `DPQEmbedding` trained to rebuild the table, and its variables."""
    vocab, dim = table.shape
    embedding = DPQEmbedding(vocab, dim, self.quantizer)
    init_key, train_key = jax.random.split(jax.random.key(self.seed))
    variables = embedding.init(init_key, jnp.zeros((1,), jnp.int32))
    # The queries are the table itself and stay fixed; only the quantiser is trained.
    variables["params"]["query"] = jnp.asarray(table)
    variables = reconstruct(
      embedding, variables, table, key=train_key, steps=self.steps, trainable=("quantizer",)
    )
    return embedding, variables


def clustered(
  quantizer: CentroidQuantizer,
  variables: Mapping[str, Any],
  vectors: Float[Array, "N D"],
  *,
  key: PRNGKeyArray,
  iterations: int = 25,
) -> Variables:
  """Quantiser variables with k-means centroids of the vectors to be quantised.

  Raises:
    ValueError: the vectors have another width than the quantiser, are not finite, or are fewer
      than the codes.
  """
  form = ProductEmbedding(
    len(vectors),
    quantizer.dim,
    quantizer.codes,
    quantizer.subspaces,
    shared=quantizer.shared,
    additive=quantizer.additive,
  )
  clusters = to_clusters(form, np.asarray(vectors), key=key, iterations=iterations)
  centers = np.asarray(clusters["params"]["values"], np.float32)
  return {**variables, "params": {**variables["params"], "centroids": centers}}
