"""The share of the logits' gradient that heads pass on, and its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import jitted, reference
from vqjax import CodebookHead, DenseHead, GroupedHead, LowRankHead

V, D = 101, 12
HIDDEN = jax.random.normal(jax.random.key(0), (7, D))
TOKENS = jax.random.randint(jax.random.key(1), (7,), 0, V)


def share(head, variables, tokens=TOKENS):
  return jitted.apply(head, variables, HIDDEN, tokens, method="gradient_share")


def gradients(head, variables):
  """float64 gradients in the logits."""
  prob = np.exp(reference.log_softmax(head.apply(variables, HIDDEN)))
  prob[np.arange(7), TOKENS] -= 1
  return prob


@pytest.mark.parametrize("rank", [1, 5])
def test_a_low_rank_head_passes_on_its_rank(rank):
  head = LowRankHead(V, D, rank)
  found = share(head, head.init(jax.random.key(2), HIDDEN))
  assert found.rank.tolist() == [rank] * 7


def test_a_codebook_passes_on_no_more_than_the_means_of_its_codes():
  head = CodebookHead(V, D, 8)
  variables = head.init(jax.random.key(2), HIDDEN)
  code = np.asarray(variables["codes"]["assignment"])
  gradient = gradients(head, variables)
  of_code = np.eye(8)[code]
  means = gradient @ of_code / np.maximum(of_code.sum(axis=0), 1) @ of_code.T
  bound = np.linalg.norm(means, axis=1) / np.linalg.norm(gradient, axis=1)
  # Seven differences of eight codes fit into twelve columns: the bound is reached.
  np.testing.assert_allclose(share(head, variables).kept, bound, atol=1e-5)


def test_a_square_weight_passes_on_everything():
  head = DenseHead(13, D)  # up to a constant, 13 logits have 12 dimensions
  found = share(head, head.init(jax.random.key(2), HIDDEN), TOKENS % 13)
  np.testing.assert_allclose(found.kept, 1, atol=1e-5)


def test_a_token_outside_of_the_vocabulary_is_nan():
  head = DenseHead(V, D)
  found = share(head, head.init(jax.random.key(2), HIDDEN), TOKENS.at[3].set(V))
  assert np.flatnonzero(np.isnan(found.kept)).tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
  "head", [DenseHead(V, D, use_bias=True), CodebookHead(V, D, 9), GroupedHead(V, D)]
)
def test_devices_that_share_the_vocabulary_find_the_same(head):
  variables = head.init(jax.random.key(2), HIDDEN)
  expected = share(head, variables)
  with jax.set_mesh(jax.make_mesh((4,), ("model",), (AxisType.Auto,))):
    found = share(head.clone(vocab_axis="model"), variables)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_vocabulary_of_several_blocks_is_reduced_block_by_block():
  # Composed rows are scored in blocks; the largest array is a block's Jacobian.
  head = DenseHead(9001, 4, dtype=jnp.bfloat16)
  variables = head.init(jax.random.key(2), jnp.zeros((1, 4)))
  call = lambda h, t: head.apply(variables, h, t, method="gradient_share")
  hidden, tokens = jnp.ones((50, 4)), jnp.arange(50)
  assert reference.largest_value(call, hidden, tokens) < 9001 * 50 / 4
