"""Does a run begin with the codes, the guide or the centroids that it is told to begin with?"""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vqjax import (
  CentroidQuantizer,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  EncoderQuantizer,
  GuidedEmbedding,
  MovingAverage,
  ProductEmbedding,
  Revival,
  SoftmaxQuantizer,
)
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER as V
from vqjax.lab.config import Experiment, Train
from vqjax.lab.conversion.tables import embedding_of
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lab.training import fit, read_variables
from vqjax.lab.training.run import load_text
from vqjax.models import Transformer

D = 8


@functools.cache
def text():
  """A folder of text for all runs of this module."""
  return str(tiny.write_text(pathlib.Path(tempfile.mkdtemp(), "text")))


def experiment(embedding, init_from=None, vocab=60):
  return Experiment(
    name="x",
    model=Transformer(embedding, DenseHead(V, D), D, layers=1, heads=2, context=8),
    data=Text(text(), valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(vocab=vocab),
    loader=Windows(),
    train=Train(steps=2, batch=8, eval_every=2, save_every=2),
    init_from=init_from,
  )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """The folder of a run with a dense embedding."""
  folder = tmp_path_factory.mktemp("dense")
  fit(experiment(DenseEmbedding(V, D)), folder)
  return folder


def table_of(folder):
  return np.asarray(read_variables(folder)[0]["params"]["embedding"]["weight"])


def begun(start, embedding):
  text = load_text(experiment(embedding, start))
  model = text.experiment.model
  tokens = jnp.zeros((1, 2), jnp.int32)
  variables = model.init(jax.random.key(0), tokens, tokens, method="loss_terms")
  return model, start(text, model, variables)


def test_a_guided_embedding_learns_the_table(dense, tmp_path):
  embedding = GuidedEmbedding(V, D, DenseEmbedding(V, D), weight=100.0)
  start = conversion.FromTable(str(dense), conversion.Guide())
  run = experiment(embedding, start)
  more = dataclasses.replace(run.train, steps=200, learning_rate=3e-2)
  more = dataclasses.replace(more, eval_every=200, save_every=200)
  fit(dataclasses.replace(run, train=more), tmp_path / "run")
  own = read_variables(tmp_path / "run")[0]
  table = table_of(dense)
  np.testing.assert_array_equal(own["guide"]["embedding"]["table"], table)
  far = np.abs(np.asarray(own["params"]["embedding"]["student"]["weight"]) - table).mean()
  assert far < 0.3 * np.abs(table).mean()


def test_codes_rebuild_the_table_and_stay_as_they_are(dense, tmp_path):
  network = EncoderQuantizer(
    8, 4, D, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  codes = conversion.Codes(network, steps=1_500)
  embedding = ProductEmbedding(V, D, 8, 4, additive=True)
  start = conversion.FromTable(str(dense), codes)
  model, variables = begun(start, embedding)
  table = table_of(dense)
  found = model.embedding.apply(embedding_of(variables), method="table")
  assert ((found - table) ** 2).sum() < 0.8 * ((table - table.mean(axis=0)) ** 2).sum()
  fit(experiment(embedding, start), tmp_path / "run")
  trained = read_variables(tmp_path / "run")[0]
  kept = variables["codes"]["embedding"]["codes"]
  np.testing.assert_array_equal(trained["codes"]["embedding"]["codes"], kept)


@pytest.mark.parametrize("average", [None, MovingAverage()])
@pytest.mark.parametrize("shared", [False, True])
def test_centroids_begin_as_clusters_of_the_first_queries(average, shared):
  quantizer = CentroidQuantizer(4, 2, D, shared=shared, normalize=False, moving_average=average)
  embedding = DPQEmbedding(V, D, quantizer)
  model, variables = begun(conversion.ClusteredCentroids(), embedding)
  own = embedding_of(variables)
  query = np.asarray(own["params"]["query"])
  centers = np.asarray(model.embedding.apply(own, method="values"))
  parts = query.reshape(-1, 2, D // 2)
  for m in range(2):
    table = centers[0 if shared else m]
    points = parts.reshape(-1, D // 2) if shared else parts[:, m]
    nearest = ((points[:, None] - table) ** 2).sum(-1).argmin(1)
    means = np.stack([points[nearest == k].mean(axis=0) for k in range(4)])
    # As good as converged: each centre is near the mean of what is nearest to it.
    assert np.abs(means - table).max() < 0.25 * np.abs(table).max()


def test_what_has_no_place_for_them_is_named(dense):
  other = SoftmaxQuantizer(4, 2, D)
  with pytest.raises(ValueError, match="DenseEmbedding has no guide"):
    begun(conversion.FromTable(str(dense), conversion.Guide()), DenseEmbedding(V, D))
  with pytest.raises(ValueError, match="has no place for the codes of"):
    begun(
      conversion.FromTable(str(dense), conversion.Codes(other, 1)), ProductEmbedding(V, D, 8, 2)
    )
  with pytest.raises(ValueError, match="has no centroids to begin with"):
    begun(conversion.ClusteredCentroids(), DPQEmbedding(V, D, other))


def test_a_table_of_another_width_is_named(dense):
  start = conversion.FromTable(str(dense), conversion.Guide())
  text = load_text(experiment(DenseEmbedding(V, D), start))
  vocab = text.experiment.model.embedding.vocab
  narrow = Transformer(
    GuidedEmbedding(vocab, 4, DenseEmbedding(vocab, 4)), DenseHead(vocab, 4), 4, 1, 2, 8
  )
  with pytest.raises(ValueError, match=rf"a dense table \[{vocab}, 8\]; \[{vocab}, 4\] is wanted"):
    start(text, narrow, {"params": {"embedding": {}}})


@pytest.mark.parametrize("average", [None, MovingAverage()])
@pytest.mark.parametrize("shared", [True, False])
def test_any_quantiser_begins_at_clusters_of_vectors(average, shared):
  """A quantiser of no embedding: its centroids are clusters, nearer than those it was made with."""
  quantizer = CentroidQuantizer(4, 2, 6, shared=shared, normalize=False, moving_average=average)
  vectors = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
  variables = quantizer.init(jax.random.key(0), jnp.asarray(vectors))
  begun = conversion.clustered(quantizer, variables, vectors, key=jax.random.key(1))
  assert jax.tree.map(np.shape, begun) == jax.tree.map(np.shape, variables)
  given = jnp.asarray(vectors)
  error = lambda v: ((quantizer.apply(v, given) - vectors) ** 2).mean()
  assert error(begun) < 0.6 * error(variables)
  parts = vectors.reshape(60, 2, 3)
  codes = np.asarray(quantizer.apply(begun, given, method="encode"))
  centers = np.asarray(quantizer.apply(begun, method="values"))
  if not shared:
    for m in range(2):
      for k in range(4):
        mean = parts[codes[:, m] == k, m].mean(axis=0)
        np.testing.assert_allclose(centers[m, k], mean, atol=1e-4)


@pytest.mark.parametrize("average", [None, MovingAverage()])
def test_clusters_are_where_centroids_begin_though_some_had_been_revived(average):
  quantizer = CentroidQuantizer(
    4, 2, 6, normalize=False, moving_average=average, revival=Revival(0.9, decay=0.0)
  )
  vectors = jnp.asarray(np.random.default_rng(0).normal(size=(60, 6)), jnp.float32)
  variables = quantizer.init(jax.random.key(0), vectors)
  _, written = quantizer.apply(
    *(variables, vectors[:2], True),
    mutable=["centroids", "revival"],
    rngs={"sample": jax.random.key(2)},
  )
  begun, fresh = (
    conversion.clustered(quantizer, own, vectors, key=jax.random.key(1))
    for own in (variables | written, variables)
  )
  assert jax.tree.map(np.shape, begun) == jax.tree.map(np.shape, variables)
  at = [quantizer.apply(own, method="values") for own in (begun, fresh)]
  np.testing.assert_array_equal(*at)
