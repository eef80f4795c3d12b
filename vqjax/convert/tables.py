"""Variables of compressed embeddings from a trained table [V, D].

`to_levels` quantises numbers, `to_clusters` quantises rows by k-means, and `reconstruct` trains any
embedding to have the rows of the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.assign.multiple import code_dtype
from vqjax.assign.table import checked_rows
from vqjax.convert.variables import Variables
from vqjax.embeddings import (
  DPQEmbedding,
  Embedding,
  GuidedEmbedding,
  ProductEmbedding,
  ScalarEmbedding,
)
from vqjax.embeddings.scalar import scalar_levels
from vqjax.ops.kmeans import kmeans
from vqjax.quantizers import CentroidQuantizer, Quantizer

CHUNK = 200
"""Number of steps of `reconstruct` between two reports of the error."""


def _check_table(embedding, table):
  if table.shape != (embedding.vocab, embedding.dim):
    raise ValueError(
      f"`table` must have shape {[embedding.vocab, embedding.dim]}, as the embedding; got"
      f" {list(table.shape)}."
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


def to_clusters(
  embedding: ProductEmbedding,
  table: Float[np.ndarray, "V D"],
  *,
  key: PRNGKeyArray,
  iterations: int = 25,
) -> Variables:
  """Product quantisation: k-means of sub-vectors, joint if codes are shared.

  For an additive embedding it is residual quantisation: each codebook clusters what the codebooks
  before it leave of the rows.

  Raises:
    ValueError: the table has another shape than the embedding, is not finite, or has fewer rows
      than codes; the embedding is shared and additive.
  """
  _check_table(embedding, table)
  rows, keys = checked_rows(table, embedding.codes), jax.random.split(key, embedding.subspaces)

  def cluster(key, points):
    points = jnp.asarray(points, jnp.float32)
    clusters = kmeans(key, points, embedding.codes, iterations=iterations)
    return np.asarray(clusters.centers), np.asarray(clusters.assignment)

  if embedding.additive and embedding.shared:
    raise ValueError(
      "`embedding.shared` must be False for clusters of additive codes; got True. Give"
      " shared=False, or use `reconstruct`."
    )
  if embedding.additive:
    # The vector of a token is the mean of its codewords.
    rest, values, codes = rows * embedding.subspaces, [], []
    for key in keys:
      centers, code = cluster(key, rest)
      rest = rest - centers[code]
      values.append(centers)
      codes.append(code)
    values, codes = np.stack(values), np.stack(codes, axis=1)
  elif embedding.shared:
    parts = np.split(rows, embedding.subspaces, axis=1)
    centers, code = cluster(keys[0], np.concatenate(parts))
    values, codes = centers[None], code.reshape(embedding.subspaces, -1).T
  else:
    parts = np.split(rows, embedding.subspaces, axis=1)
    values, codes = zip(*(cluster(key, part) for key, part in zip(keys, parts)))
    values, codes = np.stack(values), np.stack(codes, axis=1)
  return {
    "params": {"values": values},
    "codes": {"codes": codes.astype(code_dtype(embedding.codes))},
  }


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
class Codes:
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
  # Statistics of revival restart: all centroids count as used, and none is displaced.
  if "revival" in variables:
    revival = {"chosen": np.ones(centers.shape[:2], np.float32)}
    if quantizer.moving_average is None:
      revival["offset"] = np.zeros_like(centers)
    variables = {**variables, "revival": revival}
  if quantizer.moving_average is None:
    return {**variables, "params": {**variables["params"], "centroids": centers}}
  # A moving average is total / count: with counts of one the totals are the centroids.
  count = np.ones(centers.shape[:2], np.float32)
  return {**variables, "centroids": {"count": count, "total": centers}}
