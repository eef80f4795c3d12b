"""Which group size needs the least memory (the grouped paper's Figure 3), by the compiler?"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from experiments.grouped_cost import Contender, Decoder, experiment, memory, say
from experiments.stepping import Stepping
from experiments.timing import temp_bytes
from vqjax import GroupedHead
from vqjax.heads.workload import loss_and_gradient

FACTORED = 50_232
"""The number whose divisors the paper took for sizes: close to its V of 50,258, it has 64."""
DROPPED = 4
"""Divisors left out at either end."""
NEAR = 1.02
"""Of the least memory: so close it does not matter which size it is."""


def divisors(number: int) -> list[int]:
  """All of them, the least first."""
  return [n for n in range(1, number + 1) if number % n == 0]


def paper_sizes() -> list[int]:
  """The 56 group sizes of Figure 3."""
  return divisors(FACTORED)[DROPPED:-DROPPED]


def equal(vocab: int, size: int) -> tuple[int, ...]:
  """Groups of `size` tokens, and one of those that are left over."""
  whole, left = divmod(vocab, size)
  return (size,) * whole + ((left,) if left else ())


def memory_at(decoder: Decoder, size: int) -> dict[str, int]:
  """Bytes of a training step, and of the loss and gradient of its head alone.

  A step also has the decoder's arrays, which hide what is less; its blocks are recomputed in the
  backward pass.
  """
  groups = equal(decoder.vocab, size)
  say(f"compiling {len(groups)} groups of {size}")
  head = GroupedHead(decoder.vocab, decoder.dim, sizes=groups)
  step = Stepping(experiment(decoder, Contender(lambda *_: head)))
  alone, arguments = loss_and_gradient(head, decoder.batch * decoder.context)
  of_head = temp_bytes(jax.jit(alone).lower(*arguments).compile())
  return {"size": size, "groups": len(groups), "head_temp_bytes": of_head} | memory(step)


def least(vocab: int, rows: Sequence[dict[str, int]]) -> dict[str, Any]:
  """The sizes with the least memory, those within `NEAR` of it, and what formulas say."""
  return {
    "sqrt": math.isqrt(vocab),
    "step": _least([(row["size"], row["peak_bytes"]) for row in rows]),
    "head": _least([(row["size"], row["head_temp_bytes"]) for row in rows]),
  }


def _least(found: Sequence[tuple[int, int]]) -> dict[str, Any]:
  size, fewest = min(found, key=lambda one: one[1])
  near = [size for size, count in found if count <= NEAR * fewest]
  return {"size": size, "bytes": fewest, "near": [min(near), max(near)]}
