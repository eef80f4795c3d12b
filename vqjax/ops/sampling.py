"""Which tokens are best, or a fair draw, when scores come a block of the vocabulary at a time?

A head hands its scores over in `Blocks`; nothing here ever holds the scores of the whole
vocabulary for every row. The order of the filters is temperature, then top_k, then top_p. Where
each device of a mesh axis has blocks of its own, candidates and [*B]-sized sums travel, not scores.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import topk, vocab_parallel

STORED_SCORES = 2**22
"""Scores, 16 MiB of them, that the search for a nucleus may keep instead of computing them anew."""


class Blocks(NamedTuple):
  """Scores over the vocabulary, a block at a time.

  Attributes:
    count: number of blocks.
    block: index of a block -> (scores [*B, W], tokens [W]). The blocks together name every token
      exactly once; further places score -inf, whatever token they name.
    batch: the leading shape *B.
    axis: mesh axis inside of which this code runs, each device with blocks of its own; or None.
  """

  count: int
  block: Callable[[Int[Array, ""]], tuple[Float[Array, "*B W"], Int[Array, "W"]]]
  batch: tuple[int, ...]
  axis: str | None = None

  @property
  def indices(self) -> Int[Array, "count"]:
    """What `block` is called with, one after another."""
    return jnp.arange(self.count, dtype=jnp.int32)

  def map(self, change: Callable) -> "Blocks":
    """The same blocks with scores `change(scores, tokens)`."""

    def block(index):
      scores, tokens = self.block(index)
      return change(scores, tokens), tokens

    return self._replace(block=block)

  def fold(self, step: Callable, carry: Any) -> Any:
    """step(carry, index) -> carry, from block to block."""
    # What each device finds is its own where its scores are.
    scores = jax.eval_shape(self.block, jax.ShapeDtypeStruct((), jnp.int32))[0]
    carry = vocab_parallel.varying(carry, *vocab_parallel.varies_over(scores))
    return lax.scan(lambda carry, index: (step(carry, index), None), carry, self.indices)[0]


def block_width(rows: int, vocab: int) -> int:
  """How many tokens of the vocabulary to score at once: up to 4096, at most 4 Mi scores in all."""
  return min(vocab, max(1, min(4096, 2**22 // max(rows, 1))))


def row_blocks(
  batch: tuple[int, ...], rows: int, vocab: int, scores: Callable, axis: str | None = None
) -> Blocks:
  """Blocks of consecutive tokens, from a function rows [W] -> scores [*B, W].

  Of a vocabulary of `vocab`, `rows` are here: all of them, or inside of `axis` one device's part,
  the last of which may be filled up. The last block starts early enough to fit; what it repeats,
  and what is beyond the vocabulary, scores -inf.
  """
  axis = vocab_parallel.inside(axis)
  width = block_width(math.prod(batch), rows)
  first = vocab_parallel.first_row(axis, rows)

  def block(index):
    start = jnp.minimum(index * width, rows - width)
    row = start + jnp.arange(width, dtype=jnp.int32)
    real = (row >= index * width) & (first + row < vocab)
    return jnp.where(real, scores(row), -jnp.inf), jnp.where(real, first + row, 0)

  return Blocks(-(-rows // width), block, tuple(batch), axis)


def allow(blocks: Blocks, allowed: Bool[ArrayLike, "..."] | None, vocab: int) -> Blocks:
  """Gives -inf to every token that `allowed`, [V] or [*B, V], does not mark."""
  if allowed is None:
    return blocks
  allowed = jnp.asarray(allowed)
  try:
    fits = allowed.shape[-1:] == (vocab,) and bool(
      jnp.broadcast_shapes(allowed.shape[:-1], blocks.batch) == blocks.batch
    )
  except ValueError:
    fits = False
  if not fits:
    raise ValueError(
      f"allowed {allowed.shape} does not fit rows {blocks.batch} of a vocabulary of {vocab}; give"
      f" {(vocab,)} or {(*blocks.batch, vocab)}"
    )
  return blocks.map(lambda scores, tokens: jnp.where(allowed[..., tokens], scores, -jnp.inf))


def best(blocks: Blocks, k: int) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Array]:
  """The k highest scores in descending order, their tokens, and the log-normaliser [*B], exact.

  Equal scores come in the order in which the blocks name them. A place for which no token scores
  above -inf has token -1.
  """

  def step(carry, index):
    found, max_B, sum_B = carry
    score_BW, token_W = blocks.block(index)
    score_BW = score_BW.astype(jnp.float32)
    new_max_B = jnp.maximum(max_B, score_BW.max(axis=-1))
    shift_B = _shift(new_max_B)
    sum_B = sum_B * jnp.exp(max_B - shift_B) + jnp.exp(score_BW - shift_B[..., None]).sum(axis=-1)
    return topk.merge(found, score_BW, token_W), new_max_B, sum_B

  least_B = jnp.full(blocks.batch, -jnp.inf, jnp.float32)
  start = topk.empty(blocks.batch, k), least_B, jnp.zeros(blocks.batch, jnp.float32)
  found, max_B, sum_B = blocks.fold(step, start)
  if blocks.axis:
    top_B = lax.pmax(max_B, blocks.axis)
    sum_B = lax.psum(sum_B * jnp.exp(max_B - _shift(top_B)), blocks.axis)
    found, max_B = topk.across_devices(found, blocks.axis), top_B
  return found.scores, found.tokens, max_B + jnp.log(sum_B)


def _shift(top):
  """What to subtract before exp: with every score so far at -inf the maximum is no number."""
  return jnp.where(jnp.isneginf(top), 0.0, top)


def draw(blocks: Blocks, key: PRNGKeyArray) -> Int[Array, "*B"]:
  """A token with probability softmax(scores), by the Gumbel-max trick over the blocks.

  -1 where every score is -inf.
  """
  first = vocab_parallel.first_row(blocks.axis, blocks.count)

  def step(carry, index):
    best_B, chosen_B = carry
    score_BW, token_W = blocks.block(index)
    noise_BW = gumbel(jax.random.fold_in(key, first + index), score_BW.shape)
    noisy_BW = score_BW.astype(jnp.float32) + noise_BW
    place_B = jnp.argmax(noisy_BW, axis=-1)
    top_B = jnp.take_along_axis(noisy_BW, place_B[..., None], axis=-1)[..., 0]
    better_B = top_B > best_B
    chosen_B = jnp.where(better_B, token_W[place_B].astype(jnp.int32), chosen_B)
    return jnp.maximum(best_B, top_B), chosen_B

  start = jnp.full(blocks.batch, -jnp.inf, jnp.float32), jnp.full(blocks.batch, -1, jnp.int32)
  return topk.winner(*blocks.fold(step, start), blocks.axis)


def gumbel(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
  """Gumbel noise, float32, of which no two values are likely to tie.

  The default has 2^23 values: among a quarter of a million tokens some would tie at the top.
  """
  return jax.random.gumbel(key, shape, jnp.float32, mode="high")


def sample(
  blocks: Blocks,
  key: PRNGKeyArray,
  temperature: float | int = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> Int[Array, "*B"]:
  """A token from softmax(scores / temperature), cut to the `top_k` best and the `top_p` nucleus.

  The nucleus is the smallest set of most probable tokens whose mass reaches `top_p`, and all that
  tie with its last. Without `top_k` its edge is found by bisection over the float32 scores: exact.
  Up to `STORED_SCORES` the scores are computed once and kept for that; beyond, every one of its 33
  passes computes them anew. A temperature below 1e-6, which float32 scores cannot tell from it, is
  the arg max. -1 where every score is -inf.
  """
  check_options(temperature, top_k, top_p)
  if temperature < 1e-6:
    return best(blocks, 1)[1][..., 0]
  blocks = blocks.map(lambda scores, _: scores.astype(jnp.float32) / temperature)
  if top_k is None:
    return draw(nucleus(blocks, top_p), key)
  score_Bk, token_Bk, _ = best(blocks, top_k)
  return draw_among(score_Bk, token_Bk, key, top_p)


def draw_among(
  scores: Float[Array, "*B n"],
  tokens: Int[Array, "*B n"],
  key: PRNGKeyArray,
  top_p: float | None = None,
  axis: str | None = None,
) -> Int[Array, "*B"]:
  """A draw from the softmax over candidates that each row has of its own, cut to its `top_p`.

  Inside of `axis` each device has candidates of its own. -1 where every score is -inf.
  """
  axis = vocab_parallel.inside(axis)
  count = scores.shape[-1]
  index = vocab_parallel.first_row(axis, count) + jnp.arange(count, dtype=jnp.int32)
  places = Blocks(1, lambda _: (scores, index), scores.shape[:-1], axis)
  place_B = draw(nucleus(places, top_p), key)
  here_B = place_B - vocab_parallel.first_row(axis, count)
  mine_B = (here_B >= 0) & (here_B < count)
  here_B1 = jnp.where(mine_B, here_B, 0)[..., None]
  chosen_B = jnp.take_along_axis(tokens, here_B1, axis=-1)[..., 0]
  if axis:
    chosen_B = lax.psum(jnp.where(mine_B, chosen_B, 0), axis)
  return jnp.where(place_B < 0, -1, chosen_B)


def check_options(temperature: float | int, top_k: int | None, top_p: float | None) -> None:
  """Raises ValueError for an option of `sample` that no distribution has."""
  if not 0 <= temperature < math.inf:
    raise ValueError(
      f"temperature {temperature} is negative or not finite; 0 is the arg max, 1 leaves as is"
    )
  if top_k is not None and top_k < 1:
    raise ValueError(f"top_k {top_k} leaves no token; give at least 1, or None for no limit")
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f"top_p {top_p} is not a probability mass; give more than 0 and at most 1")


def nucleus(blocks: Blocks, top_p: float | None) -> Blocks:
  """Gives -inf to every token outside the smallest set of best tokens whose mass reaches `top_p`.

  Tokens that tie with the last of the set belong to it. None or 1 leaves the blocks as they are.
  """
  if top_p is None or top_p == 1:
    return blocks
  blocks = _stored(blocks)
  edge_B1 = nucleus_edge(blocks, top_p)[..., None]
  return blocks.map(lambda scores, _: jnp.where(scores >= edge_B1, scores, -jnp.inf))


def nucleus_edge(
  blocks: Blocks, top_p: float, log_z: Float[Array, "*B"] | None = None
) -> Float[Array, "*B"]:
  """The lowest score in the nucleus, by bisection over the float32 numbers.

  A probability is exp(score - log_z); None: the log-normaliser of all that the blocks hold.
  """
  top_B1, _, own_B = best(blocks, 1)
  log_z_B = own_B if log_z is None else log_z

  def mass_from(edge_B):
    def add(total_B, index):
      score_BW = blocks.block(index)[0].astype(jnp.float32)
      prob_BW = jnp.exp(score_BW - log_z_B[..., None])
      return total_B + jnp.where(score_BW >= edge_B[..., None], prob_BW, 0.0).sum(axis=-1)

    mass_B = blocks.fold(add, jnp.zeros(blocks.batch, jnp.float32))
    return lax.psum(mass_B, blocks.axis) if blocks.axis else mass_B

  def halve(_, bracket):
    low_B, high_B = bracket
    middle_B = low_B + (high_B - low_B) // 2
    enough_B = mass_from(_from_ordinal(middle_B)) >= top_p
    return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

  # The mass is at least top_p from -inf on, and zero just above the best score.
  high_B = _to_ordinal(top_B1[..., 0]) + 1
  low_B, _ = vocab_parallel.varying((_to_ordinal(jnp.full(blocks.batch, -jnp.inf)), high_B))
  edge_B, _ = lax.fori_loop(0, 32, halve, (low_B, high_B))
  return _from_ordinal(edge_B)


def _stored(blocks: Blocks) -> Blocks:
  """The same blocks, their scores computed once and kept, where they are few enough."""
  score, _ = jax.eval_shape(blocks.block, jax.ShapeDtypeStruct((), jnp.int32))
  if blocks.count * math.prod(score.shape) > STORED_SCORES:
    return blocks
  kept_CBW, token_CW = lax.map(blocks.block, blocks.indices)
  return blocks._replace(block=lambda index: (kept_CBW[index], token_CW[index]))


_SIGN = np.uint32(0x80000000)


def _to_ordinal(x: Float[Array, "*B"]) -> Array:
  """uint32 that sorts as the float32 does, so that bisection ends at two neighbouring floats."""
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_ordinal(ordinal):
  bits = jnp.where(ordinal >= _SIGN, ordinal ^ _SIGN, ~ordinal)
  return lax.bitcast_convert_type(bits, jnp.float32)
