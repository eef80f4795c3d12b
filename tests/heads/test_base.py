"""What the base classes make of a head: from its blocks alone, and from its rows alone."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests import reference
from tests.contract import HeadContract
from vqjax.heads import Head
from vqjax.heads.linear import LinearHead
from vqjax.ops.linear_decoding import linear_blocks
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import ScoreOptions
from vqjax.types import Dtype
from vqjax.variables import Initializer, Variable, integer_variable, row_init


class TemperedHead(Head):
  """softmax(scale · hidden · weightᵀ), with one learned scale.

  Attributes:
    weight_init: initialiser of the [V, D] weight.
    dtype: dtype to which the weight is rounded; None: its own.
  """

  weight_init: Initializer = row_init
  dtype: Dtype | None = None

  def declare(self):
    """The weight [V, D] and the scale."""
    shape, axes = (self.vocab, self.dim), ("vocab", "table_embed")
    return {
      "weight": Variable(shape, axes, self.weight_init, pad_value=0),
      "scale": Variable((), (), nn.initializers.ones_init()),
    }

  def flops_per_token(self):
    """A product of width D for each token of the vocabulary."""
    return 2 * self.vocab * self.dim

  def _scores(self, arrays, hidden):
    weight = arrays["weight"].astype(self.dtype or jnp.float32)
    options = ScoreOptions(vocab_axis=self.vocab_axis)
    scaled = arrays["scale"] * hidden.astype(jnp.float32)
    return linear_blocks(scaled, weight, None, self.vocab, options)


class TestTemperedHead(HeadContract):
  cases: ClassVar = {"plain": TemperedHead}

  def reference_logits(self, head, variables, hidden):
    return variables["params"]["scale"] * (hidden @ variables["params"]["weight"].T)


class QuotientRemainderHead(LinearHead):
  """The head of CONTRIBUTING.md.

  Attributes:
    remainders: number of rows of the second table, R.
    row_init: initialiser of both tables.
  """

  remainders: int
  row_init: Initializer = row_init

  def declare(self):
    """The tables [ceil(V / R), D] and [R, D], and the numbers of the tokens [V]."""
    v, d, r = self.vocab, self.dim, self.remainders
    axes = "shared_codes", "width"
    return {
      "quotient": Variable((-(-v // r), d), axes, self.row_init, self.param_dtype),
      "remainder": Variable((r, d), axes, self.row_init, self.param_dtype),
      "token": integer_variable((v,), ("vocab",), lambda: jnp.arange(v), pad_value=0),
    }

  def _rows(self, arrays):
    return RowFactory(arrays["token"], (arrays["quotient"], arrays["remainder"]), compose)


def compose(token_W, tables):
  quotient_QD, remainder_RD = tables
  return quotient_QD[token_W // len(remainder_RD)] + remainder_RD[token_W % len(remainder_RD)]


class TestQuotientRemainderHead(HeadContract):
  cases: ClassVar = {"ten": lambda v, d: QuotientRemainderHead(v, d, remainders=10)}

  def rows(self, head, variables):
    tables, token = variables["params"], np.arange(head.vocab)
    return tables["quotient"][token // 10] + tables["remainder"][token % 10]

  def reference_logits(self, head, variables, hidden):
    return hidden @ self.rows(head, variables).T

  def bfloat16_logits(self, head, variables, hidden):
    return hidden @ reference.in_bfloat16(self.rows(head, variables)).T
