"""How likely are the tokens of one tail, where the others are not to pay for it?

The tail of an adaptive softmax holds the rare tokens: V_i rows, scored by a narrow vector, and few
of a batch. Those few are brought to the front, and a loop whose length is known only when it runs
visits them, some at a time: its cost follows the number of tokens that are in the tail.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import sampling, softmax, tiles, vocab_parallel
from vqjax.types import Dtype


def cluster_log_prob(
  narrow: Float[Array, "*B w"],
  weight: Float[Array, "V w"],
  tokens: Int[Array, "*B"],
  inside: Bool[Array, "*B"],
  removed: Float[Array, "V"] | None = None,
  *,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, under softmax(narrow · weightᵀ) of the tokens `inside`; 0 elsewhere.

  Exact, and without an array [N, V]. Tokens that are not inside are not scored: with n inside, time
  is O(n·V·w), n rounded up to a chunk, an eighth of the tokens. Where tokens are spread over
  devices, n is the number on the device with most. Reverse mode scores the n tokens once more than
  `linear_log_prob`.

  Args:
    narrow: the projected vector of each token.
    weight: one row for each token of the tail; inside of `vocab_axis` the device's own rows.
    tokens: places in the tail, over the rows of all devices; of those not inside: anything.
    inside: which tokens are in the tail.
    removed: 0 for a row that is there and -inf for one that only fills up; it has no gradient.
    dtype: dtype of the matrix product's operands, as in `linear_log_prob`.
    vocab_axis: mesh axis inside of which this code runs, each device with rows of its own.
  """
  parts = vocab_parallel.token_shards(vocab_axis)
  flat = narrow.reshape(-1, narrow.shape[-1]), tokens.reshape(-1), inside.reshape(-1)
  narrow_PNw, token_PN, inside_PN = (parts.split(x) for x in flat)
  n = token_PN.shape[1]
  tile = tiles.default_tile(
    math.ceil(n / 8), weight.shape[0], vocab_parallel.platform(), vocab_parallel.devices()
  )
  order_PN = jnp.argsort(~inside_PN, axis=1, stable=True)
  place_PN = jnp.argsort(order_PN, axis=1)
  # Every chunk is whole: what fills up the last one is a token that is read again.
  order_PN = jnp.pad(order_PN, [(0, 0), (0, -n % tile.tokens)])
  first = _First(order_PN, place_PN, inside_PN.sum(axis=1, dtype=jnp.int32).max())
  narrow_PNw, weight = vocab_parallel.varying((narrow_PNw, weight))
  plan = _Plan(tile, parts, dtype, vocab_axis)
  log_prob_PN = _log_prob(plan, narrow_PNw, weight, removed, token_PN, first)
  log_prob = parts.join(jnp.where(inside_PN, log_prob_PN, 0.0), flat[1].shape[0])
  return log_prob.reshape(tokens.shape)


class _Plan(NamedTuple):
  tile: tiles.Tile
  parts: vocab_parallel.TokenShards
  dtype: Dtype | None
  axis: str | None


class _First(NamedTuple):
  """Which tokens come first.

  Attributes:
    order: the tokens in order, [P, N], those of the tail first.
    place: where in that order each token is, [P, N].
    count: how many are visited.
  """

  order: Array
  place: Array
  count: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_prob(plan, narrow_PNw, weight, removed, token_PN, first):
  """Log-probabilities of the tokens that come first; of the others, any number."""
  ordered = _Chunk(_permuted(narrow_PNw, first.order), _permuted(token_PN, first.order))
  of_chunk = lambda chunk: _chunk_log_prob(plan, chunk.narrow, weight, removed, chunk.token)

  def step(index, found):
    new = of_chunk(_cut(plan, ordered, index))
    return lax.dynamic_update_slice_in_dim(found, new, index * plan.tile.tokens, axis=1)

  kind = jax.eval_shape(lambda: of_chunk(_cut(plan, ordered, 0)))
  start = vocab_parallel.varying(
    jnp.zeros(first.order.shape, jnp.float32), *vocab_parallel.varies_over(kind)
  )
  found = lax.fori_loop(0, _steps(plan, first), step, start)
  return _permuted(found, first.place)


class _Chunk(NamedTuple):
  """Some of the tokens: their vectors [P, n, w] and places in the tail [P, n]."""

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
  # Laid out in parts as they are, so that the flat tokens of a part stay on its devices.
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
  visited = jnp.arange(first.order.shape[1]) < cotangent_PN.shape[1]
  # The token that fills up the last chunk has its gradient where it is read first.
  cotangent = jnp.where(visited, _permuted(cotangent_PN, first.order), 0.0)
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
  return _permuted(d_narrow, first.place), d_weight.astype(weight.dtype), None, None, None


_log_prob.defvjp(_forward, _backward)


class Section(NamedTuple):
  """Blocks of consecutive tokens, counted from the section's own first token."""

  blocks: sampling.Blocks
  first: int


def concatenate_blocks(sections: tuple[Section, ...]) -> sampling.Blocks:
  """The blocks of one section after another's; narrower ones are filled up with -inf."""
  kinds = [jax.eval_shape(s.blocks.block, jax.ShapeDtypeStruct((), jnp.int32)) for s in sections]
  width = max(tokens.shape[0] for _, tokens in kinds)
  starts = [sum(s.blocks.count for s in sections[:i]) for i in range(len(sections))]

  def branch(section, start):
    def block(index):
      scores, tokens = section.blocks.block(index - start)
      missing = width - tokens.shape[0]
      scores = jnp.pad(
        scores, [(0, 0)] * (scores.ndim - 1) + [(0, missing)], constant_values=-jnp.inf
      )
      return scores, jnp.pad(section.first + tokens, (0, missing))

    return block

  branches = [branch(*pair) for pair in zip(sections, starts, strict=True)]

  def block(index):
    which = jnp.searchsorted(jnp.asarray(starts), index, side="right") - 1
    return lax.switch(which, branches, index)

  return sections[0].blocks._replace(count=sum(s.blocks.count for s in sections), block=block)
