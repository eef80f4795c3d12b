"""The share of the logits' gradient that heads pass on, and its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import reference
from tests.jitted import abstract_variables, random_variables, results
from vqjax import CodebookHead, DenseHead, GroupedHead

V, D = 101, 12
HIDDEN = np.random.default_rng(0).standard_normal((7, D), np.float32)
TOKENS = np.random.default_rng(1).integers(0, V, 7)


def share(head, variables, tokens=TOKENS):
  return results(lambda v, h: head.apply(v, h, tokens, method="gradient_share"), variables, HIDDEN)


def test_a_token_outside_of_the_vocabulary_is_nan():
  head = DenseHead(V, D)
  found = share(head, random_variables(head), np.where(np.arange(7) == 3, V, TOKENS))
  assert np.flatnonzero(np.isnan(found.kept)).tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
  "head", [DenseHead(V, D, use_bias=True), CodebookHead(V, D, 9), GroupedHead(V, D)]
)
def test_devices_that_share_the_vocabulary_find_the_same(head):
  variables = random_variables(head)
  expected = share(head, variables)
  with jax.set_mesh(jax.make_mesh((4,), ("model",), (AxisType.Auto,))):
    found = share(head.clone(vocab_axis="model"), variables)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_vocabulary_of_several_blocks_is_reduced_block_by_block():
  # Composed rows are scored in blocks; the largest array is a block's Jacobian.
  head = DenseHead(9001, 4, dtype=jnp.bfloat16)
  call = lambda v: head.apply(v, jnp.ones((50, 4)), jnp.arange(50), method="gradient_share")
  assert reference.largest_value(call, abstract_variables(head)) < 9001 * 50 / 4
