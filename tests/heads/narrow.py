"""The contract of heads that score a projection of the hidden vectors."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import reference
from tests.contract import HeadContract, costly
from tests.contract_on_meshes import as_float64, perturbed


def exact(narrow):
  """The vector itself, without rounding."""
  return narrow


def in_bfloat16(narrow):
  """The nearest bfloat16 of each number."""
  return np.asarray(jnp.asarray(narrow, jnp.bfloat16), np.float64)


class NarrowContract(HeadContract):
  """The contract of heads that score a projection of the hidden vectors.

  `reference_logits` takes one more argument, a function of the projected vectors.
  """

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, case, hidden, tokens):
    head = self.cases[case](self.vocab, self.dim).clone(dtype=jnp.bfloat16)
    variables = perturbed(head.init(jax.random.key(1), hidden))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, variables)
    low = hidden.astype(jnp.bfloat16)
    log_prob = head.apply(variables, low, tokens, method="log_prob")
    expected = self.reference_logits(
      head, as_float64(rounded), np.asarray(low, np.float64), in_bfloat16
    )
    expected = np.take_along_axis(reference.log_softmax(expected), tokens[..., None], -1)[..., 0]
    assert log_prob.dtype == jnp.float32
    # A projected number near the middle of two bfloat16 may round the other way than in float64.
    np.testing.assert_allclose(log_prob, expected, atol=2e-3)
