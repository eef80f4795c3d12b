"""Top-k and sampling from scores that come a block of the vocabulary at a time.

A head provides its scores as `Blocks`; the scores of the whole vocabulary never exist for all rows
at once. Filters apply in the order temperature, top_k, top_p. Where each device of a mesh axis has
its own blocks, devices exchange candidates and [*B]-sized sums, not scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import topk, vocab_parallel
from vqjax.ops.stable import exp_shift

STORED_SCORES = 2**25
"""Largest number of scores (128 MiB) that are stored instead of recomputed or split."""

CACHED_SCORES = 2**20
"""Number of scores of a block (4 MiB) that is computed and reduced inside of a cache."""


class Blocks(NamedTuple):
  """Scores over the vocabulary, a block at a time.

  Attributes:
    count: number of blocks.
    block: index of a block -> (scores [*B, W], tokens [W]). The blocks together hold every token
      exactly once; padding scores -inf, and its tokens are arbitrary.
    batch: the leading shape *B.
    axis: manual mesh axis over which each device has its own blocks, or None.
    score_at: positions [*B, n] -> (scores [*B, n], tokens [*B, n]) where a score costs little and
      need not be kept, or None. Position i·W + j is entry j of block i.
  """

  count: int
  block: Callable[[Int[Array, ""]], tuple[Float[Array, "*B W"], Int[Array, "W"]]]
  batch: tuple[int, ...]
  axis: str | None = None
  score_at: (
    Callable[[Int[Array, "*B n"]], tuple[Float[Array, "*B n"], Int[Array, "*B n"]]] | None
  ) = None

  @property
  def indices(self) -> Int[Array, "count"]:
    """Indices of all blocks."""
    return jnp.arange(self.count, dtype=jnp.int32)

  @property
  def width(self) -> int:
    """Number of scores of a row in a block, W."""
    return jax.eval_shape(self.block, jax.ShapeDtypeStruct((), jnp.int32))[1].shape[0]

  def map(self, change: Callable) -> "Blocks":
    """Blocks whose scores are `change(scores [*B, n], tokens)`, tokens [n] or [*B, n]."""

    def changed(score):
      def function(index):
        scores, tokens = score(index)
        return change(scores, tokens), tokens

      return function

    score_at = None if self.score_at is None else changed(self.score_at)
    return self._replace(block=changed(self.block), score_at=score_at)

  def fold(self, step: Callable, carry: Any) -> Any:
    """The carry after `step(carry, index) -> carry` of all blocks, one after another."""
    if self.count == 1:
      # A loop would copy what its only step reads, a whole weight for instance.
      return step(carry, jnp.zeros((), jnp.int32))
    # A carry varies over the same mesh axes as the scores that are merged into it.
    scores = jax.eval_shape(self.block, jax.ShapeDtypeStruct((), jnp.int32))[0]
    carry = vocab_parallel.varying(carry, *vocab_parallel.varies_over(scores))
    # `scan`, because a `fori_loop` has no reverse mode, which distillation from blocks needs.
    return lax.scan(lambda carry, index: (step(carry, index), None), carry, self.indices)[0]


def block_width(rows: int, vocab: int, scores: int = 2**22) -> int:
  """Number of tokens of a block: up to 4096, and at most `scores` for all rows."""
  return min(vocab, max(1, min(4096, scores // max(rows, 1))))


def row_blocks(
  batch: tuple[int, ...],
  rows: int,
  vocab: int,
  scores: Callable[[Callable], Float[Array, "*B W"]],
  axis: str | None = None,
  *,
  width: int | None = None,
  scores_at: Callable[[Int[Array, "*B n"]], Float[Array, "*B n"]] | None = None,
) -> Blocks:
  """Blocks of consecutive tokens, from the arrays that hold a row for each token.

  There are `rows` of the `vocab` tokens on this device: all of them, or inside of `axis` its shard,
  which may be padded. The last block starts early enough to fit; tokens that it repeats, and rows
  beyond the vocabulary, score -inf.

  Args:
    batch: the leading shape *B of the scores.
    rows: number of rows on this device.
    vocab: number of tokens on all devices.
    scores: `cut` -> scores [*B, W] of a block, where `cut` takes a tree of arrays [rows, ...] to
      their part [W, ...] of the block.
    axis: mesh axis over which the rows are sharded.
    width: number of tokens of a block, W; None: `block_width`.
    scores_at: rows [*B, n] of this device -> their scores, where they cost little.
  """
  axis = vocab_parallel.inside(axis)
  # Of the device's own rows: all devices have equally many, and so equally many blocks.
  width = min(rows, width) if width else block_width(math.prod(batch), rows)
  first = vocab_parallel.first_row(axis, rows)

  def named(score, row, begin):
    """Scores and tokens of rows; those that the block before holds are padding."""
    real = (row >= begin) & (first + row < vocab)
    return jnp.where(real, score, -jnp.inf), jnp.where(real, first + row, 0)

  def block(index):
    start = jnp.minimum(index * width, rows - width)
    row_W = start + jnp.arange(width, dtype=jnp.int32)
    whole = lambda tree: tree
    part = lambda tree: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, width), tree)
    return named(scores(whole if width == rows else part), row_W, index * width)

  def score_at(position_Bn):
    index_Bn = position_Bn // width
    row_Bn = jnp.minimum(index_Bn * width, rows - width) + position_Bn % width
    return named(scores_at(row_Bn), row_Bn, index_Bn * width)

  return Blocks(-(-rows // width), block, tuple(batch), axis, scores_at and score_at)


def allow(blocks: Blocks, allowed: Bool[ArrayLike, "..."] | None, vocab: int) -> Blocks:
  """Blocks that score -inf where the mask `allowed`, [V] or [*B, V], is False."""
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
      f"`allowed` must have shape {(vocab,)} or {(*blocks.batch, vocab)}; got {allowed.shape}. Give"
      " one boolean for each token of the vocabulary."
    )
  return blocks.map(lambda scores, tokens: jnp.where(marked(allowed, tokens), scores, -jnp.inf))


def marked(allowed: Bool[Array, "..."], tokens: Int[Array, "*#B n"]) -> Bool[Array, "*#B n"]:
  """Whether a mask [V] or [*B, V] marks the tokens, [n] or each row's own [*B, n]."""
  if tokens.ndim == 1 or allowed.ndim == 1:
    return allowed[..., tokens]
  # The mask may have fewer leading axes than the rows, as in broadcasting.
  allowed = allowed.reshape(*[1] * (tokens.ndim - allowed.ndim), *allowed.shape)
  return jnp.take_along_axis(allowed, tokens, axis=-1)


def best(blocks: Blocks, k: int) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Array]:
  """The k highest scores in descending order, tokens, and log-normaliser [*B].

  Equal scores keep the order of the blocks. Entries without a token of a score above -inf have
  token -1.
  """
  width = blocks.width
  # Where a score can be computed again, a list of the k best chunks is kept and no score.
  size = topk.chunk_size(blocks.count * width, k) if blocks.score_at else 1

  def step(carry, index):
    top, max_B, sum_B = carry
    score_BW, token_W = blocks.block(index)
    score_BW = score_BW.astype(jnp.float32)
    new_max_B = jnp.maximum(max_B, score_BW.max(axis=-1))
    shift_B = exp_shift(new_max_B)
    sum_B = sum_B * jnp.exp(max_B - shift_B) + jnp.exp(score_BW - shift_B[..., None]).sum(axis=-1)
    if size > 1:
      score_BW = topk.chunk_maxima(score_BW, size)
      # The position of a chunk's first token names the chunk.
      token_W = index * width + size * jnp.arange(score_BW.shape[-1], dtype=jnp.int32)
    return topk.merge(top, score_BW, token_W), new_max_B, sum_B

  least_B = jnp.full(blocks.batch, -jnp.inf, jnp.float32)
  start = topk.empty(blocks.batch, k), least_B, jnp.zeros(blocks.batch, jnp.float32)
  top, max_B, sum_B = blocks.fold(step, start)
  if size > 1:
    top = _best_of_chunks(blocks, top.tokens, size, width)
  if blocks.axis:
    all_max_B = lax.pmax(max_B, blocks.axis)
    sum_B = lax.psum(sum_B * jnp.exp(max_B - exp_shift(all_max_B)), blocks.axis)
    top, max_B = topk.across_devices(top, blocks.axis), all_max_B
  return top.scores, top.tokens, max_B + jnp.log(sum_B)


def _best_of_chunks(blocks, first_Bk, size, width):
  """The k highest scores of k chunks, given by the positions of their first tokens."""
  # In the order of the positions, for ties; the number of a missing chunk is -1.
  first_Bk1 = jnp.sort(first_Bk, axis=-1)[..., None]
  offset = jnp.arange(size, dtype=jnp.int32)
  real = (first_Bk1 >= 0) & (first_Bk1 % width + offset < width)
  flat = lambda x: x.reshape(*x.shape[:-2], x.shape[-2] * size)
  score_Bn, token_Bn = blocks.score_at(flat(jnp.where(real, first_Bk1 + offset, 0)))
  score_Bn = jnp.where(flat(real), score_Bn.astype(jnp.float32), -jnp.inf)
  empty = vocab_parallel.varying((topk.empty(blocks.batch, first_Bk.shape[-1]), score_Bn))[0]
  return topk.merge(empty, score_Bn, token_Bn)


def draw(blocks: Blocks, key: PRNGKeyArray) -> Int[Array, "*B"]:
  """A Gumbel-max draw from softmax(scores); -1 where every score is -inf.

  A chunk of about sqrt(W) tokens of a block of W is drawn by its mass, then a token of the chunk:
  that is the same distribution with sqrt(W) times fewer random numbers.
  """
  width = blocks.width
  size = max(1, math.isqrt(width))
  chunk_key, token_key = jax.random.split(key)
  # Blocks are numbered over all devices, so that no two of them use the same noise.
  first = vocab_parallel.first_row(blocks.axis, blocks.count)
  offset = jnp.arange(size, dtype=jnp.int32)

  def step(carry, index):
    best_B, score_Bs, token_Bs = carry
    score_BW, token_W = blocks.block(index)
    mass_BC = topk.by_chunk(_log_mass, score_BW.astype(jnp.float32), size)
    noisy_BC = mass_BC + gumbel(jax.random.fold_in(chunk_key, first + index), mass_BC.shape)
    chunk_B1 = jnp.argmax(noisy_BC, axis=-1, keepdims=True).astype(jnp.int32)
    top_B = jnp.take_along_axis(noisy_BC, chunk_B1, axis=-1)[..., 0]
    place_Bs = chunk_B1 * size + offset
    # The last chunk may be shorter.
    inside_Bs, place_Bs = place_Bs < width, jnp.minimum(place_Bs, width - 1)
    new_Bs = jnp.take_along_axis(score_BW, place_Bs, axis=-1).astype(jnp.float32)
    new_Bs = jnp.where(inside_Bs, new_Bs, -jnp.inf)
    # Strictly: where every score is -inf the token stays -1.
    better_B1 = (top_B > best_B)[..., None]
    score_Bs = jnp.where(better_B1, new_Bs, score_Bs)
    token_Bs = jnp.where(better_B1, token_W[place_Bs].astype(jnp.int32), token_Bs)
    return jnp.maximum(best_B, top_B), score_Bs, token_Bs

  lowest = lambda *shape: jnp.full((*blocks.batch, *shape), -jnp.inf, jnp.float32)
  tokens = jnp.full((*blocks.batch, size), -1, jnp.int32)
  best_B, score_Bs, token_Bs = blocks.fold(step, (lowest(), lowest(size), tokens))
  choice_B1 = jnp.argmax(score_Bs + gumbel(token_key, score_Bs.shape), axis=-1, keepdims=True)
  token_B = jnp.take_along_axis(token_Bs, choice_B1, axis=-1)[..., 0]
  return topk.winner(best_B, token_B, blocks.axis)


def _log_mass(scores):
  """log of the sum of exp(score) over the last axis, -inf where all are."""
  top = scores.max(axis=-1)
  shift = exp_shift(top)
  return jnp.log(jnp.exp(scores - shift[..., None]).sum(axis=-1)) + shift


def gumbel(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
  """Gumbel noise in float32, with more than the default's 2^23 distinct values."""
  # Among a quarter of a million tokens, some of the default's values would tie at the top.
  return jax.random.gumbel(key, shape, jnp.float32, mode="high")


def sample(
  blocks: Blocks,
  key: PRNGKeyArray,
  temperature: float | int = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> Int[Array, "*B"]:
  """A token from softmax(scores / temperature), cut by `top_k` and `top_p`.

  The nucleus is the smallest set of most probable tokens whose mass reaches `top_p`, with all
  tokens that tie with its last. Without `top_k` its lowest score is found, exactly, by bisection
  over the float32 numbers. Up to `STORED_SCORES` the scores are computed once and stored for the
  bisection; beyond, each of its 33 passes computes them anew. A temperature below 1e-6, which
  float32 scores cannot resolve, is the arg max. The token is -1 where every score is -inf.

  Raises:
    ValueError: `temperature`, `top_k` or `top_p` is out of range.
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
  """A draw from the softmax over each row's own candidates, cut by `top_p`.

  Inside of `axis` each device has its own candidates. The token is -1 where every score is -inf.
  """
  axis = vocab_parallel.inside(axis)
  count = scores.shape[-1]
  index = vocab_parallel.first_row(axis, count) + jnp.arange(count, dtype=jnp.int32)
  # One block of candidate numbers, which unlike the tokens are equal for all rows.
  blocks = Blocks(1, lambda _: (scores, index), scores.shape[:-1], axis)
  number_B = draw(nucleus(blocks, top_p), key)
  local_B = number_B - vocab_parallel.first_row(axis, count)
  is_local_B = (local_B >= 0) & (local_B < count)
  local_B1 = jnp.where(is_local_B, local_B, 0)[..., None]
  token_B = jnp.take_along_axis(tokens, local_B1, axis=-1)[..., 0]
  if axis:
    token_B = lax.psum(jnp.where(is_local_B, token_B, 0), axis)
  return jnp.where(number_B < 0, -1, token_B)


def check_options(temperature: float | int, top_k: int | None, top_p: float | None) -> None:
  """Raise ValueError if an option of `sample` is out of range."""
  if not 0 <= temperature < math.inf:
    raise ValueError(
      f"`temperature` must be finite and at least 0; got {temperature}. 0 is the arg max, 1 keeps"
      " the distribution."
    )
  if top_k is not None and top_k < 1:
    raise ValueError(f"`top_k` must be at least 1; got {top_k}. Use None for no limit.")
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f"`top_p` must be in (0, 1]; got {top_p}. Use None for no limit.")


def nucleus(blocks: Blocks, top_p: float | None) -> Blocks:
  """Blocks in which tokens outside of the `top_p` nucleus score -inf.

  The nucleus is the smallest set of best tokens whose mass reaches `top_p`, with all tokens that
  tie with its last. None or 1 leaves the blocks as they are.
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

  A probability is exp(score - log_z); None: the log-normaliser of all blocks.
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

  # Invariant: the mass from `low` on is at least top_p, that from `high` on is below it. 2^32
  # numbers take 32 halvings.
  high_B = _to_ordinal(top_B1[..., 0]) + 1
  low_B, _ = vocab_parallel.varying((_to_ordinal(jnp.full(blocks.batch, -jnp.inf)), high_B))
  edge_B, _ = lax.fori_loop(0, 32, halve, (low_B, high_B))
  return _from_ordinal(edge_B)


def _stored(blocks: Blocks) -> Blocks:
  """Blocks whose scores are stored, if there are at most `STORED_SCORES`."""
  if blocks.count * math.prod(blocks.batch) * blocks.width > STORED_SCORES:
    return blocks
  if blocks.count == 1:
    score_BW, token_W = blocks.block(jnp.zeros((), jnp.int32))
    return blocks._replace(block=lambda _: (score_BW, token_W), score_at=None)
  score_CBW, token_CW = lax.map(blocks.block, blocks.indices)
  return blocks._replace(block=lambda index: (score_CBW[index], token_CW[index]), score_at=None)


_SIGN = np.uint32(0x80000000)


def _to_ordinal(x: Float[Array, "*B"]) -> Array:
  """A uint32 in the order of the float32, for bisection between neighbours."""
  # The bits of a positive float sort as integers; those of a negative one sort backwards.
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_ordinal(ordinal):
  bits = jnp.where(ordinal >= _SIGN, ordinal ^ _SIGN, ~ordinal)
  return lax.bitcast_convert_type(bits, jnp.float32)
