"""The head of CONTRIBUTING.md: from its blocks alone the base class makes everything else."""

from typing import ClassVar

from flax import linen as nn

from tests.contract import HeadContract
from vqjax.heads import Head
from vqjax.ops.linear_decoding import linear_blocks
from vqjax.ops.scores import ScoreOptions
from vqjax.types import Dtype
from vqjax.variables import Initializer, Variable, row_init


class TemperedHead(Head):
  """softmax(scale · hidden · weightᵀ), with one learned scale.

  Attributes:
    weight_init: initialiser of the [V, D] weight.
    dtype: dtype of the product's operands; None: the promoted dtype of hidden and weight.
  """

  weight_init: Initializer = row_init
  dtype: Dtype | None = None

  def declare(self):
    axes = "vocab", "table_embed"
    return {
      "weight": Variable((self.vocab, self.dim), axes, self.weight_init, pad_value=0),
      "scale": Variable((), (), nn.initializers.ones_init()),
    }

  def flops_per_token(self):
    return 2 * self.vocab * self.dim

  def _scores(self, arrays, hidden):
    options = ScoreOptions(dtype=self.dtype, vocab_axis=self.vocab_axis)
    scaled = (arrays["scale"] * hidden).astype(hidden.dtype)
    return linear_blocks(scaled, arrays["weight"], None, self.vocab, options)


class TestTempered(HeadContract):
  cases: ClassVar = {"plain": TemperedHead}

  def reference_logits(self, head, variables, hidden):
    return variables["params"]["scale"] * (hidden @ variables["params"]["weight"].T)
