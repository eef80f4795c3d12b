"""How is a trained embedding table turned into a small one: by clusters, by levels, by learning?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Float, PRNGKeyArray

from vqjax.assign.multiple import code_dtype
from vqjax.assign.table import checked_rows
from vqjax.embeddings import Embedding, ProductEmbedding, ScalarEmbedding
from vqjax.embeddings.scalar import scalar_levels
from vqjax.ops.kmeans import kmeans

CHUNK = 200
"""Steps of learning between two looks at what it has come to."""


def to_levels(embedding: ScalarEmbedding, table: Float[np.ndarray, "V D"]) -> dict[str, Any]:
  """Scalar quantisation: the variables of an embedding whose numbers are the nearest levels.

  Raises:
    ValueError: the table has another shape, or is not finite.
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
) -> dict[str, Any]:
  """Product quantisation: k-means of the parts of the rows, of all parts together where shared.

  Additive values are means of what those before them leave over (residual quantisation).

  Raises:
    ValueError: the table has another shape, is not finite, or has fewer rows than codes.
  """
  _check_table(embedding, table)
  rows = checked_rows(table, embedding.codes)
  keys = jax.random.split(key, embedding.subspaces)
  if embedding.additive:
    values, codes = _residual(rows, embedding, keys, iterations)
  else:
    values, codes = _parts(rows, embedding, keys, iterations)
  return {
    "params": {"values": values},
    "codes": {"codes": codes.astype(code_dtype(embedding.codes))},
  }


def _clustered(key, points, codes, iterations):
  found = kmeans(key, jnp.asarray(points, jnp.float32), codes, iterations=iterations)
  return np.asarray(found.centers), np.asarray(found.assignment)


def _parts(rows, embedding, keys, iterations):
  parts = np.split(rows, embedding.subspaces, axis=1)
  if embedding.shared:
    centers, code = _clustered(keys[0], np.concatenate(parts), embedding.codes, iterations)
    return centers[None], code.reshape(embedding.subspaces, -1).T
  found = [_clustered(k, part, embedding.codes, iterations) for k, part in zip(keys, parts)]
  return np.stack([centers for centers, _ in found]), np.stack([code for _, code in found], axis=1)


def _residual(rows, embedding, keys, iterations):
  if embedding.shared:
    raise ValueError(
      "shared additive values have no clusters of their own; give shared=False, or `reconstruct`"
    )
  left, values, codes = rows * embedding.subspaces, [], []  # the vector is a mean
  for key in keys:
    centers, code = _clustered(key, left, embedding.codes, iterations)
    left = left - centers[code]
    values.append(centers)
    codes.append(code)
  return np.stack(values), np.stack(codes, axis=1)


def reconstruct(
  embedding: Embedding,
  variables: dict[str, Any],
  table: Float[np.ndarray, "V D"],
  *,
  key: PRNGKeyArray,
  steps: int,
  batch: int = 128,
  learning_rate: float = 1e-3,
  trainable: tuple[str, ...] = (),
  said: Callable[[int, float], None] = lambda step, error: None,
) -> dict[str, Any]:
  """Any embedding, trained by Adam to have the rows of a table: squared distance, mean over rows.

  What it writes in training (running statistics) is kept. With a `DPQEmbedding` of an
  `EncoderQuantizer`, whose query table is the table and alone is not trained, these are the codes
  of Shu and Nakayama; with DPQ's own quantisers the reconstruction of Chen et al., 2020, Table 11.

  Args:
    embedding: what is trained.
    variables: its first ones.
    table: what it is to become.
    key: of the rows of each step, and of noise.
    steps: of Adam.
    batch: rows of a step.
    learning_rate: of Adam.
    trainable: dotted prefixes of the trained parameters; () trains all of them.
    said: is told the step and the mean squared distance, now and then.

  Returns:
    The variables.

  Raises:
    ValueError: the table has another shape, or is not finite.
  """
  _check_table(embedding, table)
  rule = optax.adam(learning_rate)
  flat = traverse_util.flatten_dict(variables["params"], sep=".")
  below = lambda name: any(f"{name}.".startswith(f"{prefix}.") for prefix in trainable)
  own = {name: x for name, x in flat.items() if not trainable or below(name)}
  fixed = {name: x for name, x in flat.items() if name not in own}
  others = {name: tree for name, tree in variables.items() if name != "params"}
  state = own, others, rule.init(own)
  learn = _learner(embedding, rule, batch)
  for first in range(0, steps, CHUNK):
    count = min(CHUNK, steps - first)
    inputs = fixed, jnp.asarray(table), jax.random.fold_in(key, first), count
    state, error = learn(state, *inputs)
    said(first + count, float(error))
  own, others, _ = state
  return {"params": traverse_util.unflatten_dict(own | fixed, sep="."), **others}


def _check_table(embedding, table):
  if table.shape != (embedding.vocab, embedding.dim):
    raise ValueError(
      f"a table of {list(table.shape)} for an embedding of {embedding.vocab} x {embedding.dim}"
    )
  if not np.isfinite(table).all():
    raise ValueError("the table has numbers that are not finite; mend the run it comes from")


def _learner(embedding, rule, batch):
  """(state, fixed, table, key, steps) -> (state, mean error of the last step)."""

  def loss(own, others, fixed, table, key):
    row_key, own_key = jax.random.split(key)
    tokens = jax.random.randint(row_key, (batch,), 0, embedding.vocab)
    (vectors, terms), written = embedding.apply(
      {"params": traverse_util.unflatten_dict(own | fixed, sep="."), **others},
      *(tokens, False),
      method="loss_terms",
      mutable=list(others),
      rngs={"sample": own_key},
    )
    error = ((vectors - table[tokens]) ** 2).sum(axis=-1).mean()
    return sum(terms.values(), error), (error, others | written)

  @jax.jit
  def learn(state, fixed, table, key, count):
    def step(index, carry):
      (own, others, moments), _ = carry
      given = others, fixed, table, jax.random.fold_in(key, index)
      gradient, (error, others) = jax.grad(loss, has_aux=True)(own, *given)
      updates, moments = rule.update(gradient, moments, own)
      return (optax.apply_updates(own, updates), others, moments), error

    return jax.lax.fori_loop(0, count, step, (state, jnp.float32(0)))

  return learn


def squared_error(vectors: Float[Array, "V D"], table: Float[Array, "V D"]) -> float:
  """Mean over rows of the squared distance, in float64."""
  off = np.asarray(vectors, np.float64) - np.asarray(table, np.float64)
  return float((off**2).sum(axis=-1).mean())
