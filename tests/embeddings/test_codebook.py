"""The codebook embedding returns its tokens' codes, with their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import CodebookEmbedding, assign

EMBEDDING = CodebookEmbedding(307, 6, 11, assign.FrequentAlone())


@pytest.fixture
def variables():
  return jitted.init(EMBEDDING, jax.random.key(0), np.zeros(1, np.int32))


def test_the_gradient_of_a_code_is_the_sum_over_its_tokens(variables):
  tokens = np.array([0, 20, 30, 20, 306])
  cotangent = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
  lookup = lambda p: (EMBEDDING.apply(variables | {"params": p}, tokens) * cotangent).sum()
  found = jax.jit(jax.grad(lookup))(variables["params"])["codebook"]
  expected = np.zeros((11, 6))
  np.add.at(expected, assign.FrequentAlone()(307, 11)[tokens], cotangent)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_bfloat16_code_of_many_tokens_gets_the_sum_over_all_of_them():
  embedding = CodebookEmbedding(3, 2, 1, dtype=jnp.float32, param_dtype=jnp.bfloat16)

  @jax.jit
  def run():
    tokens = jnp.arange(3000) % 3
    variables = embedding.init(jax.random.key(0), tokens)
    total = lambda p: embedding.apply({**variables, "params": p}, tokens).sum()
    return jax.grad(total)(variables["params"])["codebook"]

  gradient = run()
  # 3000 is no bfloat16; the nearest is 3008. A sum of ones in bfloat16 would stay at 256.
  assert gradient.dtype == jnp.bfloat16
  assert gradient.tolist() == [[3008.0, 3008.0]]


def test_a_code_that_does_not_exist_is_nan(variables):
  table = np.array(variables["codes"]["assignment"])
  table[[2, 5]] = 11, -1
  variables = variables | {"codes": {"assignment": table}}
  found = np.asarray(jitted.apply(EMBEDDING, variables, np.array([1, 2, 5])))
  assert np.isnan(found).all(axis=1).tolist() == [False, True, True]
