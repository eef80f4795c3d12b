"""The sketch finds the singular values of a matrix in blocks, and the page is rendered."""

import json
import shutil

import jax
import numpy as np

from experiments import bottleneck
from tests import reference
from vqjax import DenseHead, MixtureHead


def test_the_sketch_has_the_singular_values_of_a_matrix_of_lower_rank():
  rng = np.random.default_rng(0)
  matrix = rng.normal(size=(101, 7)) @ rng.normal(size=(7, 60))
  blocks = [matrix[:40], matrix[40:80], matrix[80:]]
  found = bottleneck.singular_values(lambda index: (blocks[index], None), 3, size=12)
  expected = np.linalg.svd(matrix, compute_uv=False)[:12]
  np.testing.assert_allclose(found, expected, atol=1e-9)


def test_blocks_are_the_centred_log_probabilities_and_a_mixture_has_the_higher_rank():
  hidden = 3 * jax.random.normal(jax.random.key(0), (300, 4))
  ranks = {}
  for head in (DenseHead(211, 4), MixtureHead(211, 4, 3)):
    variables = head.init(jax.random.key(1), hidden)
    block, count, largest = bottleneck.log_prob_blocks(head, variables, hidden)
    rows = np.concatenate([block(index)[0] for index in range(count)])
    tokens = np.concatenate([block(index)[1] for index in range(count)])
    exact = reference.log_softmax(head.apply(variables, hidden)).T
    expected = (exact - exact.mean(axis=1, keepdims=True))[tokens]
    np.testing.assert_allclose(rows[rows.any(axis=1)], expected[rows.any(axis=1)], atol=2e-5)
    values = bottleneck.singular_values(block, count, 100)
    np.testing.assert_allclose(largest, np.abs(exact).max(), rtol=1e-5)
    ranks[type(head)] = bottleneck.numerical_ranks(values, exact.shape, largest)["rank"]
  assert ranks[DenseHead] == 5  # D columns of logits, and the normalisers
  assert ranks[MixtureHead] > 20


def test_a_layer_norm_before_a_linear_head_leaves_one_direction_less():
  hidden = jax.random.normal(jax.random.key(0), (512, 8))
  hidden = hidden - hidden.mean(-1, keepdims=True)
  head = DenseHead(3000, 8)
  variables = head.init(jax.random.key(1), hidden)
  block, count, largest = bottleneck.log_prob_blocks(head, variables, hidden)
  values = bottleneck.singular_values(block, count, 40)
  # Seven directions of the vectors, and the normalisers.
  assert bottleneck.numerical_ranks(values, (3000, 512), largest)["rank"] == 8


def test_the_page_is_what_the_command_renders(tmp_path):
  result = json.loads(bottleneck.RESULTS.read_text("utf-8"))
  copy = tmp_path / "page.md"
  shutil.copy(bottleneck.PAGE, copy)
  assert not bottleneck.update(copy, result)
