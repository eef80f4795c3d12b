"""The dense embedding returns rows of its table in the requested dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import DenseEmbedding
from vqjax.sharding import MeshShape, make_mesh

EMBEDDING = DenseEmbedding(300, 6)


@pytest.fixture
def variables():
  return jitted.init(EMBEDDING, jax.random.key(0), np.zeros(1, np.int32))


@pytest.mark.parametrize("tokens", [np.array([[0, 299, 7], [7, 1, 0]]), np.uint8([200, 44])])
def test_a_lookup_is_a_row_of_the_table_and_narrow_integers_do_not_wrap(variables, tokens):
  found = jitted.apply(EMBEDDING, variables, tokens)
  np.testing.assert_array_equal(found, np.asarray(variables["params"]["weight"])[tokens])


def test_a_token_outside_the_vocabulary_is_nan(variables):
  tokens = np.array([0, -1, 299, 300, 2**30])
  found = np.asarray(jitted.apply(EMBEDDING, variables, tokens))
  assert np.isnan(found).any(axis=1).tolist() == [False, True, False, True, True]


def test_the_dtype_of_vectors_and_of_parameters_are_separate(variables):
  token, low = np.array([1]), EMBEDDING.clone(dtype=jnp.bfloat16)
  assert jax.eval_shape(low.apply, variables, token).dtype == jnp.bfloat16
  stored = EMBEDDING.clone(param_dtype=jnp.bfloat16)
  table = jax.eval_shape(stored.init, jax.random.key(0), token)["params"]["weight"]
  assert table.dtype == jnp.bfloat16
  assert stored.size().state_bytes == 2 * table.size


def test_size_and_axes_are_those_of_the_variables(variables):
  assert EMBEDDING.size().params == 1800 == variables["params"]["weight"].size
  assert EMBEDDING.logical_axes() == {"params": {"weight": ("vocab", "table_embed")}}


def test_an_empty_vocabulary_is_refused():
  with pytest.raises(ValueError, match=r"`vocab` .*0"):
    jitted.init(DenseEmbedding(0, 6), jax.random.key(0), np.zeros(1, np.int32))


def test_forward_mode_works_on_one_device():
  embedding, tokens = DenseEmbedding(5, 3), np.array([1, 1, 4])
  variables = jitted.init(embedding, jax.random.key(0), tokens)
  lookup = lambda v: embedding.apply(v, tokens)
  found, tangent = jax.jit(lambda v: jax.jvp(lookup, (v,), (v,)))(variables)
  np.testing.assert_array_equal(tangent, found)


def test_on_a_mesh_vectors_and_gradient_are_those_of_one_device():
  embedding = DenseEmbedding(53, 6, vocab_axis="model")
  rng = np.random.default_rng(1)
  tokens, cotangent = rng.integers(0, 53, (4, 5)), rng.normal(size=(4, 5, 6)).astype(np.float32)
  tokens[0, 0] = 53
  variables = jitted.init(embedding, jax.random.key(0), tokens)

  def both():
    vectors, pull = jax.vjp(lambda v: embedding.apply(v, tokens), variables)
    return vectors, pull(jnp.asarray(cotangent))

  alone = jax.jit(both)()
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    spread = jax.device_get(jax.jit(both)())
  assert np.isnan(spread[0][0, 0]).all()
  # Lookups are exact; a row that comes several times is added up in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), spread, alone)
