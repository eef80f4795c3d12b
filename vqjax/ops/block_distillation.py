"""How far is a student whose scores come in blocks from a linear teacher, without logits of either?

The student's blocks say which tokens they hold, in any order; the teacher's rows of these tokens
are gathered. Only [*B]-sized sums survive from block to block. The gradient computes each block
once more instead of keeping it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import divergence, softmax
from vqjax.ops.divergence import SoftTargetLoss
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.sampling import Blocks
from vqjax.types import Dtype


def block_soft_target_loss(
  blocks: Blocks,
  teacher_hidden: Float[Array, "*B E"],
  teacher_weight: Float[Array, "V E"] | RowFactory,
  teacher_bias: Float[Array, "V"] | None = None,
  *,
  temperature: float | int = 1.0,
  teacher_softcap: float | int | None = None,
  dtype: Dtype | None = None,
) -> SoftTargetLoss:
  """Cross-entropy and divergence of p = softmax(blocks) from q = softmax(teacher), exactly.

  The scores of both are divided by `temperature`. Differentiable, in reverse mode, in what the
  blocks are made of; the teacher is taken as it is. A token that the student scores -inf cannot be
  told from a place that fills up a block: it is left out of both distributions.

  Args:
    blocks: the student's scores; inside of a mesh axis each device has blocks of its own.
    teacher_hidden: the teacher's vector for each row of the blocks.
    teacher_weight: the teacher's row for each token, all of them on each device.
    teacher_bias: the teacher's score for each token.
    temperature: divides the scores of both, after the cap.
    teacher_softcap: largest absolute score of the teacher.
    dtype: dtype of the operands of the teacher's matrix product; by default its own.

  Raises:
    ValueError: a teacher of other rows, of another width or bias than its weight, or a temperature
      or a cap that is not positive.
  """
  weight = as_row_factory(teacher_weight)
  _check(blocks, teacher_hidden, weight, teacher_bias, temperature, teacher_softcap)
  hidden, weight, bias = lax.stop_gradient((teacher_hidden, weight, teacher_bias))

  @jax.checkpoint
  def step(sums, index):
    score_BW, token_W = blocks.block(index)
    bias_W = None if bias is None else bias[token_W]
    teacher_BW = softmax.linear_scores(hidden, weight.at(token_W), bias_W, dtype, teacher_softcap)
    score_BW = score_BW.astype(jnp.float32)
    teacher_BW = jnp.where(jnp.isneginf(score_BW), -jnp.inf, teacher_BW)
    return divergence.merged(sums, score_BW / temperature, teacher_BW / temperature)

  sums = blocks.fold(step, divergence.nothing_yet(blocks.batch))
  return divergence.loss(divergence.reduced(sums, blocks.axis))


def _check(blocks, hidden, weight, bias, temperature, softcap):
  if hidden.shape[:-1] != tuple(blocks.batch):
    raise ValueError(
      f"teacher_hidden {hidden.shape} is not of the rows {tuple(blocks.batch)} of the blocks"
    )
  if hidden.shape[-1] != weight.shape[-1]:
    raise ValueError(
      f"teacher_weight {weight.shape} does not fit hidden {hidden.shape}: it is [V, E]"
    )
  if bias is not None and bias.shape != weight.shape[:1]:
    raise ValueError(f"a bias of shape {bias.shape} does not fit {weight.shape}: it is [V]")
  for name, value in (("temperature", temperature), ("teacher_softcap", softcap)):
    if value is not None and not value > 0:
      raise ValueError(f"{name} {value} is not positive; give a number above 0")
