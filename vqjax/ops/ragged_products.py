"""How are rows multiplied, each with the matrix of its own group, when they lie group by group?

counts[g] rows of each group g, then rows of no group. Accelerators have ragged products. XLA writes
them out for a CPU as dense ones over all groups, so there a loop takes blocks of one group's rows.
Neither is batched by `jax.vmap`: they run once for each element.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from vqjax.ops import vocab_parallel

BLOCK = 16
"""Rows of one group that the loop takes at once.

At 4096 rows in 224 groups 8 to 24 are as fast; larger ones are filled up with more rows of others.
"""


def rows_times(
  rows: Float[Array, "N X"],
  weight: Float[Array, "G P Q"],
  counts: Int[Array, "G"],
  contracted: int,
) -> Float[Array, "N Y"]:
  """Rows, each times its group's matrix contracted along axis 1 or 2 of `weight`, in float32.

  The weight is cast to the dtype of the rows. Rows beyond all groups may come out as anything.
  """
  run = _looped_rows if vocab_parallel.platform() == "cpu" else _ragged_rows
  return sequential_vmap(functools.partial(run, contracted))(rows, weight, counts)


def outer(
  left: Float[Array, "N X"], right: Float[Array, "N Y"], counts: Int[Array, "G"]
) -> Float[Array, "G X Y"]:
  """The sum of left[n] · right[n]ᵀ over the rows n of each group, in float32; 0 of none."""
  run = _looped_outer if vocab_parallel.platform() == "cpu" else _ragged_outer
  return sequential_vmap(run)(left, right, counts)


def _ragged_rows(contracted, rows, weight, counts):
  numbers = lax.RaggedDotDimensionNumbers((([1], [contracted]), ([], [])), [0], [0])
  return lax.ragged_dot_general(
    rows, weight.astype(rows.dtype), counts, numbers, preferred_element_type=jnp.float32
  )


def _ragged_outer(left, right, counts):
  numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
  return lax.ragged_dot_general(left, right, counts, numbers, preferred_element_type=jnp.float32)


class _Blocks(NamedTuple):
  """Blocks of consecutive rows of one group: how many, and each one's group, first row and size."""

  count: Array
  group: Array
  start: Array
  size: Array


def _blocks(counts, n):
  """The blocks of n rows, in order; the last of a group may reach into the next group's rows."""
  rows_end, blocks = jnp.cumsum(counts), -(-counts // BLOCK)
  blocks_end = jnp.cumsum(blocks)
  most = -(-n // BLOCK) + min(n, counts.shape[0])
  index, group = jnp.arange(most), jnp.arange(counts.shape[0])
  index, group, _ = vocab_parallel.varying((index, group, counts))
  group = jnp.repeat(group, blocks, total_repeat_length=most)
  start = (rows_end - counts)[group] + (index - (blocks_end - blocks)[group]) * BLOCK
  return _Blocks(blocks_end[-1], group, start, jnp.clip(rows_end[group] - start, 0, BLOCK))


def _with_room(rows):
  """Rows with a block more at the end, so that no slice is moved back to fit."""
  return jnp.concatenate([rows, jnp.zeros((BLOCK, rows.shape[1]), rows.dtype)])


def _product(left, right, contract):
  return lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=jnp.float32)


def _looped_rows(contracted, rows, weight, counts):
  n, blocks = rows.shape[0], _blocks(counts, rows.shape[0])
  rows = _with_room(rows)

  def step(index, out):
    start = blocks.start[index]
    some_BX = lax.dynamic_slice_in_dim(rows, start, BLOCK)
    matrix = weight[blocks.group[index]].astype(rows.dtype)
    if contracted == 1:
      found_BY = _product(some_BX, matrix, ((1,), (0,)))
    else:
      # The barrier keeps the compiler from folding the transposition into the product: it is faster
      # along the rows of both.
      found_BY = lax.optimization_barrier(_product(matrix, some_BX, ((1,), (1,)))).T
    # What is written beyond the group is overwritten by the blocks that follow.
    return lax.dynamic_update_slice_in_dim(out, found_BY, start, axis=0)

  empty = jnp.zeros((n + BLOCK, weight.shape[3 - contracted]), jnp.float32)
  empty = vocab_parallel.varying((empty, rows, weight, counts))[0]
  return lax.fori_loop(0, blocks.count, step, empty)[:n]


def _looped_outer(left, right, counts):
  blocks = _blocks(counts, left.shape[0])
  left, right = _with_room(left), _with_room(right)

  def step(index, sums):
    own_B1 = (jnp.arange(BLOCK) < blocks.size[index])[:, None]
    own = lambda x: lax.dynamic_slice_in_dim(x, blocks.start[index], BLOCK)
    # Both, for what is no number in another group's rows would stay none at a factor of zero.
    left_BX, right_BY = (jnp.where(own_B1, own(x), 0) for x in (left, right))
    return sums.at[blocks.group[index]].add(_product(left_BX, right_BY, ((0,), (0,))))

  empty = jnp.zeros((counts.shape[0], left.shape[1], right.shape[1]), jnp.float32)
  empty = vocab_parallel.varying((empty, left, right, counts))[0]
  return lax.fori_loop(0, blocks.count, step, empty)
