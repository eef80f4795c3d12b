"""What is a token's probability among the tokens of its own class, without scoring any other?

  log p(v | class of v) = h · w_v - log sum of exp(h · w_u) over the tokens u of the class.

Classes may be of any size. Tokens of the batch are sorted by class, and so are the rows of the
weight; a work item is a chunk of the tokens and a tile of the rows of one class. Where classes fit
a tile there are at most N / chunk + C items, each one matrix product of fixed size: about N·V/C·D
operations in all, and no [N, S, D] gather. The backward pass walks over the same items and adds
each one's gradient to the rows that it read.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.ops import vocab_parallel
from vqjax.types import Dtype

CHUNK = 256
"""Most tokens of a work item."""

TILE = 1024
"""Most rows of a work item."""


def log_prob_in_class(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  classes_of_rows: Int[Array, "V"],
  token: Int[Array, "*B"],
  class_of_token: Int[Array, "*B"],
  classes: int,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of each token among the rows of its class; float32.

  `class_of_token` is that of the token's row, in [0, classes). A row whose class is outside of that
  belongs to none. `dtype` is that of the products' operands. Inside of `vocab_axis` weight and
  classes are of the device's own rows, and tokens count over those of all.
  """
  axis = vocab_parallel.inside(vocab_axis)
  dtype = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
  parts = vocab_parallel.token_shards(vocab_axis)
  row = token - vocab_parallel.first_row(axis, weight.shape[0])
  split = lambda x, *end: parts.split(x.reshape(-1, *end))
  operands = split(hidden, hidden.shape[-1]), weight, classes_of_rows, split(row)
  *operands, class_PN = vocab_parallel.varying(
    (*operands, split(class_of_token)), *([axis] if axis else [])
  )
  plan = _Plan(parts, axis, classes, dtype)
  log_prob = _log_prob(plan, *operands, class_PN)
  return parts.join(log_prob, math.prod(token.shape)).reshape(token.shape)


class _Plan(NamedTuple):
  """What is known before any array is."""

  parts: vocab_parallel.TokenShards
  axis: str | None
  classes: int
  dtype: jnp.dtype


class _Runs(NamedTuple):
  """Things sorted by class: their order, where the run of each class begins, how long it is."""

  order: Int[Array, "X"]
  first: Int[Array, "C"]
  count: Int[Array, "C"]

  def members(self, which: Array, start: Array, size: int, valid: Array) -> Array:
    """`size` members of a class from `start` on; beyond its last, numbers that no thing has."""
    step = jnp.arange(size, dtype=jnp.int32)
    there = (start + step < self.count[which]) & valid
    member = self.order.at[self.first[which] + start + step].get(mode="clip")
    return jnp.where(there, member, self.order.shape[0] + step)


def _runs(class_X, classes):
  class_X = jnp.where((class_X >= 0) & (class_X < classes), class_X, classes)
  count_C = jax.ops.segment_sum(jnp.ones_like(class_X), class_X, classes)
  return _Runs(jnp.argsort(class_X).astype(jnp.int32), jnp.cumsum(count_C) - count_C, count_C)


class _Items(NamedTuple):
  """The work of one part of the tokens.

  Attributes:
    tokens: the part's tokens by class.
    chunks: number of chunks of each class's tokens.
    ends: number of items of each class and of those before it.
  """

  tokens: _Runs
  chunks: Int[Array, "C"]
  ends: Int[Array, "C"]

  def item(self, index: Array, rows: _Runs, sizes: tuple[int, int]) -> tuple[Array, Array]:
    """Tokens [n] and rows [w] of an item; in a place without one, numbers that none has."""
    # Not `searchsorted`, which jax 0.10 cannot trace inside of a `shard_map`.
    which = (self.ends <= index).sum()
    valid = which < self.ends.shape[0]
    which = jnp.where(valid, which, 0)
    left = self.ends[which] - 1 - index
    chunks = jnp.maximum(self.chunks[which], 1)
    tokens = self.tokens.members(which, left % chunks * sizes[0], sizes[0], valid)
    return tokens, rows.members(which, left // chunks * sizes[1], sizes[1], valid)


class _Walk(NamedTuple):
  """The items of all parts.

  Attributes:
    rows: the rows by class.
    parts: the items of each part, [P, ...].
    count: most items of a part.
  """

  rows: _Runs
  parts: _Items
  count: Int[Array, ""]


def _sizes(plan, tokens, rows):
  """Tokens and rows of an item: a mean class in tiles of equal size, and its tokens in chunks."""
  mean = -(-rows // plan.classes)
  tile = -(-mean // -(-mean // TILE))
  return min(tokens, max(32, min(CHUNK, -(-tokens // plan.classes)))), tile


def _walk(plan, class_PN, class_V):
  chunk, tile = _sizes(plan, class_PN.shape[1], class_V.shape[0])
  rows = _runs(class_V, plan.classes)

  def of_part(class_N):
    tokens = _runs(class_N, plan.classes)
    chunks = -(-tokens.count // chunk)
    return _Items(tokens, chunks, jnp.cumsum(chunks * -(-rows.count // tile)))

  parts = jax.vmap(of_part)(class_PN)
  count = parts.ends[:, -1].max()
  # All devices go as many rounds: inside of a round they may send each other what they share.
  count = lax.pmax(count, plan.axis) if plan.axis else count
  return _Walk(rows, parts, count)


class _Running(NamedTuple):
  """Of the scores in a token's class so far: its own, the largest, sum of exp(score - top)."""

  own: Array
  top: Array
  total: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_prob(plan, hidden_PND, weight, class_V, row_PN, class_PN):
  return _forward(plan, hidden_PND, weight, class_V, row_PN, class_PN)[0]


def _forward(plan, hidden_PND, weight, class_V, row_PN, class_PN):
  walk = _walk(plan, class_PN, class_V)
  sizes = _sizes(plan, row_PN.shape[1], weight.shape[0])

  def of_part(items, hidden_ND, row_N, state_N3, index):
    tokens, rows = items.item(index, walk.rows, sizes)
    score_nw, own_nw, _, _ = _scored(plan, hidden_ND, weight, row_N, tokens, rows)
    old = _Running(*jnp.moveaxis(state_N3.at[tokens].get(mode="clip"), -1, 0))
    top = jnp.maximum(old.top, score_nw.max(axis=-1))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    total = old.total * jnp.exp(old.top - shift) + jnp.exp(score_nw - shift[:, None]).sum(axis=-1)
    own = jnp.maximum(old.own, jnp.where(own_nw, score_nw, -jnp.inf).max(axis=-1))
    new = jnp.stack([own, top, total], axis=-1)
    return state_N3.at[tokens].set(new, mode="drop", unique_indices=True)

  start = jnp.broadcast_to(jnp.array([-jnp.inf, -jnp.inf, 0.0]), (*row_PN.shape, 3))
  start, given, _ = vocab_parallel.varying(
    (plan.parts.keep(start), (walk.parts, hidden_PND, row_PN), (weight, class_V))
  )
  each = jax.vmap(of_part, (0, 0, 0, 0, None))
  step = lambda index, state: each(*given, state, index)
  found = _Running(*jnp.moveaxis(lax.fori_loop(0, walk.count, step, start), -1, 0))
  found = _reduced(found, plan.axis)
  log_sum = jnp.log(found.total)
  saved = hidden_PND, weight, row_PN, walk, found.top, log_sum
  return found.own - found.top - log_sum, saved


def _scored(plan, hidden_ND, weight, row_N, tokens, rows):
  """Scores [n, w], which of them are the tokens' own, and the operands; -inf where no row is."""
  hidden_nD = hidden_ND.at[tokens].get(mode="clip").astype(plan.dtype)
  weight_wD = weight.at[rows].get(mode="clip").astype(plan.dtype)
  score_nw = _product(hidden_nD, weight_wD, 1, 1)
  there_w = rows < weight.shape[0]
  # A row of the next device may have the number of a place without one.
  own_nw = there_w & (row_N.at[tokens].get(mode="clip")[:, None] == rows)
  return jnp.where(there_w, score_nw, -jnp.inf), own_nw, hidden_nD, weight_wD


def _product(a, b, axis_a, axis_b):
  return lax.dot_general(
    a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32
  )


def _reduced(mine, axis):
  """Of all devices' rows of the class, from those of each."""
  if axis is None:
    return mine
  top = lax.pmax(mine.top, axis)
  return _Running(
    lax.pmax(mine.own, axis), top, lax.psum(mine.total * jnp.exp(mine.top - top), axis)
  )


def _backward(plan, saved, cotangent_PN):
  hidden_PND, weight, row_PN, walk, top_PN, log_sum_PN = saved
  sizes = _sizes(plan, row_PN.shape[1], weight.shape[0])

  def of_part(items, hidden_ND, row_N, per_N3, sums, index):
    d_hidden, d_weight = sums
    tokens, rows = items.item(index, walk.rows, sizes)
    score_nw, own_nw, hidden_nD, weight_wD = _scored(plan, hidden_ND, weight, row_N, tokens, rows)
    top, log_sum, cotangent = jnp.moveaxis(per_N3.at[tokens].get(mode="clip"), -1, 0)[..., None]
    d_nw = cotangent * (own_nw - jnp.exp(score_nw - top - log_sum))
    # Places behind the last token of the class repeat some other one.
    d_nw = jnp.where((tokens < hidden_ND.shape[0])[:, None], d_nw, 0.0).astype(plan.dtype)
    return (
      d_hidden.at[tokens].add(_product(d_nw, weight_wD, 1, 0), mode="drop", unique_indices=True),
      d_weight.at[rows].add(_product(d_nw, hidden_nD, 0, 0), mode="drop", unique_indices=True),
    )

  per_PN3 = jnp.stack([top_PN, log_sum_PN, cotangent_PN], axis=-1)
  start = (
    plan.parts.keep(jnp.zeros(hidden_PND.shape, jnp.float32)),
    plan.parts.keep(jnp.zeros((hidden_PND.shape[0], *weight.shape), jnp.float32)),
  )
  start, given, _ = vocab_parallel.varying(
    (start, (walk.parts, hidden_PND, row_PN, per_PN3), (weight, walk.rows))
  )
  each = jax.vmap(of_part, (0, 0, 0, 0, 0, None))
  step = lambda index, sums: each(*given, sums, index)
  d_hidden, d_weight = lax.fori_loop(0, walk.count, step, start)
  d_weight = plan.parts.keep(d_weight).sum(axis=0).astype(weight.dtype)
  return d_hidden.astype(hidden_PND.dtype), d_weight, None, None, None


_log_prob.defvjp(_forward, _backward)


class Normalizers(NamedTuple):
  """Of the scores of each class so far: the largest, and the sum of exp(score - top)."""

  top: Float[Array, "*B C"]
  total: Float[Array, "*B C"]


def empty_normalizers(batch: tuple[int, ...], classes: int) -> Normalizers:
  """The normalisers before any row is scored."""
  return Normalizers(
    jnp.full((*batch, classes), -jnp.inf, jnp.float32), jnp.zeros((*batch, classes), jnp.float32)
  )


def add_scores(
  found: Normalizers, scores: Float[Array, "*B W"], classes_of_rows: Int[Array, "W"]
) -> Normalizers:
  """The normalisers with the scores of some rows added; rows without a class have no part."""
  classes = found.top.shape[-1]
  by_class = lambda reduce, x: jnp.moveaxis(
    reduce(jnp.moveaxis(x, -1, 0), classes_of_rows, classes), 0, -1
  )
  top = jnp.maximum(found.top, by_class(jax.ops.segment_max, scores))
  shift = jnp.where(jnp.isneginf(top), 0.0, top)
  above = scores - shift.at[..., classes_of_rows].get(mode="clip")
  total = by_class(jax.ops.segment_sum, jnp.exp(above))
  return Normalizers(top, found.total * jnp.exp(found.top - shift) + total)


def log_normalizers(found: Normalizers, vocab_axis: str | None) -> Float[Array, "*B C"]:
  """log sum of exp(scores) of each class, over all devices; 0 for a class of which no row is."""
  axis = vocab_parallel.inside(vocab_axis)
  top, total = found
  if axis:
    top = lax.pmax(found.top, axis)
    total = lax.psum(total * jnp.exp(found.top - jnp.where(jnp.isneginf(top), 0.0, top)), axis)
  return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)
