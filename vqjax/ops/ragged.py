"""Linear layers of which every group has its own: products, and log-probabilities of slots.

  log softmax(W_g h + b_g)[slot],  g the group of the token

Tokens are sorted by group, so that the tokens of a group are consecutive and meet its weight in one
ragged matrix product: no token gets a copy of a weight, and only its own group is scored. The
backward pass recomputes the scores from the saved normalisers. Many tokens come in parts, so that
no array [N, S] of all of them exists. Source: LLM Vocabulary Compression for Low-Compute
Environments, Figure 4.
"""

# Tokens sorted by group meet the weight of each group once:
#
#   tokens   a a a a a b b d d d        counts = [5, 2, 0, 3]
#   blocks   |a a|a a|a.|b b|d d|d.|    on CPUs and GPUs: a loop of products of one matrix each,
#                                       where the rest of a block, `.`, holds rows of the next
#                                       group, which the next block overwrites
#
# TPUs have a kernel of their own for it, `lax.ragged_dot_general`.

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from vqjax.ops import precision, vocab_parallel
from vqjax.types import Dtype, MeshAxes

__all__ = []

# Rows of one group that one step of the loop multiplies.
#
# At 4096 rows in 224 groups, 8 to 24 are equally fast; larger blocks hold more rows of other
# groups.
_BLOCK = 16


class _Linears(NamedTuple):
  """A layer for each group: weight [G, S, D], bias [G, S] or None, sizes [G]."""

  weight: Array
  bias: Array | None
  sizes: Array


class _Tokens(NamedTuple):
  """hidden [N, D], group [N] (G for a token of no group) and slot [N]."""

  hidden: Array
  group: Array
  slot: Array


def unshared_slot_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "G S D"],
  bias: Float[Array, "G S"] | None,
  sizes: Int[Array, "G"],
  group: Int[Array, "*B"],
  slot: Int[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a slot among those of its token's group.

  Sums accumulate in float32 and the result is float32; it is -inf for a slot that the group lacks.
  Differentiable in `hidden`, `weight` and `bias`, in reverse mode. Inside of `vocab_axis` the
  arrays `weight`, `bias` and `sizes` hold the device's own groups, and `group` counts over the
  groups of all devices. On a mesh each device of the other axes sorts its own tokens.

  Args:
    weight: the weight of each group's layer; rows from the group's size on are not used.
  """
  if not group.size:
    return jnp.zeros(group.shape, jnp.float32)
  axis, groups = vocab_parallel.inside(vocab_axis), sizes.shape[0]
  local = (group - vocab_parallel.first_row(axis, groups)).reshape(-1)
  is_local = (local >= 0) & (local < groups)
  tokens = _Tokens(
    hidden.reshape(-1, hidden.shape[-1]), jnp.where(is_local, local, groups), slot.reshape(-1)
  )
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  # A group that only pads a device's shard has no slot, and log 0 has no gradient: give it one.
  linears = _Linears(weight, bias, jnp.maximum(sizes, 1))
  # The transpose of `varying` is a psum: widened before it, so that it adds float32 numbers.
  wide = jax.tree.map(lambda x: x.astype(vocab_parallel.summed_dtype(x.dtype)), (linears, tokens))
  linears, tokens = jax.tree.map(
    lambda x, like: x.astype(like.dtype), vocab_parallel.varying(wide), (linears, tokens)
  )
  log_prob = _log_prob(dtype, linears, tokens).reshape(group.shape)
  return lax.psum(log_prob, axis) if axis else log_prob


# The loop of `_ragged_product` has a dynamic length and so no reverse mode of its own.
@precision.custom_vjp
def _log_prob(dtype, linears: _Linears, tokens: _Tokens) -> Array:
  """Log-probabilities [N] of the slots; 0 for tokens of no group."""
  return _forward(dtype, linears, tokens)[0]


def _forward(dtype, linears, tokens):
  forward = functools.partial(_local_forward, dtype)
  (log_prob, log_z), _ = _on_each_device(forward, linears, (tokens,), None)
  return log_prob, (linears, tokens, log_z)


def _backward(dtype, saved, cotangent):
  linears, tokens, log_z = saved
  backward = functools.partial(_local_backward, dtype)
  d_hidden, (d_weight, d_bias) = _on_each_device(
    backward, linears, (tokens, log_z, cotangent), (linears.weight, linears.bias)
  )
  narrow = lambda x, like: None if like is None else x.astype(like.dtype)
  d_linears = _Linears(narrow(d_weight, linears.weight), narrow(d_bias, linears.bias), None)
  return d_linears, _Tokens(narrow(d_hidden, tokens.hidden), None, None)


_log_prob.defvjp(*map(vocab_parallel.own_promotion, (_forward, _backward)))


def _on_each_device(function, linears, per_token, summed):
  """The (values [N, ...], sums over tokens) of `_in_parts(function)`, on all devices.

  Each device of the automatic axes computes its own tokens, and the sums are added up.
  """
  shards, n = vocab_parallel.token_shards(None), jax.tree.leaves(per_token)[0].shape[0]
  if shards.count == 1:
    return _in_parts(function, linears, per_token, summed)

  def local(linears, per_token, summed):
    own = jax.tree.map(lambda x: x[0], per_token)
    given = vocab_parallel.varying((linears, own, summed), *shards.axes)
    values, sums = _in_parts(function, *given)
    return jax.tree.map(lambda x: x[None], values), lax.psum(sums, shards.axes)

  spec = P(shards.axes)
  mapped = jax.shard_map(
    local, in_specs=(P(), spec, P()), out_specs=(spec, P()), axis_names=set(shards.axes)
  )
  # Outside of jit a shard_map that leaves axes automatic is an error.
  values, sums = jax.jit(mapped)(linears, jax.tree.map(shards.split, per_token), summed)
  return jax.tree.map(lambda x: shards.join(x, n), values), sums


# Scores of a part of the tokens: 64 MiB.
_SCORES = 2**24


def _in_parts(function, linears, per_token, summed):
  """`function` of parts of the tokens, one after another: its values, and its sums in the end.

  It gets the sums of the parts before, with the shapes of `summed`, and adds to them in place: they
  are as large as the weight.
  """
  start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), summed)
  start = vocab_parallel.varying((start, linears, per_token))[0]
  n = len(per_token[0].slot)
  size = max(1, _SCORES // linears.weight.shape[1])
  if n <= size:
    return function(linears, per_token, start)
  count = -(-n // size)
  size = -(-n // count)
  pad = lambda x: jnp.pad(x, [(0, count * size - n), *[(0, 0)] * (x.ndim - 1)])
  tokens, *further = jax.tree.map(pad, per_token)
  # Padding is of no group, which adds nothing.
  tokens = tokens._replace(group=tokens.group.at[n:].set(linears.sizes.shape[0]))
  split = lambda x: x.reshape(count, size, *x.shape[1:])

  def step(sums, part):
    values, sums = function(linears, part, sums)
    return sums, values

  sums, values = lax.scan(step, start, jax.tree.map(split, (tokens, *further)))
  return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:n], values), sums


def _local_forward(dtype, linears, per_token, sums):
  """Log-probabilities and log-normalisers; nothing is added to the sums."""
  (tokens,) = per_token
  order, counts = jnp.argsort(tokens.group), _counts(linears, tokens)
  by_group = jax.tree.map(lambda x: x[order], tokens)
  scores_NS = _scores(dtype, linears, by_group, counts)
  log_z = jax.nn.logsumexp(scores_NS, axis=-1)
  own = jnp.take_along_axis(scores_NS, by_group.slot[:, None], axis=-1)[:, 0]
  log_prob = jnp.where(_has_group(linears, by_group), own - log_z, 0.0)
  return (_unsort(log_prob, order), _unsort(log_z, order)), sums


def _local_backward(dtype, linears, saved, sums):
  """The cotangent of hidden, and the sums with those of weight and bias, all in float32."""
  order, counts = jnp.argsort(saved[0].group), _counts(linears, saved[0])
  by_group, log_z, cotangent = jax.tree.map(lambda x: x[order], saved)
  has_group_N1 = _has_group(linears, by_group)[:, None]
  scores_NS = _scores(dtype, linears, by_group, counts)
  own_NS = jnp.arange(scores_NS.shape[1]) == by_group.slot[:, None]
  d_NS = (own_NS - jnp.exp(scores_NS - log_z[:, None])) * cotangent[:, None]
  # Rows of no group hold arbitrary scores, and a slot that is absent 0 · -inf.
  d_NS = jnp.where(has_group_N1 & ~jnp.isneginf(scores_NS), d_NS, 0.0)
  operand_NS = d_NS.astype(dtype)
  d_weight, d_bias = sums
  d_weight = _with_ragged_outer(d_weight, operand_NS, by_group.hidden.astype(dtype), counts)
  if d_bias is not None:
    ones_N1 = jnp.ones_like(d_NS[:, :1])
    d_bias = _with_ragged_outer(d_bias[..., None], d_NS, ones_N1, counts)[..., 0]
  d_hidden = _ragged_product(operand_NS, linears.weight, counts, contracted=1)
  return _unsort(jnp.where(has_group_N1, d_hidden, 0.0), order), (d_weight, d_bias)


def _counts(linears, tokens):
  """Number of tokens of each group, [G]; `drop` leaves out the tokens of no group."""
  zeros = vocab_parallel.varying((jnp.zeros_like(linears.sizes), tokens.group))[0]
  return zeros.at[tokens.group].add(1, mode="drop")


def _has_group(linears, tokens):
  return tokens.group < linears.sizes.shape[0]


def _scores(dtype, linears, tokens, counts):
  """Scores [N, S] of tokens sorted by group; -inf for slots that a group lacks."""
  scores_NS = _ragged_product(tokens.hidden.astype(dtype), linears.weight, counts, contracted=2)
  # Tokens of no group read the last group's size, so that their scores have a finite maximum.
  group = jnp.minimum(tokens.group, linears.sizes.shape[0] - 1)
  if linears.bias is not None:
    scores_NS = scores_NS + linears.bias[group].astype(jnp.float32)
  present_NS = jnp.arange(scores_NS.shape[1]) < linears.sizes[group][:, None]
  return jnp.where(present_NS, scores_NS, -jnp.inf)


def _unsort(sorted_N, order):
  return jnp.zeros_like(sorted_N).at[order].set(sorted_N, unique_indices=True)


def product(
  rows: Float[Array, "N X"], weight: Float[Array, "G X Y"], counts: Int[Array, "G"]
) -> Float[Array, "N Y"]:
  """Products of rows with the matrices of their groups, in float32.

  Rows are sorted by group: the first counts[0] rows are of group 0, and so on, up to the last row.
  Differentiable in `rows` and `weight`, in reverse mode. The weight is cast to the dtype of the
  rows.
  """
  return _product(None, rows, weight, counts)


@precision.custom_vjp
def _product(_, rows, weight, counts):
  return _ragged_product(rows, weight, counts, contracted=1)


def _product_forward(_, rows, weight, counts):
  return _ragged_product(rows, weight, counts, contracted=1), (rows, weight, counts)


def _product_backward(_, saved, cotangent):
  rows, weight, counts = saved
  operand = cotangent.astype(rows.dtype)
  d_rows = _ragged_product(operand, weight, counts, contracted=2)
  d_weight = _with_ragged_outer(jnp.zeros(weight.shape, jnp.float32), rows, operand, counts)
  return d_rows.astype(rows.dtype), d_weight.astype(weight.dtype), None


_product.defvjp(*map(vocab_parallel.own_promotion, (_product_forward, _product_backward)))


def _ragged_product(
  rows: Float[Array, "N X"],
  weight: Float[Array, "G P Q"],
  counts: Int[Array, "G"],
  contracted: int,
) -> Float[Array, "N Y"]:
  """Products of rows with the matrices of their groups.

  They are contracted along axis 1 or 2 (`contracted`) of `weight`. The first counts[0] rows are of
  group 0, and so on; rows beyond all groups get arbitrary values.
  The weight is cast to the dtype of the rows, and the result is float32. XLA lowers ragged products
  for CPUs and GPUs to dense ones over all groups, so there a loop multiplies blocks of one group's
  rows.
  `jax.vmap` runs the product once for each element.
  """
  run = _product_native if vocab_parallel.platform() == "tpu" else _product_by_blocks
  return sequential_vmap(functools.partial(run, contracted))(rows, weight, counts)


def _with_ragged_outer(
  sums: Float[Array, "G X Y"],
  left: Float[Array, "N X"],
  right: Float[Array, "N Y"],
  counts: Int[Array, "G"],
) -> Float[Array, "G X Y"]:
  """`sums`, with left[n] · right[n]ᵀ of the rows n of each group added, in float32.

  Rows are sorted by group as in `_ragged_product`. Rows beyond all groups are left out, even if
  they hold nan.
  """
  run = _outer_native if vocab_parallel.platform() == "tpu" else _outer_by_blocks
  return sequential_vmap(run)(sums, left, right, counts)


def _product_native(contracted, rows, weight, counts):
  numbers = lax.RaggedDotDimensionNumbers((([1], [contracted]), ([], [])), [0], [0])
  return lax.ragged_dot_general(
    rows, weight.astype(rows.dtype), counts, numbers, preferred_element_type=jnp.float32
  )


def _outer_native(sums, left, right, counts):
  numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
  return sums + lax.ragged_dot_general(
    left, right, counts, numbers, preferred_element_type=jnp.float32
  )


class _Blocks(NamedTuple):
  """Blocks of rows of one group: number; group, first row and size of each."""

  count: Array
  group: Array
  start: Array
  size: Array


def _blocks(counts, n):
  """The blocks of n rows; the last of a group may reach into the next group."""
  rows_end, blocks = jnp.cumsum(counts), -(-counts // _BLOCK)
  blocks_end = jnp.cumsum(blocks)
  # Each nonempty group, of which there are at most min(n, G), may end with one partial block.
  groups = counts.shape[0] if jax.export.is_symbolic_dim(n) else min(n, counts.shape[0])
  limit = -(-n // _BLOCK) + groups
  index, group = jnp.arange(limit), jnp.arange(counts.shape[0])
  index, group, _ = vocab_parallel.varying((index, group, counts))
  group = jnp.repeat(group, blocks, total_repeat_length=limit)
  start = (rows_end - counts)[group] + (index - (blocks_end - blocks)[group]) * _BLOCK
  return _Blocks(blocks_end[-1], group, start, jnp.clip(rows_end[group] - start, 0, _BLOCK))


def _padded(rows):
  """Rows with one block of zeros: `dynamic_slice` shifts a slice that overruns."""
  return jnp.concatenate([rows, jnp.zeros((_BLOCK, rows.shape[1]), rows.dtype)])


def _dot(left, right, contract):
  return lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=jnp.float32)


def _product_by_blocks(contracted, rows, weight, counts):
  n, blocks = rows.shape[0], _blocks(counts, rows.shape[0])
  rows = _padded(rows)

  def step(index, out):
    start = blocks.start[index]
    rows_BX = lax.dynamic_slice_in_dim(rows, start, _BLOCK)
    matrix = weight[blocks.group[index]].astype(rows.dtype)
    if contracted == 1:
      out_BY = _dot(rows_BX, matrix, ((1,), (0,)))
    else:
      # The barrier keeps XLA from folding the transposition into the product, which is faster where
      # both operands are read along their rows.
      out_BY = lax.optimization_barrier(_dot(matrix, rows_BX, ((1,), (1,)))).T
    # Rows beyond the group are overwritten by the blocks that follow.
    return lax.dynamic_update_slice_in_dim(out, out_BY, start, axis=0)

  empty = jnp.zeros((n + _BLOCK, weight.shape[3 - contracted]), jnp.float32)
  empty = vocab_parallel.varying((empty, rows, weight, counts))[0]
  return lax.fori_loop(0, blocks.count, step, empty)[:n]


def _outer_by_blocks(sums, left, right, counts):
  blocks = _blocks(counts, left.shape[0])
  left, right = _padded(left), _padded(right)

  def step(index, sums):
    own_B1 = (jnp.arange(_BLOCK) < blocks.size[index])[:, None]
    cut = lambda x: lax.dynamic_slice_in_dim(x, blocks.start[index], _BLOCK)
    # Both operands: a nan in another group's row would survive a factor of zero.
    left_BX, right_BY = (jnp.where(own_B1, cut(x), 0) for x in (left, right))
    return sums.at[blocks.group[index]].add(_dot(left_BX, right_BY, ((0,), (0,))))

  sums = vocab_parallel.varying((sums, left, right, counts))[0]
  return lax.fori_loop(0, blocks.count, step, sums)
