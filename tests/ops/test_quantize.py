"""Tests of the values and gradients that the functions of quantisers define."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.ops.exact import float64, normals
from vqjax.ops import quantize

D, K, M = 12, 5, 3


@pytest.mark.slow
def test_a_warm_forward_pass_is_the_softmax_with_its_true_gradient():
  x, values, keys = float64(normals(1, (3, D), (M, K, D // M), (M, K, D // M)))

  @jax.jit
  def out(x, values):
    scores = jnp.einsum("nmc,mkc->nmk", x.reshape(3, M, -1), keys)
    return quantize.softmax_quantized(scores, values, 0.7, 0.7)[0]

  with jax.enable_x64(True):
    check_grads(out, (jnp.asarray(x), jnp.asarray(values)), order=1, modes=["rev"])


def test_usage_counts_codes_and_its_perplexity_is_that_of_the_counts():
  codes = np.array([[0, 1], [0, 2], [3, 1], [0, 1]])

  @jax.jit
  def run(codes, mask):
    counts = quantize.code_counts(codes, 4, mask)
    return counts, *map(quantize.code_perplexity, (counts, jnp.zeros((1, 4))))

  counts, perplexity, of_nothing = run(codes, np.array([True, True, True, False]))
  np.testing.assert_array_equal(counts, [[2, 0, 0, 1], [0, 2, 1, 0]])
  entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
  np.testing.assert_allclose(perplexity, np.exp([entropy, entropy]), rtol=1e-6)
  assert np.asarray(of_nothing)[0] == 0
