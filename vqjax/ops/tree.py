"""Tree softmax: a distribution over the leaves of a binary tree.

  p(leaf) = product over its path of sigmoid(±hidden · weight[node]),  + if the leaf is on the left

Leaves are numbered from left to right, and node k separates leaf k from leaf k + 1: leaf j is on
the left of an ancestor k if and only if j <= k. Row k of the weight belongs to node k; the last row
belongs to no node, so that rows are sharded over devices as leaves are. The nodes from the root to
a leaf are its path [L], padded with -1. Sources: Morin and Bengio 2005, Hierarchical probabilistic
neural network language model; Mikolov et al. 2013.
"""

# In the numbering of this file a path needs no bits for its turns. The tree of leaves 0 to 3:
#
#              node 1
#           /          \           the path of leaf 2 is [1, 2]: it is to the right of node 1,
#        node 0      node 2        since 2 > 1, and to the left of node 2, since 2 <= 2
#        /    \      /    \
#       0      1    2      3
#
# Nodes of consecutive leaves are consecutive rows, so that a block of leaves reads a block of rows.

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.types import Dtype, MeshAxes

__all__ = []


def leaf_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "*B L"],
  leaves: Int[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a leaf for each vector, given the path to it.

  One level of all paths is scored at a time: O(N·L·D) time, and no array larger than [N, D], [N, L]
  and the weight. Inside of `vocab_axis` the weight is the device's own rows, and nodes count over
  the rows of all devices.
  """
  axis, shards = vocab_parallel.inside(vocab_axis), vocab_parallel.token_shards(vocab_axis)
  hidden_ND, path_NL = hidden.reshape(-1, hidden.shape[-1]), paths.reshape(-1, paths.shape[-1])
  # Node k separates the leaves up to k, on its left, from those after k.
  left_NL = path_NL >= leaves.reshape(-1, 1)
  local_NL = jnp.where(path_NL < 0, -1, path_NL - vocab_parallel.first_row(axis, weight.shape[0]))
  operands = shards.split(hidden_ND), weight, shards.split(local_NL), shards.split(left_NL)
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  log_prob_PN = _leaf_log_prob(dtype, shards, *vocab_parallel.varying(operands))
  log_prob = shards.join(log_prob_PN, hidden_ND.shape[0]).reshape(leaves.shape)
  return lax.psum(log_prob, axis) if axis else log_prob


# JAX's own gradient of the scan would store the rows of all levels, [L, N, D].
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _leaf_log_prob(dtype, shards, hidden_PND, weight, path_PNL, left_PNL):
  """Sum of the log-probabilities of the nodes that are on this device."""
  del shards

  def step(total_PN, level):
    path_PN, left_PN = level
    node = _score_nodes(dtype, hidden_PND, weight, path_PN)
    log_prob_PN = jax.nn.log_sigmoid(jnp.where(left_PN, node.score, -node.score))
    return total_PN + jnp.where(node.is_local, log_prob_PN, 0.0), None

  start = jnp.zeros(hidden_PND.shape[:2], jnp.float32)
  start = vocab_parallel.varying((start, hidden_PND, weight, path_PNL))[0]
  return lax.scan(step, start, _levels(path_PNL, left_PNL))[0]


def _levels(*arrays):
  return tuple(jnp.moveaxis(x, 2, 0) for x in arrays)


class _Nodes(NamedTuple):
  """A node for each vector: index, row, hidden · row; arbitrary if not local."""

  index: Array
  is_local: Array
  row: Array
  score: Array


def _score_nodes(dtype, hidden, weight, local):
  is_local = (local >= 0) & (local < weight.shape[0])
  index = jnp.where(is_local, local, 0)
  row = weight[index].astype(dtype)
  # Operands are rounded to `dtype`, as a matrix product would take them, and summed in float32.
  product = hidden.astype(dtype).astype(jnp.float32) * row.astype(jnp.float32)
  return _Nodes(index, is_local, row, product.sum(axis=-1))


def _forward(dtype, shards, *operands):
  return _leaf_log_prob(dtype, shards, *operands), operands


def _backward(dtype, shards, operands, cotangent_PN):
  hidden_PND, weight, path_PNL, left_PNL = operands

  def step(sums, level):
    d_hidden_PND, d_weight_PVD = sums
    path_PN, left_PN = level
    node = _score_nodes(dtype, hidden_PND, weight, path_PN)
    slope_PN = jnp.where(left_PN, jax.nn.sigmoid(-node.score), -jax.nn.sigmoid(node.score))
    d_PN1 = jnp.where(node.is_local, slope_PN * cotangent_PN, 0.0)[..., None]
    # Shards stay apart: a sum over them would be an all-reduce at every level.
    add = jax.vmap(lambda rows, index, d: rows.at[index].add(d))
    d_weight_PVD = add(d_weight_PVD, node.index, d_PN1 * hidden_PND.astype(jnp.float32))
    return (d_hidden_PND + d_PN1 * node.row.astype(jnp.float32), d_weight_PVD), None

  start = (
    jnp.zeros(hidden_PND.shape, jnp.float32),
    shards.keep(jnp.zeros((hidden_PND.shape[0], *weight.shape), jnp.float32)),
  )
  start = vocab_parallel.varying((*start, hidden_PND, weight, path_PNL))[:2]
  (d_hidden, d_weight), _ = lax.scan(step, start, _levels(path_PNL, left_PNL))
  d_weight = d_weight.sum(axis=0).astype(weight.dtype)
  return d_hidden.astype(hidden_PND.dtype), d_weight, None, None


_leaf_log_prob.defvjp(*map(vocab_parallel.own_promotion, (_forward, _backward)))


def draw_leaves(
  key: PRNGKeyArray,
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "V L"],
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Int[Array, "*B"]:
  """A leaf for each vector, drawn node by node from the root in O(N·L·D) time.

  Inside of `vocab_axis` weight and paths are the device's own rows, and all devices draw together.
  """
  axis = vocab_parallel.inside(vocab_axis)
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)

  def step(leaf, level):
    # `leaf` is any leaf below the current node, whose path holds the next one. Node k has leaf k on
    # its left and leaf k + 1 on its right.
    node = vocab_parallel.sharded_lookup(
      lax.dynamic_index_in_dim(paths, level, 1, False), leaf, axis
    )
    local = jnp.where(node < 0, -1, node - vocab_parallel.first_row(axis, weight.shape[0]))
    scored = _score_nodes(dtype, hidden, weight, local)
    score = jnp.where(scored.is_local, scored.score, 0.0)
    score = lax.psum(score, axis) if axis else score
    # P(score + logistic noise > 0) = sigmoid(score).
    noise = jax.random.logistic(jax.random.fold_in(key, level), leaf.shape)
    below = jnp.where(score + noise > 0, node, node + 1)
    return jnp.where(node < 0, leaf, below), None

  start = jnp.zeros(hidden.shape[:-1], jnp.int32)
  kind = jax.eval_shape(lambda: step(start, 0)[0])
  start = vocab_parallel.varying(start, *vocab_parallel.varies_over(kind))
  return lax.scan(step, start, jnp.arange(paths.shape[1]))[0]


def all_log_probs(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "V L"],
  dtype: Dtype | None = None,
) -> Float[Array, "*B V"]:
  """Log-probabilities of all leaves in nats."""
  left = paths >= jnp.arange(paths.shape[0])[:, None]
  log_prob = _log_probs(hidden.reshape(-1, hidden.shape[-1]), weight, paths, left, dtype)
  return log_prob.reshape(*hidden.shape[:-1], paths.shape[0])


def _log_probs(hidden_ND, row_RD, path_WL, left_WL, dtype):
  """Log-probabilities [N, W] of leaves whose paths index the rows, padded with -1."""
  score_RN = softmax.linear_scores(row_RD, hidden_ND, dtype=dtype)
  r, n = score_RN.shape
  # Transposed, so that a leaf gathers whole rows of n numbers, one for each level: the first R rows
  # hold the left sides, the next R the right sides, and the last one is for padding.
  sides = [
    jax.nn.log_sigmoid(score_RN),
    jax.nn.log_sigmoid(-score_RN),
    jnp.zeros((1, n), jnp.float32),
  ]
  table = jnp.concatenate(sides)
  index_WL = jnp.where(path_WL < 0, 2 * r, jnp.where(left_WL, path_WL, r + path_WL))
  start = jnp.zeros((index_WL.shape[0], n), jnp.float32)
  start = vocab_parallel.varying((start, table, index_WL))[0]
  return lax.scan(lambda total, index_W: (total + table[index_W], None), start, index_WL.T)[0].T


def leaf_blocks(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "V L"],
  tokens: Int[Array, "V"],
  vocab: int,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> sampling.Blocks:
  """Blocks of the log-probabilities of consecutive leaves.

  The paths of consecutive leaves contain the nodes between them, which are consecutive rows, and
  otherwise only ancestors of the first leaf (to the left) and of the last leaf (to the right), at
  the same levels: 2·L further rows. Inside of `vocab_axis` weight, paths and tokens are the
  device's own rows.
  """
  axis, (rows, levels) = vocab_parallel.inside(vocab_axis), paths.shape
  first = vocab_parallel.first_row(axis, rows)
  batch = hidden.shape[:-1]
  hidden_ND = hidden.reshape(-1, hidden.shape[-1])
  width = sampling.block_width(math.prod(batch), rows)
  beyond = _beyond(weight, paths, axis)

  def edge_rows(leaf, beyond_LD):
    node_L = paths[leaf] - first
    is_local = (node_L >= 0) & (node_L < rows)
    return jnp.where(is_local[:, None], weight[jnp.where(is_local, node_L, 0)], beyond_LD)

  def block(index):
    start = jnp.minimum(index * width, rows - width)
    leaf_W = start + jnp.arange(width, dtype=jnp.int32)
    between = lax.dynamic_slice_in_dim(weight, start, width)
    row_RD = jnp.concatenate(
      [between, edge_rows(start, beyond[0]), edge_rows(start + width - 1, beyond[1])]
    )
    path_WL = paths[leaf_W]
    node_WL, level_L = path_WL - first - start, width + jnp.arange(levels)
    # Left of the block: ancestors of its first leaf; right of it: ancestors of its last leaf.
    index_WL = jnp.where(
      node_WL < 0, level_L, jnp.where(node_WL < width, node_WL, level_L + levels)
    )
    index_WL = jnp.where(path_WL < 0, -1, index_WL)
    left_WL = path_WL >= first + leaf_W[:, None]
    log_prob_WN = _log_probs(hidden_ND, row_RD, index_WL, left_WL, dtype).T
    real_W = (leaf_W >= index * width) & (first + leaf_W < vocab)
    log_prob_WB = sampling.mask_rows(log_prob_WN.reshape(width, *batch), real_W)
    return log_prob_WB, jnp.where(real_W, tokens[leaf_W], 0)

  return sampling.Blocks(-(-rows // width), block, tuple(batch), axis)


def _beyond(weight, paths, axis):
  """Rows of the ancestors of this device's first and last leaves, [2, L, D]."""
  if axis is None:
    # All nodes are on this device: `edge_rows` does not read this.
    return jnp.zeros((2, paths.shape[1], 1), weight.dtype)
  edges = vocab_parallel.gathered(paths[jnp.array([0, paths.shape[0] - 1])], axis)
  return vocab_parallel.sharded_lookup(weight, jnp.maximum(edges, 0), axis)[lax.axis_index(axis)]
