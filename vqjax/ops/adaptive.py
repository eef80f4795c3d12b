"""Log-probabilities in the clusters of an adaptive softmax.

A cluster of rare tokens has V_i rows, scored with a narrow vector, and few of the tokens of a
batch. These few are moved to the front, and a loop of dynamic length scores a chunk of them at a
time, so that the cost follows the number of tokens in the cluster.
"""

# Tokens of a cluster are few, and where they are is known only at run time. For each shard:
#
#   order   tokens of the cluster first  ->  | x x x x x | . . . . . . . |
#   loop    chunks of n tokens           ->  | x x | x x | x . |            of dynamic length
#   rank    back to the order of the batch
#
# All shards run as many chunks as the fullest one: a chunk may contain collectives.

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import precision, sampling, softmax, tiles, vocab_parallel
from vqjax.types import Dtype, MeshAxes

__all__ = []


def cluster_log_prob(
  narrow: Float[Array, "*B w"],
  weight: Float[Array, "V w"],
  tokens: Int[Array, "*B"],
  inside: Bool[Array, "*B"],
  removed: Float[Array, "V"] | None = None,
  *,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of the tokens in a cluster; 0 for all others.

  The distribution is softmax(narrow · weightᵀ). The result is exact and no array [N, V] exists.
  Other tokens are not scored: with n tokens inside, time is O(n·V·w), where n is rounded up to a
  multiple of a chunk, an eighth of the tokens. If tokens are sharded over devices, n is the largest
  number on a device. Reverse mode scores the n tokens once more than `linear_log_prob`.

  Args:
    weight: one row for each token of the cluster; inside of `vocab_axis` the device's own rows.
    tokens: indices into the rows of all devices; arbitrary for tokens that are not inside.
    inside: whether each token is in the cluster.
    removed: 0 for a real row and -inf for padding, as a bias; it has no gradient.
  """
  shards = vocab_parallel.token_shards(vocab_axis)
  flat = narrow.reshape(-1, narrow.shape[-1]), tokens.reshape(-1), inside.reshape(-1)
  narrow_PNw, token_PN, inside_PN = (shards.split(x) for x in flat)
  n, here = token_PN.shape[1], vocab_parallel.devices()
  tile = tiles.default_tile(math.ceil(n / 8), weight.shape[0], here.platform, here.count)
  # Stable, so that tokens keep their order; False sorts before True.
  order_PN = jnp.argsort(~inside_PN, axis=1, stable=True)
  # The inverse permutation.
  rank_PN = jnp.argsort(order_PN, axis=1)
  # All chunks are full: the padding of the last one reads token 0 once more.
  order_PN = jnp.pad(order_PN, [(0, 0), (0, -n % tile.tokens)])
  first = _First(order_PN, rank_PN, inside_PN.sum(axis=1, dtype=jnp.int32).max())
  narrow_PNw, weight = vocab_parallel.varying((narrow_PNw, weight))
  plan = _Plan(tile, shards, dtype, vocab_axis)
  log_prob_PN = _log_prob(plan, narrow_PNw, weight, removed, token_PN, first)
  log_prob = shards.join(jnp.where(inside_PN, log_prob_PN, 0.0), flat[1].shape[0])
  return log_prob.reshape(tokens.shape)


class _Plan(NamedTuple):
  tile: tiles.Tile
  shards: vocab_parallel.TokenShards
  dtype: Dtype | None
  axis: MeshAxes | None


class _First(NamedTuple):
  """A permutation of the tokens.

  Attributes:
    order: [P, N], the tokens, those of the cluster first.
    rank: [P, N], the index of each token in `order`.
    count: number of tokens to score.
  """

  order: Array
  rank: Array
  count: Array


# A loop whose length is known only at run time has no reverse mode of its own.
@precision.custom_vjp
def _log_prob(plan, narrow_PNw, weight, removed, token_PN, first):
  """Log-probabilities of the first tokens of the order; arbitrary for others."""
  ordered = _Chunk(_permuted(narrow_PNw, first.order), _permuted(token_PN, first.order))
  of_chunk = lambda chunk: _chunk_log_prob(plan, chunk.narrow, weight, removed, chunk.token)

  def step(index, log_prob):
    new = of_chunk(_cut(plan, ordered, index))
    return lax.dynamic_update_slice_in_dim(log_prob, new, index * plan.tile.tokens, axis=1)

  # Inside of a `shard_map` the carry must have the type of what is written to it.
  kind = jax.eval_shape(lambda: of_chunk(_cut(plan, ordered, 0)))
  start = vocab_parallel.varying(
    jnp.zeros(first.order.shape, jnp.float32), *vocab_parallel.varies_over(kind)
  )
  log_prob = lax.fori_loop(0, _steps(plan, first), step, start)
  return _permuted(log_prob, first.rank)


class _Chunk(NamedTuple):
  """Vectors [P, n, w] and indices [P, n] of some tokens."""

  narrow: Array
  token: Array


def _permuted(array, order_PN):
  order = order_PN.reshape(*order_PN.shape, *[1] * (array.ndim - 2))
  return jnp.take_along_axis(array, order, axis=1, mode="promise_in_bounds")


def _cut(plan, tree, index):
  size = plan.tile.tokens
  cut = lambda x: lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
  return jax.tree.map(cut, tree)


def _steps(plan, first):
  return (first.count + plan.tile.tokens - 1) // plan.tile.tokens


def _chunk_log_prob(plan, narrow_Pnw, weight, removed, token_Pn):
  # Flat in the order of their shards, so that `linear_log_prob` finds each shard on its device.
  log_prob = softmax.linear_log_prob(
    narrow_Pnw.reshape(-1, narrow_Pnw.shape[-1]),
    weight,
    token_Pn.reshape(-1),
    removed,
    tile=plan.tile,
    dtype=plan.dtype,
    vocab_axis=plan.axis,
  )
  return log_prob.reshape(token_Pn.shape)


def _forward(plan, *operands):
  return _log_prob(plan, *operands), operands


def _backward(plan, operands, cotangent_PN):
  narrow_PNw, weight, removed, token_PN, first = operands
  real = jnp.arange(first.order.shape[1]) < cotangent_PN.shape[1]
  # The token that pads the last chunk has its gradient from where it is read first.
  cotangent = jnp.where(real, _permuted(cotangent_PN, first.order), 0.0)
  ordered = _Chunk(_permuted(narrow_PNw, first.order), _permuted(token_PN, first.order))

  def step(index, sums):
    d_narrow, d_weight = sums
    chunk, d_chunk = _cut(plan, (ordered, cotangent), index)
    scored = lambda narrow, weight: _chunk_log_prob(plan, narrow, weight, removed, chunk.token)
    of_narrow, of_weight = jax.vjp(scored, chunk.narrow, weight)[1](d_chunk)
    start = index * plan.tile.tokens
    d_narrow = lax.dynamic_update_slice_in_dim(d_narrow, of_narrow, start, axis=1)
    return d_narrow, d_weight + of_weight.astype(jnp.float32)

  zeros = jnp.zeros_like(ordered.narrow), jnp.zeros(weight.shape, jnp.float32)
  zeros = vocab_parallel.varying((*zeros, ordered.narrow, weight))[:2]
  d_narrow, d_weight = lax.fori_loop(0, _steps(plan, first), step, zeros)
  return _permuted(d_narrow, first.rank), d_weight.astype(weight.dtype), None, None, None


_log_prob.defvjp(*map(vocab_parallel.own_promotion, (_forward, _backward)))


class Section(NamedTuple):
  """Blocks of a range of tokens, and the first token of the range."""

  blocks: sampling.Blocks
  first: int


def concatenate_blocks(sections: tuple[Section, ...]) -> sampling.Blocks:
  """The blocks of all sections in a row; narrower ones are padded with -inf."""
  kinds = [jax.eval_shape(s.blocks.block, jax.ShapeDtypeStruct((), jnp.int32)) for s in sections]
  # `lax.switch` needs branches of equal shapes.
  width = max(tokens.shape[0] for _, tokens in kinds)
  starts = [sum(s.blocks.count for s in sections[:i]) for i in range(len(sections))]

  def branch(section, start):
    def block(index):
      scores, tokens = section.blocks.block(index - start)
      missing = width - tokens.shape[0]
      fill = [(0, missing)] + [(0, 0)] * (scores.ndim - 1)
      scores = jnp.pad(scores, fill, constant_values=-jnp.inf)
      return scores, jnp.pad(section.first + tokens, (0, missing))

    return block

  branches = [branch(*pair) for pair in zip(sections, starts, strict=True)]

  def block(index):
    which = jnp.searchsorted(jnp.asarray(starts), index, side="right") - 1
    return lax.switch(which, branches, index)

  count = sum(section.blocks.count for section in sections)
  return sections[0].blocks._replace(count=count, block=block)
