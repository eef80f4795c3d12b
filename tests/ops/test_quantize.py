"""Tests of the values and gradients that the functions of quantisers define."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vqjax.ops import quantize

D, K, M = 12, 5, 3


def vectors(shape):
  return jax.random.normal(jax.random.key(1), shape)


def in_float64(x):
  return np.asarray(x, np.float64)


@pytest.mark.slow
def test_a_warm_forward_pass_is_the_softmax_with_its_true_gradient():
  with jax.enable_x64(True):
    x = jnp.asarray(vectors((3, D)), jnp.float64)
    values = jax.random.normal(jax.random.key(2), (M, K, D // M), jnp.float64)
    keys = jax.random.normal(jax.random.key(4), (M, K, D // M), jnp.float64)

    def out(x, values):
      x, values = jnp.asarray(x), jnp.asarray(values)
      scores = jnp.einsum("nmc,mkc->nmk", x.reshape(3, M, -1), keys)
      return quantize.softmax_quantized(scores, values, 0.7, 0.7)[0]

    check_grads(out, (x, values), order=1, modes=["rev"])


@pytest.mark.slow
def test_the_rotation_takes_the_vector_to_its_centroid_and_passes_its_transpose():
  x = vectors((7, 4))
  row = jax.random.normal(jax.random.key(9), (7, 4))
  np.testing.assert_array_equal(quantize.rotated(row, x), row)
  jacobian = np.asarray(jax.vmap(jax.jacobian(quantize.rotated, argnums=1))(row, x), np.float64)
  for j, e, q in zip(jacobian, in_float64(row), in_float64(x)):
    np.testing.assert_allclose(j @ q, e, atol=1e-5)
    scale = np.linalg.norm(e) / np.linalg.norm(q)
    np.testing.assert_allclose(j @ j.T / scale**2, np.eye(4), atol=1e-5)
    assert np.linalg.det(j) > 0  # no reflection


@pytest.mark.slow
def test_vectors_of_zeros_and_opposite_ones_have_finite_gradients():
  x = jnp.array([[0.0, 0, 0], [1, 2, 3], [1, 2, 3]])
  row = jnp.array([[1.0, 1, 1], [-1, -2, -3], [0, 0, 0]])
  gradient = jax.grad(lambda x: (quantize.rotated(row, x) ** 2).sum())(x)
  assert np.isfinite(gradient).all()
  cosine = lambda x: quantize.cosine_response(x[:, None], jnp.ones((1, 4, 3))).sum()
  assert np.isfinite(jax.grad(cosine)(x)).all()


def test_usage_counts_codes_and_its_perplexity_is_that_of_the_counts():
  codes = jnp.array([[0, 1], [0, 2], [3, 1], [0, 1]])
  mask = jnp.array([True, True, True, False])
  counts = quantize.code_counts(codes, 4, mask)
  np.testing.assert_array_equal(counts, [[2, 0, 0, 1], [0, 2, 1, 0]])
  entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
  np.testing.assert_allclose(quantize.code_perplexity(counts), np.exp(entropy), rtol=1e-6)
  assert quantize.code_perplexity(jnp.zeros((1, 4)))[0] == 0
