"""What distribution do the leaves of a binary tree have, a choice at each node of their path?

  p(leaf) = product over its path of sigmoid(±hidden · weight[node]),   + where the leaf lies left

Leaves are counted from left to right, and node k parts leaf k from leaf k + 1: leaf j lies left of
an ancestor k exactly where j <= k. Row k of the weight is that of node k; the last row is of no
node, so that rows are spread over devices as leaves are. A path is filled up with -1. Source: Morin
and Bengio 2005, Hierarchical probabilistic neural network language model; Mikolov et al. 2013.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vqjax.ops import sampling, softmax, vocab_parallel
from vqjax.types import Dtype


def leaf_log_prob(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "*B L"],
  leaves: Int[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a leaf for each vector, given the path to it.

  A level of all paths at a time: O(N·L·D) time, and no array larger than [N, D], [N, L] and the
  weight. Inside of `vocab_axis` the weight is the device's own rows, and nodes count over all.
  """
  axis, parts = vocab_parallel.inside(vocab_axis), vocab_parallel.token_shards(vocab_axis)
  flat = hidden.reshape(-1, hidden.shape[-1]), paths.reshape(-1, paths.shape[-1])
  left = flat[1] >= leaves.reshape(-1, 1)
  here = jnp.where(flat[1] < 0, -1, flat[1] - vocab_parallel.first_row(axis, weight.shape[0]))
  operands = parts.split(flat[0]), weight, parts.split(here), parts.split(left)
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)
  log_prob_PN = _leaf_log_prob((jnp.dtype(dtype), parts), *vocab_parallel.varying(operands))
  log_prob = parts.join(log_prob_PN, flat[0].shape[0]).reshape(leaves.shape)
  return lax.psum(log_prob, axis) if axis else log_prob


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _leaf_log_prob(plan, hidden_PND, weight, path_PNL, left_PNL):
  """The part of the log-probability of which the nodes are here."""

  def step(total_PN, level):
    path_PN, left_PN = level
    visit = _visit(plan[0], hidden_PND, weight, path_PN)
    log_prob_PN = jax.nn.log_sigmoid(jnp.where(left_PN, visit.score, -visit.score))
    return total_PN + jnp.where(visit.mine, log_prob_PN, 0.0), None

  start = jnp.zeros(hidden_PND.shape[:2], jnp.float32)
  start = vocab_parallel.varying((start, hidden_PND, weight, path_PNL))[0]
  return lax.scan(step, start, _levels(path_PNL, left_PNL))[0]


def _levels(*arrays):
  return tuple(jnp.moveaxis(x, 2, 0) for x in arrays)


class _Visit(NamedTuple):
  """A node for each vector: its row, and hidden · row; of a node that is not here, any."""

  node: Array
  mine: Array
  row: Array
  score: Array


def _visit(dtype, hidden, weight, here):
  mine = (here >= 0) & (here < weight.shape[0])
  node = jnp.where(mine, here, 0)
  row = weight[node].astype(dtype)
  return _Visit(node, mine, row, _products(hidden, row))


def _products(hidden, rows):
  """Row by row, of numbers in the rows' dtype, added up in float32."""
  product = hidden.astype(rows.dtype).astype(jnp.float32) * rows.astype(jnp.float32)
  return product.sum(axis=-1)


def _forward(plan, *operands):
  return _leaf_log_prob(plan, *operands), operands


def _backward(plan, operands, cotangent_PN):
  hidden_PND, weight, path_PNL, left_PNL = operands
  parts = plan[1]

  def step(sums, level):
    d_hidden_PND, d_weight_PVD = sums
    path_PN, left_PN = level
    visit = _visit(plan[0], hidden_PND, weight, path_PN)
    slope_PN = jnp.where(left_PN, jax.nn.sigmoid(-visit.score), -jax.nn.sigmoid(visit.score))
    d_PN1 = jnp.where(visit.mine, slope_PN * cotangent_PN, 0.0)[..., None]
    # In its own part each token adds to its rows in place: a sum over parts would be sent a level.
    add = jax.vmap(lambda rows, node, d: rows.at[node].add(d))
    d_weight_PVD = add(d_weight_PVD, visit.node, d_PN1 * hidden_PND.astype(jnp.float32))
    return (d_hidden_PND + d_PN1 * visit.row.astype(jnp.float32), d_weight_PVD), None

  start = (
    jnp.zeros(hidden_PND.shape, jnp.float32),
    parts.keep(jnp.zeros((hidden_PND.shape[0], *weight.shape), jnp.float32)),
  )
  start = vocab_parallel.varying((*start, hidden_PND, weight, path_PNL))[:2]
  (d_hidden, d_weight), _ = lax.scan(step, start, _levels(path_PNL, left_PNL))
  d_weight = d_weight.sum(axis=0).astype(weight.dtype)
  return d_hidden.astype(hidden_PND.dtype), d_weight, None, None


_leaf_log_prob.defvjp(_forward, _backward)


def draw_leaves(
  key: PRNGKeyArray,
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "V L"],
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Int[Array, "*B"]:
  """A leaf for each vector, drawn by walking down from the root: O(N·L·D) time.

  Inside of `vocab_axis` weight and paths are the device's own rows; all devices walk together.
  """
  axis = vocab_parallel.inside(vocab_axis)
  dtype = dtype or jnp.promote_types(hidden.dtype, weight.dtype)

  def step(leaf, level):
    # Any leaf below a node knows its path: node k has leaf k on its left and k + 1 on its right.
    node = vocab_parallel.sharded_lookup(
      lax.dynamic_index_in_dim(paths, level, 1, False), leaf, axis
    )
    here = jnp.where(node < 0, -1, node - vocab_parallel.first_row(axis, weight.shape[0]))
    visit = _visit(dtype, hidden, weight, here)
    score = jnp.where(visit.mine, visit.score, 0.0)
    score = lax.psum(score, axis) if axis else score
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
  """Log-probabilities of all leaves, in nats."""
  left = paths >= jnp.arange(paths.shape[0])[:, None]
  log_prob = _log_probs(hidden.reshape(-1, hidden.shape[-1]), weight, paths, left, dtype)
  return log_prob.reshape(*hidden.shape[:-1], paths.shape[0])


def _log_probs(hidden_ND, row_RD, place_WL, left_WL, dtype):
  """Log-probabilities [N, W] of leaves whose paths are places among the rows; -1 for none."""
  score_RN = softmax.linear_scores(row_RD, hidden_ND, dtype=dtype)
  r, n = score_RN.shape
  # A leaf reads rows of n numbers, once a level: which side it is on chooses the row.
  sides = [jax.nn.log_sigmoid(score_RN), jax.nn.log_sigmoid(-score_RN), jnp.zeros((1, n))]
  table = jnp.concatenate(sides)
  place_WL = jnp.where(place_WL < 0, 2 * r, jnp.where(left_WL, place_WL, r + place_WL))
  start = jnp.zeros((place_WL.shape[0], n), jnp.float32)
  start = vocab_parallel.varying((start, table, place_WL))[0]
  return lax.scan(lambda total, place_W: (total + table[place_W], None), start, place_WL.T)[0].T


def leaf_blocks(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  paths: Int[Array, "V L"],
  tokens: Int[Array, "V"],
  vocab: int,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> sampling.Blocks:
  """The log-probabilities, some consecutive leaves at a time.

  Their paths meet the nodes between them, which are as many consecutive rows, and beyond these
  only ancestors of the first leaf on the left and of the last on the right, at the same level:
  2·L rows more. Inside of `vocab_axis` weight, paths and tokens are the device's own rows.
  """
  axis, (rows, levels) = vocab_parallel.inside(vocab_axis), paths.shape
  first = vocab_parallel.first_row(axis, rows)
  batch = hidden.shape[:-1]
  hidden_ND = hidden.reshape(-1, hidden.shape[-1])
  width = sampling.block_width(math.prod(batch), rows)
  beyond = _beyond(weight, paths, axis)

  def edge_rows(leaf, beyond_LD):
    node_L = paths[leaf] - first
    here = (node_L >= 0) & (node_L < rows)
    return jnp.where(here[:, None], weight[jnp.where(here, node_L, 0)], beyond_LD)

  def block(index):
    start = jnp.minimum(index * width, rows - width)
    leaf_W = start + jnp.arange(width, dtype=jnp.int32)
    between = lax.dynamic_slice_in_dim(weight, start, width)
    row_RD = jnp.concatenate(
      [between, edge_rows(start, beyond[0]), edge_rows(start + width - 1, beyond[1])]
    )
    path_WL = paths[leaf_W]
    node_WL, level_L = path_WL - first - start, width + jnp.arange(levels)
    place_WL = jnp.where(
      node_WL < 0, level_L, jnp.where(node_WL < width, node_WL, level_L + levels)
    )
    place_WL = jnp.where(path_WL < 0, -1, place_WL)
    left_WL = path_WL >= first + leaf_W[:, None]
    log_prob_BW = _log_probs(hidden_ND, row_RD, place_WL, left_WL, dtype).reshape(*batch, width)
    real_W = (leaf_W >= index * width) & (first + leaf_W < vocab)
    return jnp.where(real_W, log_prob_BW, -jnp.inf), jnp.where(real_W, tokens[leaf_W], 0)

  return sampling.Blocks(-(-rows // width), block, tuple(batch), axis)


def _beyond(weight, paths, axis):
  """Rows of the nodes above this device's first leaf and above its last, [2, L, D]."""
  if axis is None:
    # All nodes are here.
    return jnp.zeros((2, paths.shape[1], 1), weight.dtype)
  edges = vocab_parallel.gathered(paths[jnp.array([0, paths.shape[0] - 1])], axis)
  return vocab_parallel.sharded_lookup(weight, jnp.maximum(edges, 0), axis)[lax.axis_index(axis)]
