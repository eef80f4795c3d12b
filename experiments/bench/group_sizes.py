"""Which group size needs the least memory (the grouped paper's Figure 3), by the compiler?"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.stepping import Stepping
from experiments.bench.timing import temp_bytes
from experiments.bench.training_step import Contender, Decoder, experiment, memory, say
from vqjax import GroupedHead, Head, assign
from vqjax.heads.workload import loss_and_gradient
from vqjax.ops import groups as group_ops
from vqjax.ops import softmax

NEAR = 1.02
"""Of the least memory: so close it does not matter which size it is."""


def equal(vocab: int, size: int) -> tuple[int, ...]:
  """Groups of `size` tokens, and one of those that are left over."""
  whole, left = divmod(vocab, size)
  return (size,) * whole + ((left,) if left else ())


class UntiledHead(GroupedHead):
  """The grouped head as the paper's Figure 5 has it: all [N, G] and [N, S] at once."""

  def log_prob(self, hidden, tokens):
    """Log-probability of `tokens` in nats."""
    group, slot = group_ops.group_and_slot(tokens, self.starts)
    shared = softmax.linear_scores(hidden, self.array("slot_weight"))
    scores = group_ops.scaled(shared, self.array("scale")[group], self.array("shift")[group])
    size = jnp.asarray(np.diff(self.starts), jnp.int32)[group]
    of_group = jnp.take_along_axis(self.log_group(hidden), group[..., None], axis=-1)[..., 0]
    return of_group + group_ops.log_prob_in_group(scores, size, slot)


def memory_at(decoder: Decoder, size: int) -> dict[str, int]:
  """Bytes of a training step, and of the loss and gradient of its head alone, tiled and untiled.

  A step also has the decoder's arrays, which hide what is less; its blocks are recomputed in the
  backward pass.
  """
  groups = equal(decoder.vocab, size)
  say(f"compiling {len(groups)} groups of {size}")
  head = GroupedHead(decoder.vocab, decoder.dim, sizes=groups)
  untiled = UntiledHead(decoder.vocab, decoder.dim, sizes=groups)
  step = Stepping(experiment(decoder, Contender(lambda *_: head)))
  tokens = decoder.batch * decoder.context
  alone = {"head_temp_bytes": _alone(head, tokens), "untiled_temp_bytes": _alone(untiled, tokens)}
  return {"size": size, "groups": len(groups)} | memory(step) | alone


def _alone(head: Head, tokens: int) -> int:
  function, arguments = loss_and_gradient(head, tokens)
  return temp_bytes(jax.jit(function).lower(*arguments).compile())


def least(vocab: int, rows: Sequence[dict[str, int]]) -> dict[str, Any]:
  """The sizes with the least memory, those within `NEAR` of it, and what formulas say."""
  kinds = {"step": "peak_bytes", "head": "head_temp_bytes", "untiled": "untiled_temp_bytes"}
  corrected = round(vocab / assign.memory_groups(vocab))
  return {"sqrt": math.isqrt(vocab), "corrected": corrected} | {
    name: _least([(row["size"], row[kind]) for row in rows]) for name, kind in kinds.items()
  }


def _least(found: Sequence[tuple[int, int]]) -> dict[str, Any]:
  size, fewest = min(found, key=lambda one: one[1])
  near = [size for size, count in found if count <= NEAR * fewest]
  return {"size": size, "bytes": fewest, "near": [min(near), max(near)]}
