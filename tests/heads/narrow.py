"""The contract of heads that score a projection of the hidden vectors."""

import jax

from tests import reference
from tests.contract import HeadContract


def exact(narrow):
  """The vector itself, without rounding."""
  return narrow


class NarrowContract(HeadContract):
  """The contract of heads that score a projection of the hidden vectors.

  `reference_logits` takes one more argument, a function of the projected vectors.
  """

  def bfloat16_logits(self, head, variables, hidden):
    """A projected number near the middle of two may round the other way than in float64."""
    rounded = jax.tree.map(lambda x: reference.in_bfloat16(x) if x.ndim == 2 else x, variables)
    return self.reference_logits(head, rounded, hidden, reference.in_bfloat16)
