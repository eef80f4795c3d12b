"""Log-probability of a token in its class; only the rows of that class are scored.

  log p(v | class of v) = h · w_v - log sum of exp(h · w_u) over the tokens u of the class.

Classes may have any sizes. The tokens of the batch are sorted by class, and so are the rows of the
weight; a work item is a chunk of the tokens and a tile of the rows of one class. If classes fit a
tile there are at most N / chunk + C items, each one matrix product of fixed size: about N·V/C·D
operations in total, and no [N, S, D] gather. The backward pass goes through the same items and adds
each one's gradient to the rows that it read.
"""

# The work of a class of 3 chunks of tokens and 2 tiles of rows are 6 items, of one loop:
#
#             tile 0     tile 1          An item is a product [n, D] · [w, D], of fixed size:
#   chunk 0   item 5     item 2          what a class has less is padding, whose indices are
#   chunk 1   item 4     item 1          out of range, so that gathers clip and scatters drop it.
#   chunk 2   item 3     item 0
#
# Only the number of items depends on the classes, so that the loop has a dynamic length and its
# gradient is written by hand.

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.ops import precision, vocab_parallel
from vqjax.ops.scores import exp_shift
from vqjax.types import Dtype, MeshAxes, Shape

__all__ = []

# Largest number of tokens of a work item.
CHUNK = 256

# Largest number of rows of a work item.
TILE = 1024


def log_prob_in_class(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  classes_of_rows: Int[Array, "V"],
  token: Int[Array, "*B"],
  class_of_token: Int[Array, "*B"],
  classes: int,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats and float32, of each token among the rows of its class.

  `class_of_token` is the class of the token's row, in [0, classes). A row with a class outside of
  that range belongs to no class. `dtype` is the dtype of the products' operands. Inside of
  `vocab_axis` weight and classes are those of the device's own rows, and tokens count over the rows
  of all devices.
  """
  axis = vocab_parallel.inside(vocab_axis)
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  shards = vocab_parallel.token_shards(vocab_axis)
  row = token - vocab_parallel.first_row(axis, weight.shape[0])
  hidden_PND = shards.split(hidden.reshape(-1, hidden.shape[-1]))
  row_PN, class_PN = shards.split(row.reshape(-1)), shards.split(class_of_token.reshape(-1))
  operands = vocab_parallel.varying(
    (hidden_PND, weight, classes_of_rows, row_PN, class_PN), *([axis] if axis else [])
  )
  log_prob = _log_prob(_Plan(shards, axis, classes, dtype), *operands)
  return shards.join(log_prob, math.prod(token.shape)).reshape(token.shape)


class _Plan(NamedTuple):
  """Static values of the computation."""

  shards: vocab_parallel.TokenShards
  axis: MeshAxes | None
  classes: int
  dtype: jnp.dtype


class _Runs(NamedTuple):
  """Items sorted by class: order, and first index and length of each class."""

  order: Int[Array, "X"]
  first: Int[Array, "C"]
  count: Int[Array, "C"]

  def members(self, which: Array, start: Array, size: int, valid: Array) -> Array:
    """`size` members of a class from `start` on, padded with numbers out of range."""
    # Distinct, so that scatters may rely on unique indices.
    step = jnp.arange(size, dtype=jnp.int32)
    exists = (start + step < self.count[which]) & valid
    member = self.order.at[self.first[which] + start + step].get(mode="clip")
    return jnp.where(exists, member, self.order.shape[0] + step)


def _runs(class_X, classes):
  # Items of no class sort behind all others, and `segment_sum` leaves them out.
  class_X = jnp.where((class_X >= 0) & (class_X < classes), class_X, classes)
  count_C = jax.ops.segment_sum(jnp.ones_like(class_X), class_X, classes)
  return _Runs(jnp.argsort(class_X).astype(jnp.int32), jnp.cumsum(count_C) - count_C, count_C)


class _Items(NamedTuple):
  """The work items of one token shard.

  Attributes:
    tokens: the shard's tokens by class.
    chunks: number of chunks of each class's tokens.
    ends: number of items of each class and of all classes before it.
  """

  tokens: _Runs
  chunks: Int[Array, "C"]
  ends: Int[Array, "C"]

  def item(self, index: Array, rows: _Runs, sizes: tuple[int, int]) -> tuple[Array, Array]:
    """Tokens [n] and rows [w] of an item; numbers out of range pad both."""
    # Not `searchsorted`: JAX 0.10 cannot trace it inside of a `shard_map`.
    which = (self.ends <= index).sum()
    valid = which < self.ends.shape[0]
    which = jnp.where(valid, which, 0)
    # Counted down from the end of the class, whose start is not kept.
    left = self.ends[which] - 1 - index
    chunks = jnp.maximum(self.chunks[which], 1)
    tokens = self.tokens.members(which, left % chunks * sizes[0], sizes[0], valid)
    return tokens, rows.members(which, left // chunks * sizes[1], sizes[1], valid)


class _Work(NamedTuple):
  """The work items of all token shards.

  Attributes:
    rows: the rows by class.
    shards: the items of each shard, [P, ...].
    count: largest number of items of a shard.
  """

  rows: _Runs
  shards: _Items
  count: Int[Array, ""]


def _sizes(plan, tokens, rows):
  """Tokens and rows of an item, for a class of mean size in equal tiles."""
  mean = -(-rows // plan.classes)
  tile = -(-mean // -(-mean // TILE))
  return min(tokens, max(32, min(CHUNK, -(-tokens // plan.classes)))), tile


def _plan_work(plan, class_PN, class_V):
  chunk, tile = _sizes(plan, class_PN.shape[1], class_V.shape[0])
  rows = _runs(class_V, plan.classes)

  def of_shard(class_N):
    tokens = _runs(class_N, plan.classes)
    chunks = -(-tokens.count // chunk)
    return _Items(tokens, chunks, jnp.cumsum(chunks * -(-rows.count // tile)))

  shards = jax.vmap(of_shard)(class_PN)
  count = shards.ends[:, -1].max()
  # Equally many rounds on all devices, because a round may contain collectives.
  count = lax.pmax(count, plan.axis) if plan.axis else count
  return _Work(rows, shards, count)


class _Running(NamedTuple):
  """Own score of a token, largest score of its class, sum of exp(score - top)."""

  own: Array
  top: Array
  total: Array


# A loop whose length is known only at run time has no reverse mode of its own.
@precision.custom_vjp
def _log_prob(plan, hidden_PND, weight, class_V, row_PN, class_PN):
  return _forward(plan, hidden_PND, weight, class_V, row_PN, class_PN)[0]


def _forward(plan, hidden_PND, weight, class_V, row_PN, class_PN):
  work = _plan_work(plan, class_PN, class_V)
  sizes = _sizes(plan, row_PN.shape[1], weight.shape[0])

  def of_shard(items, hidden_ND, row_N, state_N3, index):
    tokens, rows = items.item(index, work.rows, sizes)
    score_nw, own_nw, _, _ = _scored(plan, hidden_ND, weight, row_N, tokens, rows)
    # `clip` reads some token for padding, and `drop` below does not write it back.
    old = _Running(*jnp.moveaxis(state_N3.at[tokens].get(mode="clip"), -1, 0))
    top = jnp.maximum(old.top, score_nw.max(axis=-1))
    shift = exp_shift(top)
    total = old.total * jnp.exp(old.top - shift) + jnp.exp(score_nw - shift[:, None]).sum(axis=-1)
    own = jnp.maximum(old.own, jnp.where(own_nw, score_nw, -jnp.inf).max(axis=-1))
    # One [N, 3] array, so that an item takes one gather and one scatter.
    new = jnp.stack([own, top, total], axis=-1)
    return state_N3.at[tokens].set(new, mode="drop", unique_indices=True)

  start = jnp.broadcast_to(jnp.float32([-jnp.inf, -jnp.inf, 0.0]), (*row_PN.shape, 3))
  start, given, _ = vocab_parallel.varying(
    (plan.shards.keep(start), (work.shards, hidden_PND, row_PN), (weight, class_V))
  )
  each = jax.vmap(of_shard, (0, 0, 0, 0, None))
  step = lambda index, state: each(*given, state, index)
  last = _Running(*jnp.moveaxis(lax.fori_loop(0, work.count, step, start), -1, 0))
  last = _all_reduce(last, plan.axis, row_PN, weight.shape[0])
  log_sum = jnp.log(last.total)
  saved = hidden_PND, weight, row_PN, work, last.top, log_sum
  return last.own - last.top - log_sum, saved


def _scored(plan, hidden_ND, weight, row_N, tokens, rows):
  """Scores [n, w], a mask of the tokens' own, and both operands; -inf in padding."""
  hidden_nD = hidden_ND.at[tokens].get(mode="clip").astype(plan.dtype)
  weight_wD = weight.at[rows].get(mode="clip").astype(plan.dtype)
  score_nw = _product(hidden_nD, weight_wD, 1, 1)
  exists_w = rows < weight.shape[0]
  # The numbers of padding may be those of the next device's rows.
  own_nw = exists_w & (row_N.at[tokens].get(mode="clip")[:, None] == rows)
  return jnp.where(exists_w, score_nw, -jnp.inf), own_nw, hidden_nD, weight_wD


def _product(a, b, axis_a, axis_b):
  return lax.dot_general(
    a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32
  )


def _all_reduce(local, axis, row_PN, rows):
  """The statistics over the rows of all devices."""
  if axis is None:
    return local
  top = vocab_parallel.common_shift(local.top, axis)
  total = lax.psum(local.total * jnp.exp(local.top - top), axis)
  own = vocab_parallel.from_owner(local.own, row_PN, rows, axis)
  return _Running(own=own, top=top, total=total)


def _backward(plan, saved, cotangent_PN):
  hidden_PND, weight, row_PN, work, top_PN, log_sum_PN = saved
  sizes = _sizes(plan, row_PN.shape[1], weight.shape[0])

  def of_shard(items, hidden_ND, row_N, per_N3, sums, index):
    d_hidden, d_weight = sums
    tokens, rows = items.item(index, work.rows, sizes)
    score_nw, own_nw, hidden_nD, weight_wD = _scored(plan, hidden_ND, weight, row_N, tokens, rows)
    top, log_sum, cotangent = jnp.moveaxis(per_N3.at[tokens].get(mode="clip"), -1, 0)[..., None]
    d_nw = cotangent * (own_nw - jnp.exp(score_nw - top - log_sum))
    # Padding holds another token's values, whose contribution to the rows must not count.
    d_nw = jnp.where((tokens < hidden_ND.shape[0])[:, None], d_nw, 0.0).astype(plan.dtype)
    return (
      d_hidden.at[tokens].add(_product(d_nw, weight_wD, 1, 0), mode="drop", unique_indices=True),
      d_weight.at[rows].add(_product(d_nw, hidden_nD, 0, 0), mode="drop", unique_indices=True),
    )

  per_PN3 = jnp.stack([top_PN, log_sum_PN, cotangent_PN], axis=-1)
  start = (
    plan.shards.keep(jnp.zeros(hidden_PND.shape, jnp.float32)),
    plan.shards.keep(jnp.zeros((hidden_PND.shape[0], *weight.shape), jnp.float32)),
  )
  start, given, _ = vocab_parallel.varying(
    (start, (work.shards, hidden_PND, row_PN, per_PN3), (weight, work.rows))
  )
  each = jax.vmap(of_shard, (0, 0, 0, 0, 0, None))
  step = lambda index, sums: each(*given, sums, index)
  d_hidden, d_weight = lax.fori_loop(0, work.count, step, start)
  d_weight = plan.shards.keep(d_weight).sum(axis=0).astype(weight.dtype)
  return d_hidden.astype(hidden_PND.dtype), d_weight, None, None, None


_log_prob.defvjp(*map(vocab_parallel.own_promotion, (_forward, _backward)))


class Normalizers(NamedTuple):
  """The largest score of each class, and the sum of exp(score - top)."""

  top: Float[Array, "*B C"]
  total: Float[Array, "*B C"]


def empty_normalizers(batch: Shape, classes: int) -> Normalizers:
  """Normalisers of no rows."""
  return Normalizers(
    jnp.full((*batch, classes), -jnp.inf, jnp.float32), jnp.zeros((*batch, classes), jnp.float32)
  )


def add_scores(
  old: Normalizers, scores: Float[Array, "*B W"], classes_of_rows: Int[Array, "W"]
) -> Normalizers:
  """The normalisers with the scores of some rows added, by class."""
  classes = old.top.shape[-1]
  by_class = lambda reduce, x: jnp.moveaxis(
    reduce(jnp.moveaxis(x, -1, 0), classes_of_rows, classes), 0, -1
  )
  top = jnp.maximum(old.top, by_class(jax.ops.segment_max, scores))
  shift = exp_shift(top)
  above = scores - shift.at[..., classes_of_rows].get(mode="clip")
  total = by_class(jax.ops.segment_sum, jnp.exp(above))
  return Normalizers(top, old.total * jnp.exp(old.top - shift) + total)


def log_normalizers(local: Normalizers, vocab_axis: MeshAxes | None) -> Float[Array, "*B C"]:
  """log sum of exp(scores) of each class, over all devices; 0 without rows."""
  axis = vocab_parallel.inside(vocab_axis)
  top, total = local
  if axis:
    top = vocab_parallel.common_shift(local.top, axis)
    total = lax.psum(total * jnp.exp(local.top - exp_shift(top)), axis)
  return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)
