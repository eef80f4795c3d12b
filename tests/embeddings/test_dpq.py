"""The DPQ embedding returns and trains the rows of its quantiser."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted, reference
from tests.embeddings.quantized import D, V, trained
from vqjax import DenseHead


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
