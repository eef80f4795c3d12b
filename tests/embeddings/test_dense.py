"""The dense embedding returns rows of its table in the requested dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import DenseEmbedding
from vqjax.sharding import MeshShape, make_mesh


@pytest.fixture
def variables():
  return DenseEmbedding(300, 6).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))


def test_a_lookup_is_a_row_of_the_table(variables):
  tokens = jnp.array([[0, 299, 7], [7, 1, 0]])
  found = DenseEmbedding(300, 6).apply(variables, tokens)
  np.testing.assert_array_equal(found, np.asarray(variables["params"]["weight"])[tokens])


@pytest.mark.parametrize("token", [-1, 300, 2**30])
def test_a_token_outside_the_vocabulary_is_nan(variables, token):
  found = DenseEmbedding(300, 6).apply(variables, jnp.array([0, token, 299]))
  assert np.isnan(found).any(axis=1).tolist() == [False, True, False]


def test_narrow_integers_do_not_wrap(variables):
  found = DenseEmbedding(300, 6).apply(variables, jnp.array([200, 44], jnp.uint8))
  np.testing.assert_array_equal(found, np.asarray(variables["params"]["weight"])[[200, 44]])


def test_the_dtype_of_vectors_and_of_parameters_are_separate(variables):
  embedding = DenseEmbedding(300, 6, dtype=jnp.bfloat16)
  assert embedding.apply(variables, jnp.array([1])).dtype == jnp.bfloat16
  low = DenseEmbedding(300, 6, param_dtype=jnp.bfloat16)
  table = low.init(jax.random.key(0), jnp.zeros((1,), jnp.int32))["params"]["weight"]
  assert table.dtype == jnp.bfloat16
  assert low.size().state_bytes == table.nbytes


def test_size_and_axes_are_those_of_the_variables(variables):
  embedding = DenseEmbedding(300, 6)
  assert embedding.size().params == 1800 == variables["params"]["weight"].size
  assert embedding.logical_axes() == {"params": {"weight": ("vocab", "table_embed")}}


def test_an_empty_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r"`vocab` .*0"):
    DenseEmbedding(0, 6).init(jax.random.key(0), jnp.zeros((1,), jnp.int32))


def test_forward_mode_works_on_one_device():
  embedding = DenseEmbedding(5, 3)
  tokens = jnp.array([1, 1, 4])
  variables = embedding.init(jax.random.key(0), tokens)
  lookup = lambda v: embedding.apply(v, tokens)
  _, tangent = jax.jvp(lookup, (variables,), (variables,))
  np.testing.assert_array_equal(tangent, lookup(variables))


def test_on_a_mesh_vectors_and_gradient_are_those_of_one_device():
  embedding = DenseEmbedding(53, 6, vocab_axis="model")
  tokens = jax.random.randint(jax.random.key(1), (4, 5), 0, 53).at[0, 0].set(53)
  variables = embedding.init(jax.random.key(0), tokens)
  cotangent = jax.random.normal(jax.random.key(2), (4, 5, 6))

  def both():
    vectors, pull = jax.vjp(lambda v: embedding.apply(v, tokens), variables)
    return vectors, pull(cotangent)

  alone = jax.jit(both)()
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    spread = jax.device_get(jax.jit(both)())
  assert np.isnan(spread[0][0, 0]).all()
  # Lookups are exact; a row that comes several times is added up in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), spread, alone)
