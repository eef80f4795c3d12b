"""The DPQ embedding returns and trains the rows of its quantiser."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted, reference
from tests.embeddings.quantized import QUANTIZERS, D, V, trained, vectors_of
from vqjax import DenseHead, DPQEmbedding


@pytest.mark.fast_cases(2)
def test_vectors_are_those_of_the_quantised_rows(embedding, variables):
  tokens = np.array([[7, 0, 52], [7, 7, 1]])
  found = jitted.apply(embedding, variables, tokens)
  table = np.asarray(jitted.apply(embedding, variables, method="table"))
  np.testing.assert_array_equal(found, table[tokens])
  inner = {name: tree["quantizer"] for name, tree in variables.items() if "quantizer" in tree}
  row = np.asarray(variables["params"]["query"])[tokens]
  np.testing.assert_array_equal(found, jitted.apply(embedding.quantizer, inner, row))


@pytest.mark.fast_cases(1)
def test_tokens_outside_the_vocabulary_are_nan_and_contribute_nothing(embedding, variables):
  found = np.asarray(jitted.apply(embedding, variables, np.array([3, V, -1])))
  assert np.isfinite(found[0]).all()
  assert np.isnan(found[1:]).all()
  (_, terms), written = trained(embedding, variables, np.array([3, V, 4, -1]))
  (_, wanted), same = trained(embedding, variables, np.array([3, 4]))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (terms, written), (wanted, same)
  )


def test_a_batch_reads_only_its_own_rows(embedding):
  big = embedding.clone(vocab=100_003)
  tokens = jnp.arange(8)
  variables = jax.eval_shape(lambda: big.init(jax.random.key(0), tokens))
  apply = jax.jit(lambda v: big.apply(v, tokens))
  memory = apply.lower(variables).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 100_003 * 4


def test_size_and_axes_are_those_of_the_variables(embedding):
  variables = jitted.init(embedding, jax.random.key(0), np.arange(5))
  assert embedding.size().params == sum(x.size for x in jax.tree.leaves(variables["params"]))
  assert embedding.size().state_bytes == sum(x.nbytes for x in jax.tree.leaves(variables))
  ranks = jax.tree.map(lambda x: x.ndim, variables)
  axes = embedding.logical_axes()
  assert jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple)) == ranks


@pytest.mark.slow
def test_on_a_mesh_a_training_step_is_that_of_one_device(embedding, variables):
  spread = embedding.clone(vocab_axis="model")
  tokens = np.arange(32).reshape(8, 4) * 7 % V

  def step(embedding, tokens):
    def loss(params):
      (vectors, terms), written = trained(embedding, variables | {"params": params}, tokens)
      return (vectors**2).sum() + sum(terms.values(), 0.0), written

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

  expected = jax.device_get(step(embedding, tokens))
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):  # explicit axes
    found = jax.device_get(step(spread, jax.device_put(tokens, jax.P("data"))))
  # The loss is a float32 sum of 32·D squares, in another order on the mesh.
  close = functools.partial(np.testing.assert_allclose, rtol=32 * D * 2.0**-24, atol=1e-5)
  jax.tree.map(close, found, expected)


@pytest.mark.fast_cases(1)
def test_a_head_that_shares_the_codes_scores_with_the_quantised_rows(embedding, variables):
  head = DenseHead(V, D, embedding=embedding)
  own = {name: {"embedding": tree} for name, tree in variables.items()}
  hidden = np.random.default_rng(4).normal(size=(9, D)).astype(np.float32)
  tokens = np.arange(9) * 5

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(params):
    found = head.apply(own | {"params": params}, hidden, tokens, method="log_prob")
    return found.mean(), found

  gradient, found = run(own["params"])
  table = jitted.apply(embedding, variables, method="table")
  np.testing.assert_allclose(found, reference.linear_log_prob(hidden, table, tokens), atol=1e-5)
  assert np.asarray(gradient["embedding"]["query"]).any()


def test_a_quantizer_of_another_width_is_refused():
  embedding = DPQEmbedding(V, 10, QUANTIZERS["vq"])
  with pytest.raises(ValueError, match=r"`quantizer` .*10.*12"):
    jitted.init(embedding, jax.random.key(0), np.arange(3))


@pytest.mark.fast_cases(1)
def test_an_empty_batch_is_empty(embedding, variables):
  nothing = np.zeros((2, 0), np.int32)
  assert jitted.apply(embedding, variables, nothing).shape == (2, 0, D)
  assert vectors_of(embedding.compact(variables), nothing).shape == (2, 0, D)
