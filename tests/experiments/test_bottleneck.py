"""The sketch finds the singular values of a matrix in blocks, and the page is rendered."""

import jax
import numpy as np
import pytest

from experiments import bottleneck
from tests import jitted, reference
from vqjax import DenseHead, MixtureHead


def test_the_sketch_has_the_singular_values_of_a_matrix_of_lower_rank():
  rng = np.random.default_rng(0)
  matrix = rng.normal(size=(101, 7)) @ rng.normal(size=(7, 60))
  blocks = [matrix[:40], matrix[40:80], matrix[80:]]
  found = bottleneck.singular_values(lambda index: (blocks[index], None), 3, size=12)
  expected = np.linalg.svd(matrix, compute_uv=False)[:12]
  np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(
  ("head", "is_normalised", "ranks"),
  [
    (DenseHead(211, 4), False, {5}),  # D columns of logits, and the normalisers
    (DenseHead(211, 4), True, {4}),  # a layer norm before the head leaves one direction less
    pytest.param(MixtureHead(211, 4, 3), False, range(21, 101), marks=pytest.mark.slow),
  ],
)
def test_blocks_are_the_centred_log_probabilities_whose_rank_is_that_of_the_head(
  head, is_normalised, ranks
):
  hidden = 3 * np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
  if is_normalised:
    hidden -= hidden.mean(-1, keepdims=True)
  variables = jitted.init(head, jax.random.key(1), hidden)
  block, count, largest = bottleneck.log_prob_blocks(head, variables, hidden)
  rows, tokens = map(np.concatenate, zip(*(block(index) for index in range(count))))
  exact = reference.log_softmax(np.asarray(jitted.apply(head, variables, hidden))).T
  expected = (exact - exact.mean(axis=1, keepdims=True))[tokens]
  np.testing.assert_allclose(rows[rows.any(axis=1)], expected[rows.any(axis=1)], atol=2e-5)
  values = bottleneck.singular_values(block, count, 100)
  np.testing.assert_allclose(largest, np.abs(exact).max(), rtol=1e-5)
  assert bottleneck.numerical_ranks(values, exact.shape, largest)["rank"] in ranks
