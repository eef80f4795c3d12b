"""The codebook embedding returns its tokens' codes, with their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import CodebookEmbedding, assign
from vqjax.sharding import MeshShape, make_mesh

EMBEDDING = CodebookEmbedding(307, 6, 11, assign.FrequentAlone())


@pytest.fixture
def variables():
  return jitted.init(EMBEDDING, jax.random.key(0), np.zeros(1, np.int32))


def test_the_vector_of_a_token_is_its_codes_row_of_the_codebook(variables):
  tokens = np.array([[0, 306, 7], [7, 8, 9]])
  table = assign.FrequentAlone()(307, 11)
  codebook = np.asarray(variables["params"]["codebook"])
  found = jitted.apply(EMBEDDING, variables, tokens)
  np.testing.assert_array_equal(found, codebook[table[tokens]])
  whole = jitted.apply(EMBEDDING, variables, method="table")
  np.testing.assert_array_equal(whole, codebook[table])


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


def test_a_token_outside_the_vocabulary_is_nan(variables):
  tokens = np.array([0, -1, 306, 307, 2**30])
  found = np.asarray(jitted.apply(EMBEDDING, variables, tokens))
  assert np.isnan(found).any(axis=1).tolist() == [False, True, False, True, True]


def test_a_code_that_does_not_exist_is_nan(variables):
  table = np.array(variables["codes"]["assignment"])
  table[[2, 5]] = 11, -1
  variables = variables | {"codes": {"assignment": table}}
  found = np.asarray(jitted.apply(EMBEDDING, variables, np.array([1, 2, 5])))
  assert np.isnan(found).all(axis=1).tolist() == [False, True, True]


def test_narrow_integers_do_not_wrap(variables):
  tokens = np.array([200, 44])
  narrow = jitted.apply(EMBEDDING, variables, tokens.astype(np.uint8))
  np.testing.assert_array_equal(narrow, jitted.apply(EMBEDDING, variables, tokens))


def test_the_dtype_of_vectors_and_of_parameters_are_separate(variables):
  low = EMBEDDING.clone(dtype=jnp.bfloat16)
  token = np.array([1])
  assert jax.eval_shape(low.apply, variables, token).dtype == jnp.bfloat16
  stored = EMBEDDING.clone(param_dtype=jnp.bfloat16)
  made = jax.eval_shape(stored.init, jax.random.key(0), token)
  bytes_of = lambda x: x.size * x.dtype.itemsize
  assert stored.size().state_bytes == sum(map(bytes_of, jax.tree.leaves(made)))
  assert jax.eval_shape(stored.apply, made, token).dtype == jnp.bfloat16


def test_size_and_axes_are_those_of_the_variables(variables):
  assert EMBEDDING.size().params == 66 == variables["params"]["codebook"].size
  assert EMBEDDING.size().state_bytes == 4 * 66 + 4 * 307
  ranks = jax.tree.map(len, EMBEDDING.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == jax.tree.map(np.ndim, variables)


@pytest.mark.parametrize("codes", [0, 12])
def test_codes_outside_the_vocabulary_are_refused(codes):
  with pytest.raises(ValueError, match=f"codes.*{codes}"):
    jitted.init(CodebookEmbedding(11, 6, codes), jax.random.key(0), np.zeros(1, np.int32))


def test_a_table_that_does_not_fit_is_refused():
  embedding = CodebookEmbedding(11, 6, 3, lambda vocab, codes: np.full(vocab, 3))
  with pytest.raises(ValueError, match=r"got 3 for token 0"):
    jitted.init(embedding, jax.random.key(0), np.zeros(1, np.int32))


def test_on_a_mesh_vectors_and_gradient_are_those_of_one_device():
  embedding = CodebookEmbedding(53, 6, 7, vocab_axis="model")
  rng = np.random.default_rng(1)
  tokens, cotangent = rng.integers(0, 53, (4, 5)), rng.normal(size=(4, 5, 6)).astype(np.float32)
  tokens[0, 0] = 53
  variables = jitted.init(embedding, jax.random.key(0), tokens)

  def both(params):
    lookup = lambda p: embedding.apply(variables | {"params": p}, tokens)
    vectors, pull = jax.vjp(lookup, params)
    return vectors, pull(jnp.asarray(cotangent))

  alone = jax.jit(both)(variables["params"])
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    spread = jax.device_get(jax.jit(both)(variables["params"]))
  assert np.isnan(spread[0][0, 0]).all()
  # Lookups are exact; a row that comes several times is added up in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), spread, alone)
