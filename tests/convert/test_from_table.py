"""Embeddings made of a table approximate it: by levels, by clusters and by training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import DPQEmbedding, GuidedEmbedding, convert
from vqjax.embeddings import LowRankEmbedding, ProductEmbedding, ScalarEmbedding
from vqjax.quantizers import CentroidQuantizer, EncoderQuantizer

V, D, K, M = 120, 8, 6, 4
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def table():
  """Rows whose parts are few different vectors, and a little noise."""
  draw = np.random.default_rng(0)
  values = draw.normal(size=(M, K, D // M))
  codes = draw.integers(0, K, (V, M))
  rows = values[np.arange(M), codes].reshape(V, D)
  return (rows + 0.01 * draw.normal(size=rows.shape)).astype(np.float32)


def off(embedding, variables, table):
  vectors = np.asarray(jitted.apply(embedding, variables, np.arange(V)))
  return convert.squared_error(vectors, table) / convert.squared_error(0 * table, table)


@pytest.mark.slow
def test_clusters_of_parts_recover_the_parts_of_the_table(table):
  embedding = ProductEmbedding(V, D, K, M)
  variables = convert.to_clusters(embedding, table, key=KEY)
  assert off(embedding, variables, table) < 1e-2
  own = jax.tree.map(np.shape, jax.eval_shape(embedding.init, KEY, np.arange(2)))
  assert jax.tree.map(np.shape, variables) == own


def test_shared_clusters_recover_the_parts_of_the_table(table):
  embedding = ProductEmbedding(V, D, K * M, M, shared=True)
  assert off(embedding, convert.to_clusters(embedding, table, key=KEY), table) < 1e-2


@pytest.mark.slow
def test_each_residual_codebook_lowers_the_error(table):
  errors = []
  for subspaces in (1, 2, 4):
    embedding = ProductEmbedding(V, D, K, subspaces, additive=True)
    errors.append(off(embedding, convert.to_clusters(embedding, table, key=KEY), table))
  assert errors[0] > errors[1] > errors[2]


def test_shared_residual_clusters_are_refused(table):
  embedding = ProductEmbedding(V, D, K, M, additive=True, shared=True)
  with pytest.raises(ValueError, match=r"`embedding.shared` must be False .*; got True"):
    convert.to_clusters(embedding, table, key=KEY)


def test_numbers_of_least_error_are_the_means_of_what_is_nearest_to_them(table):
  """Scalar quantisation: a fixed point of Lloyd's iteration on the weighted numbers."""
  weights = 1.0 + np.arange(V)
  embedding = ProductEmbedding(V, D, 5, D, shared=True)
  variables = convert.to_clusters(embedding, table, key=KEY, weights=weights)
  values, codes = variables["params"]["values"], variables["codes"]["codes"]
  assert values.shape == (1, 5, 1)
  distance = np.abs(table[..., None] - values[0, :, 0])
  # The histogram rounds a number to one of 2^16 bins.
  slack = np.ptp(table) / 2**15
  chosen = np.take_along_axis(distance, codes[..., None].astype(int), -1)[..., 0]
  assert (chosen <= distance.min(axis=-1) + slack).all()
  for k in range(5):
    own = np.broadcast_to(weights[:, None], table.shape)[codes == k]
    np.testing.assert_allclose(values[0, k, 0], np.average(table[codes == k], weights=own), 1e-5)


def test_more_bits_lower_the_error(table):
  errors = []
  for bits in (2, 4, 8):
    embedding = ScalarEmbedding(V, D, bits)
    errors.append(off(embedding, convert.to_levels(embedding, table), table))
  assert errors[0] > 10 * errors[1] > 100 * errors[2]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("embedding", "part"),
  [
    (LowRankEmbedding(V, D, 6), 0.6),
    (DPQEmbedding(V, D, CentroidQuantizer(K, M, D, normalize=False)), 0.6),
    (ProductEmbedding(V, D, K, M), 0.8),  # its codes are hashes of the tokens, and stay
  ],
)
def test_training_lowers_the_error(embedding, part, table):
  variables = jitted.init(embedding, KEY, np.arange(V))
  if isinstance(embedding, DPQEmbedding):
    variables["params"]["query"] = jnp.asarray(table)
  reported = []
  found = convert.reconstruct(
    embedding,
    variables,
    table,
    key=KEY,
    steps=500,
    learning_rate=1e-2,
    report=lambda step, error: reported.append(step),
  )
  assert reported == [200, 400, 500]
  assert off(embedding, found, table) < part * off(embedding, variables, table)


@pytest.mark.slow
def test_codes_of_shu_and_nakayama_keep_the_queries(table):
  quantizer = EncoderQuantizer(
    K, M, D, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  embedding = DPQEmbedding(V, D, quantizer)
  variables = jitted.init(embedding, KEY, np.arange(V))
  variables["params"]["query"] = jnp.asarray(table)
  found = convert.reconstruct(
    embedding,
    variables,
    table,
    key=KEY,
    steps=800,
    learning_rate=1e-2,
    trainable=("quantizer",),
  )
  np.testing.assert_array_equal(found["params"]["query"], table)
  assert off(embedding, found, table) < 0.5


def test_training_is_deterministic(table):
  embedding = LowRankEmbedding(V, D, 2)
  variables = jitted.init(embedding, KEY, np.arange(2))
  again = [convert.reconstruct(embedding, variables, table, key=KEY, steps=7) for _ in range(2)]
  jax.tree.map(np.testing.assert_array_equal, *again)


def test_a_table_that_does_not_fit_is_refused(table):
  embedding = LowRankEmbedding(V, D, 2)
  variables = jitted.init(embedding, KEY, np.arange(2))
  with pytest.raises(ValueError, match=r"`table` must have shape \[120, 8\], .*; got \[119, 8\]"):
    convert.reconstruct(embedding, variables, table[1:], key=KEY, steps=1)
  broken = table.copy()
  broken[3, 1] = np.nan
  with pytest.raises(ValueError, match="`table` must be finite"):
    convert.reconstruct(embedding, variables, broken, key=KEY, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_centroids_of_a_quantiser_are_clusters_of_the_vectors(shared):
  """The quantiser belongs to no embedding; the clusters have less error than initial centroids."""
  quantizer = CentroidQuantizer(4, 2, 6, shared=shared, normalize=False)
  vectors = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
  variables = jitted.init(quantizer, jax.random.key(0), vectors)
  clusters = convert.clustered(quantizer, variables, vectors, key=jax.random.key(1))
  assert jax.tree.map(np.shape, clusters) == jax.tree.map(np.shape, variables)
  error = lambda v: ((np.asarray(jitted.apply(quantizer, v, vectors)) - vectors) ** 2).mean()
  assert error(clusters) < 0.7 * error(variables)
  parts = vectors.reshape(60, 2, 3)
  codes = np.asarray(jitted.apply(quantizer, clusters, vectors, method="encode"))
  centers = np.asarray(jitted.apply(quantizer, clusters, method="values"))
  if not shared:
    for m in range(2):
      for k in range(4):
        mean = parts[codes[:, m] == k, m].mean(axis=0)
        np.testing.assert_allclose(centers[m, k], mean, atol=1e-4)


@pytest.mark.slow
def test_learned_codes_rebuild_a_table_of_any_scale(table):
  network = EncoderQuantizer(
    8, M, D, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  learned, embedding = (
    convert.LearnedCodes(network, steps=300),
    ProductEmbedding(V, D, 8, M, additive=True),
  )
  fresh, small = jitted.init(embedding, KEY, np.zeros(1, int)), 0.01 * np.asarray(table)
  found = jitted.apply(embedding, learned(embedding, fresh, small), method="table")
  assert convert.squared_error(found, small) < 0.8 * small.var(axis=0).sum()
  with pytest.raises(ValueError, match=r"must be a ProductEmbedding .* got a LowRankEmbedding"):
    learned(LowRankEmbedding(V, D, 2), fresh, small)


def test_a_guide_is_the_table_of_a_guided_embedding(table):
  guided = GuidedEmbedding(V, D, LowRankEmbedding(V, D, 2))
  filled = convert.Guide()(guided, {"params": {}}, table)
  np.testing.assert_array_equal(filled["guide"]["table"], table)
  with pytest.raises(ValueError, match="must be a GuidedEmbedding; got a LowRankEmbedding"):
    convert.Guide()(guided.student, {"params": {}}, table)
