"""Top-k and sampling from scores that come a block of the vocabulary at a time.

A head provides its scores as `Blocks`; the scores of the whole vocabulary never exist for all rows
at once. Filters apply in the order temperature, top_k, top_p. Where each device of a mesh axis has
its own blocks, devices exchange candidates and [*B]-sized sums, not scores.
"""

# Scores come as `Blocks`, and each of these functions is one or two passes over them:
#
#   best        the k highest scores, and log Z            log_prob, log_z    of single tokens
#   nucleus     the blocks, -inf below its edge            draw               one token a row
#
# The edge of a nucleus is found bit by bit, from the mass above a trial number: 8 passes of 4 bits
# over scores that are computed anew, or 32 of one bit over stored ones. A draw takes a chunk by its
# mass and then a token of it, so that few random numbers are needed.
#
# A block is [W, *B], vocabulary first: a reduction over the vocabulary then adds whole rows, and
# never crosses the lanes of a vector.

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import device, topk, vocab_parallel
from vqjax.ops.scores import exp_shift
from vqjax.ops.vocabulary import allowed_of, check_numbers, is_count
from vqjax.types import MeshAxes, Shape

__all__ = ["Blocks", "best", "gumbel", "log_z", "sample"]

# Number of scores of a block (4 MiB) that is computed and reduced inside of a cache.
CACHED_SCORES = 2**20

# Multiple that the width of a block is, where it can be, and most tokens of a chunk of a draw.
_CHUNK = 256


class Blocks(NamedTuple):
  """Scores over the vocabulary, a block at a time.

  Attributes:
    count: number of blocks.
    block: index of a block -> (scores [W, *B], tokens [W]). The blocks together hold every token
      exactly once; padding scores -inf, and its tokens are arbitrary.
    batch: the trailing shape *B.
    axis: manual mesh axis over which each device has its own blocks, or None.
  """

  count: int
  block: Callable[[Int[Array, ""]], tuple[Float[Array, "W *B"], Int[Array, "W"]]]
  batch: Shape
  axis: MeshAxes | None = None

  @property
  def indices(self) -> Int[Array, "count"]:
    """Indices of all blocks."""
    return jnp.arange(self.count, dtype=jnp.int32)

  @property
  def width(self) -> int:
    """Number of scores of a row in a block, W."""
    return jax.eval_shape(self.block, jax.ShapeDtypeStruct((), jnp.int32))[1].shape[0]

  def map(self, change: Callable) -> "Blocks":
    """Blocks whose scores are `change(scores, tokens)`."""

    def block(index):
      scores, tokens = self.block(index)
      return change(scores, tokens), tokens

    return self._replace(block=block)

  def fold(self, step: Callable, carry: Any) -> Any:
    """The carry after `step(carry, index) -> carry` of all blocks, one after another."""
    if self.count > 1:
      carry = self._varying(carry)
    return _over_blocks(self.count, step, carry)

  def _varying(self, carry: Any) -> Any:
    """A carry that varies over the same mesh axes as the scores that are merged into it."""
    scores = jax.eval_shape(self.block, jax.ShapeDtypeStruct((), jnp.int32))[0]
    return vocab_parallel.varying(carry, *vocab_parallel.varies_over(scores))


def _over_blocks(count, step, carry):
  """The carry after `step(carry, index) -> carry` of so many blocks."""
  if count == 1:
    # A loop would copy what its only step reads, a whole weight for instance.
    return step(carry, jnp.zeros((), jnp.int32))
  indices = jnp.arange(count, dtype=jnp.int32)
  return lax.scan(lambda carry, index: (step(carry, index), None), carry, indices)[0]


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """How a token is drawn from softmax(scores / temperature).

  Filters apply in the order temperature, top_k, top_p. The nucleus is the smallest set of most
  probable tokens whose mass reaches `top_p`; of equally probable tokens it has the first. A
  temperature below 1e-6, which float32 scores cannot resolve, is the arg max.

  Attributes:
    temperature: divides the scores; 0 takes the arg max.
    top_k: number of best tokens that are kept; None: all.
    top_p: mass of the nucleus; None or 1: all.

  Raises:
    TypeError: an option is not a number.
    ValueError: an option is out of range.
  """

  temperature: float | int = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self):
    filters = {"top_k": self.top_k, "top_p": self.top_p}
    given = {name: number for name, number in filters.items() if number is not None}
    check_numbers(temperature=self.temperature, **given)
    if not 0 <= self.temperature <= 1e30:
      raise ValueError(
        f"`temperature` must be finite and at least 0; got {self.temperature}. 0 is the arg max, 1"
        " keeps the distribution."
      )
    if self.top_k is not None and (not is_count(self.top_k) or self.top_k < 1):
      raise ValueError(
        f"`top_k` must be an int of at least 1; got {self.top_k}. Use None for no limit."
      )
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"`top_p` must be in (0, 1]; got {self.top_p}. Use None for no limit.")
    # Large integers of Python are not numbers of JAX.
    object.__setattr__(self, "temperature", float(self.temperature))

  @property
  def is_greedy(self) -> bool:
    """Whether the draw is the arg max."""
    return self.temperature < 1e-6

  @property
  def has_nucleus(self) -> bool:
    """Whether `top_p` removes tokens."""
    return self.top_p is not None and self.top_p < 1

  @property
  def kept(self) -> int | None:
    """Number of best tokens that are drawn among: 1 for the arg max; None: all."""
    return 1 if self.is_greedy else self.top_k

  @property
  def is_plain(self) -> bool:
    """Whether every token may be drawn, by its probability at the temperature."""
    return self.kept is None and not self.has_nucleus


def block_width(rows: int, vocab: int) -> int:
  """Number of tokens of a block: at most `device.Device.block` scores for all rows."""
  most = device.current().block
  return min(vocab, max(1, min(most // 1024, most // max(rows, 1))))


def row_blocks(
  batch: Shape,
  rows: int,
  vocab: int,
  scores: Callable[[Callable], Float[Array, "W *B"]],
  axis: MeshAxes | None = None,
  width: int | None = None,
) -> Blocks:
  """Blocks of consecutive tokens, from arrays that hold a row for each token.

  There are `rows` of the `vocab` tokens on this device: all of them, or inside of `axis` its shard,
  either of which may be padded. The last block starts early enough to fit; tokens that it repeats,
  and rows beyond the vocabulary, score -inf.

  Args:
    batch: the trailing shape *B of the scores.
    rows: number of rows on this device.
    vocab: number of tokens on all devices.
    scores: `cut` -> scores [W, *B] of a block, where `cut` takes a tree of arrays [rows, ...] to
      their part [W, ...] of the block.
    axis: mesh axis over which the rows are sharded.
    width: largest number of tokens of a block, W; None: `block_width`.
  """
  axis = vocab_parallel.inside(axis)
  # Of the device's own rows: all devices have equally many, and so equally many blocks.
  width = min(rows, width or block_width(math.prod(batch), rows))
  count = -(-rows // width)
  # Equal blocks, so that the last one repeats few rows of the one before, which whole chunks fill.
  width = min(width, _CHUNK * -(-rows // (count * _CHUNK)))
  first = vocab_parallel.first_row(axis, rows)

  def block(index):
    start = jnp.minimum(index * width, rows - width)
    part = lambda tree: jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, width), tree)
    score_WB = scores(part if count > 1 else lambda tree: tree)
    row_W = start + jnp.arange(width, dtype=jnp.int32)
    if count * width == rows == vocab and axis is None:
      return score_WB, row_W
    real_W = (row_W >= index * width) & (first + row_W < vocab)
    return mask_rows(score_WB, real_W), jnp.where(real_W, first + row_W, 0)

  return Blocks(count, block, tuple(batch), axis)


def stored_block(
  scores: Float[Array, "V *B"], vocab: int, finish: Callable, axis: MeshAxes | None = None
) -> Blocks:
  """One block of scores that exist, `row_blocks` of `finish(scores, cut)`."""
  rows, *batch = scores.shape
  # The barrier keeps what is done with the scores out of their product.
  scores = lax.optimization_barrier(scores)
  return row_blocks(tuple(batch), rows, vocab, lambda cut: finish(cut(scores), cut), axis, rows)


def mask_rows(scores: Float[Array, "W *B"], kept: Bool[Array, "W"]) -> Float[Array, "W *B"]:
  """The scores, -inf in rows that are not kept."""
  return jnp.where(kept.reshape(-1, *[1] * (scores.ndim - 1)), scores, -jnp.inf)


def allow(blocks: Blocks, allowed: Bool[ArrayLike, "..."] | None, vocab: int) -> Blocks:
  """Blocks that score -inf where the mask `allowed`, [V] or [*B, V], is False."""
  if allowed is None:
    return blocks
  allowed = allowed_of(allowed)
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
  if allowed.ndim == 1:
    return blocks.map(lambda scores, tokens: mask_rows(scores, allowed[tokens]))
  # The mask may have fewer leading axes than the rows, as in broadcasting.
  allowed = allowed.reshape(*[1] * (len(blocks.batch) + 1 - allowed.ndim), *allowed.shape)
  of_tokens = lambda tokens: jnp.moveaxis(allowed[..., tokens], -1, 0)
  return blocks.map(lambda scores, tokens: jnp.where(of_tokens(tokens), scores, -jnp.inf))


def best(
  blocks: Blocks, k: int, normalizer: bool = True
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Float[Array, "*B"] | None]:
  """The k highest scores in descending order, tokens, and log-normaliser [*B].

  Equal scores keep the order of the blocks. Entries without a token of a score above -inf have
  token -1. Without `normalizer` it is None, and no exponential is computed.
  """

  def step(carry, index):
    top, sums = carry
    score_WB, token_W = blocks.block(index)
    score_WB = score_WB.astype(jnp.float32)
    return topk.merge_rows(top, score_WB, token_W), sums and sums.add(score_WB)

  least_B = jnp.full(blocks.batch, -jnp.inf, jnp.float32)
  sums = _Exponentials(least_B, jnp.zeros_like(least_B)) if normalizer else None
  top, sums = blocks.fold(step, (topk.empty(blocks.batch, k), sums))
  top = topk.across_devices(top, blocks.axis)
  return top.scores, top.tokens, sums and sums.log(blocks.axis)


class _Exponentials(NamedTuple):
  """A sum of exp(score - top), and the highest score so far, `top`."""

  top: Float[Array, "*B"]
  total: Float[Array, "*B"]

  def add(self, scores: Float[Array, "W *B"]) -> "_Exponentials":
    """The sum with further scores."""
    flat = scores
    if math.prod(self.top.shape) == 1:
      # XLA's sums for CPUs take 20 times as long over both axes of [W, 1], and only a barrier keeps
      # it from undoing the change of shape.
      flat = lax.optimization_barrier(scores.reshape(-1))
    top_B = jnp.maximum(self.top, flat.max(axis=0).reshape(self.top.shape))
    shift_B = exp_shift(top_B)
    new_B = jnp.exp(flat - shift_B.reshape(flat.shape[1:])).sum(axis=0)
    total_B = self.total * jnp.exp(self.top - shift_B) + new_B.reshape(self.top.shape)
    return _Exponentials(top_B, total_B)

  def log(self, axis: MeshAxes | None) -> Float[Array, "*B"]:
    """The logarithm of the sum over all devices of `axis`."""
    if axis is None:
      return self.top + jnp.log(self.total)
    top_B = lax.pmax(self.top, axis)
    total_B = lax.psum(self.total * jnp.exp(self.top - exp_shift(top_B)), axis)
    return top_B + jnp.log(total_B)


def log_z(blocks: Blocks, temperature: float | int = 1.0) -> Float[Array, "*B"]:
  """Log-normaliser of softmax(scores / temperature), differentiable in both modes.

  The gradient computes each block once more.
  """
  nothing = jnp.full(blocks.batch, -1, jnp.int32)
  top_B, log_sum_B, _ = _log_sum_and_own(blocks, nothing, temperature)
  return top_B + log_sum_B


def log_prob(
  blocks: Blocks, token: Int[Array, "*B"], temperature: Float[Array, "*B"] | float | int = 1.0
) -> Float[Array, "*B"]:
  """Log-probability in nats of one token a row under softmax(scores / temperature).

  It is differentiable in both modes; the gradient computes each block once more.
  """
  top_B, log_sum_B, own_B = _log_sum_and_own(blocks, token, temperature)
  # In this order: own - log Z would lose digits where both are large.
  return (own_B - exp_shift(top_B)) - log_sum_B


def _log_sum_and_own(blocks, token, temperature):
  """The maximum m of scores / T, log of the sum of exp(score / T - m), and score / T of a token."""

  def step(carry, index):
    max_B, sum_B, own_B, count_B = carry
    score_WB, token_W = blocks.block(index)
    score_WB = score_WB.astype(jnp.float32) / temperature
    # The result does not depend on the maximum, so that no gradient has to pass through it.
    new_max_B = jnp.maximum(max_B, lax.stop_gradient(score_WB).max(axis=0))
    shift_B = exp_shift(new_max_B)
    sum_B = sum_B * jnp.exp(max_B - shift_B) + jnp.exp(score_WB - shift_B).sum(axis=0)
    # Padding names some token, and scores -inf.
    is_own_WB = (token_W.reshape(-1, *[1] * token.ndim) == token) & ~jnp.isneginf(score_WB)
    own_B = own_B + jnp.where(is_own_WB, score_WB, 0.0).sum(axis=0)
    return new_max_B, sum_B, own_B, count_B + is_own_WB.sum(axis=0, dtype=jnp.float32)

  zero_B = jnp.zeros(blocks.batch, jnp.float32)
  start = jnp.full_like(zero_B, -jnp.inf), zero_B, zero_B, zero_B
  restart = lambda last: (last[0], *map(jnp.zeros_like, last[1:]))
  max_B, sum_B, own_B, count_B = summed(blocks, step, start, restart)
  if blocks.axis:
    top_B = vocab_parallel.common_shift(max_B, blocks.axis)
    sum_B = sum_B * jnp.exp(max_B - exp_shift(top_B))
    sum_B, own_B, count_B = lax.psum((sum_B, own_B, count_B), blocks.axis)
    max_B = top_B
  return max_B, jnp.log(sum_B), jnp.where(count_B > 0, own_B, -jnp.inf)


def summed(blocks: Blocks, step: Callable, start: Any, restart: Callable) -> Any:
  """The carry of `blocks.fold(step, start)`, whose gradient computes each block once more.

  That of a loop would keep the carries of all blocks, which are as many numbers as the scores where
  blocks are narrow. It is differentiable in both modes.

  Args:
    blocks: the blocks.
    step: carry, index -> carry: adds what is known of a block to float32 sums, relative to maxima
      through which no gradient passes.
    start: the carry without any block.
    restart: the last carry -> an empty one with its maxima, to which a block adds what it
      contributes to the last one.
  """
  index = jax.ShapeDtypeStruct((), jnp.int32)
  start = blocks._varying(start)
  # What a step reads becomes arguments, of which there may be derivatives.
  made, tree = jax.make_jaxpr(step)(start, index), jax.tree.structure(start)

  def step_of(arrays):
    run = jaxpr_as_fun(ClosedJaxpr(made.jaxpr, arrays))
    return lambda carry, index: jax.tree.unflatten(tree, run(*jax.tree.leaves(carry), index))

  return _summed(blocks.count, step_of, restart, start, *made.consts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _summed(count: int, step_of: Callable, restart: Callable, start: Any, *arrays: Array) -> Any:
  return _over_blocks(count, step_of(arrays), start)


@_summed.defjvp
def _summed_jvp(count, step_of, restart, primals, tangents):
  (start, *arrays), (_, *d_arrays) = primals, tangents
  last = _summed(count, step_of, restart, start, *arrays)
  empty = restart(last)

  # Recomputed: reverse mode would keep the masses of all blocks, [*B, V].
  @jax.checkpoint
  def step(d_sums, index):
    added = lambda *arrays: step_of(arrays)(empty, index)
    _, d_added = jax.jvp(added, arrays, d_arrays)
    return jax.tree.map(jnp.add, d_sums, d_added)

  return last, _over_blocks(count, step, jax.tree.map(jnp.zeros_like, last))


def scores_of_all(blocks: Blocks, vocab: int) -> Float[Array, "*B V"]:
  """The scores of all tokens, from blocks of the whole vocabulary."""
  if blocks.count == 1:
    score_RB, token_R = blocks.block(jnp.zeros((), jnp.int32))
  else:
    score_CWB, token_CW = lax.map(blocks.block, blocks.indices)
    score_RB, token_R = lax.collapse(score_CWB, 0, 2), token_CW.reshape(-1)
  # Padding, which scores -inf, may name the token of another row: nothing is added for it.
  is_there_RB = ~jnp.isneginf(score_RB)
  empty_VB = jnp.zeros((vocab, *blocks.batch), jnp.float32)
  total_VB = empty_VB.at[token_R].add(jnp.where(is_there_RB, score_RB, 0.0))
  is_there_VB = empty_VB.astype(bool).at[token_R].max(is_there_RB)
  return jnp.moveaxis(jnp.where(is_there_VB, total_VB, -jnp.inf), 0, -1)


def draw(blocks: Blocks, key: PRNGKeyArray) -> Int[Array, "*B"]:
  """A Gumbel-max draw from softmax(scores); -1 where every score is -inf.

  A chunk of some tokens of a block is drawn by its mass, then a token of the chunk. That is the
  distribution of a draw among all tokens, with far fewer random numbers.
  """
  blocks = _with_whole_chunks(blocks)
  width = blocks.width
  size = min(_CHUNK, 2 ** (math.isqrt(width).bit_length() - 1))
  chunk_key, token_key = jax.random.split(key)
  # Blocks are numbered over all devices, so that no two of them use the same noise.
  first = vocab_parallel.first_row(blocks.axis, blocks.count)
  offset = jnp.arange(size, dtype=jnp.int32).reshape(size, *[1] * len(blocks.batch))

  def step(carry, index):
    best_B, score_sB, token_sB = carry
    score_WB, token_W = blocks.block(index)
    score_WB = score_WB.astype(jnp.float32)
    # A chunk whose mass underflows beside the highest score could not be drawn: the noise of two
    # chunks differs by less than 87 nats.
    shift_B = exp_shift(score_WB.max(axis=0))
    mass_CB = jnp.log(topk.chunk_sums(jnp.exp(score_WB - shift_B), size, axis=0)) + shift_B
    noisy_CB = mass_CB + gumbel(jax.random.fold_in(chunk_key, first + index), mass_CB.shape)
    chunk_B = jnp.argmax(noisy_CB, axis=0).astype(jnp.int32)
    top_B = jnp.take_along_axis(noisy_CB, chunk_B[None], axis=0)[0]
    row_sB = chunk_B * size + offset
    # The last chunk may be shorter.
    inside_sB, row_sB = row_sB < width, jnp.minimum(row_sB, width - 1)
    new_sB = jnp.take_along_axis(score_WB, row_sB, axis=0)
    new_sB = jnp.where(inside_sB, new_sB, -jnp.inf)
    # Read again, the only token of a chunk may have been rounded out of a nucleus.
    top_B = jnp.where(jnp.isneginf(new_sB).all(axis=0), -jnp.inf, top_B)
    # Strictly: where every score is -inf the token stays -1.
    better_B = top_B > best_B
    score_sB = jnp.where(better_B, new_sB, score_sB)
    token_sB = jnp.where(better_B, token_W[row_sB].astype(jnp.int32), token_sB)
    return jnp.maximum(best_B, top_B), score_sB, token_sB

  lowest = lambda *shape: jnp.full((*shape, *blocks.batch), -jnp.inf, jnp.float32)
  tokens = jnp.full((size, *blocks.batch), -1, jnp.int32)
  best_B, score_sB, token_sB = blocks.fold(step, (lowest(), lowest(size), tokens))
  choice_B = jnp.argmax(score_sB + gumbel(token_key, score_sB.shape), axis=0)
  token_B = jnp.take_along_axis(token_sB, choice_B[None], axis=0)[0]
  return topk.winner(best_B, token_B, blocks.axis)


def _with_whole_chunks(blocks):
  """The blocks, a single large one cut into some that whole chunks fill.

  A sum over windows, which a shorter last chunk needs, is slower than a sum over an axis.
  """
  width, rows = blocks.width, max(1, math.prod(blocks.batch))
  if blocks.count > 1 or width % _CHUNK == 0 or rows * width <= 2**20:
    return blocks
  score_WB, token_W = blocks.block(jnp.zeros((), jnp.int32))
  parts = row_blocks(
    blocks.batch, width, width, lambda cut: cut(score_WB), width=max(_CHUNK, 2**22 // rows)
  )

  def block(index):
    part_WB, row_W = parts.block(index)
    return part_WB, token_W[row_W]

  return blocks._replace(count=parts.count, block=block)


def gumbel(key: PRNGKeyArray, shape: Shape) -> Float[Array, "..."]:
  """Gumbel noise in float32, with more than the default's 2^23 distinct values."""
  # Among a quarter of a million tokens, some of the default's values would tie at the top.
  return jax.random.gumbel(key, shape, jnp.float32, mode="high")


def sample(blocks: Blocks, key: PRNGKeyArray, options: SamplingOptions) -> Int[Array, "*B"]:
  """A token from softmax(scores / temperature), cut by `top_k` and `top_p`.

  Without `top_k` the lowest score of the nucleus is found, exactly, by a search over the float32
  numbers. Up to `device.Device.stored` the scores are computed once and stored for the search;
  beyond, they are computed 11 times, of which the search takes 8. The token is -1 where every score
  is -inf.
  """
  if options.kept is None:
    blocks = blocks.map(lambda scores, _: scores.astype(jnp.float32) / options.temperature)
    return draw(nucleus(blocks, options.top_p), key)
  rows = vocab_parallel.rows_in_all(blocks.axis, blocks.count * blocks.width)
  score_Bk, token_Bk, _ = best(blocks, min(options.kept, rows), normalizer=False)
  return draw_of_best(score_Bk, token_Bk, key, options)


def sample_rows(
  blocks: Blocks,
  key: PRNGKeyArray,
  temperature: Float[Array, "*B"],
  top_k: int | None,
  top_p: Float[Array, "*B"] | float | int | None,
) -> Int[Array, "*B"]:
  """A token of each row at its own temperature and of its own nucleus, as `sample` draws it.

  A row is greedy where its temperature is below 1e-6 or nan.
  """
  is_warm_B = temperature >= 1e-6
  scale_B = jnp.where(is_warm_B, temperature, 1.0)
  if top_k is None:
    best_B = best(blocks, 1, normalizer=False)[1][..., 0]
    scaled = blocks.map(lambda scores, _: scores.astype(jnp.float32) / scale_B)
    drawn_B = draw(nucleus(scaled, top_p), key)
  else:
    score_Bk, token_Bk, _ = best(blocks, top_k, normalizer=False)
    best_B = token_Bk[..., 0]
    drawn_B = draw_among(score_Bk / scale_B[..., None], token_Bk, key, top_p)
  return jnp.where(is_warm_B, drawn_B, best_B)


def draw_of_best(
  scores: Float[Array, "*B k"],
  tokens: Int[Array, "*B k"],
  key: PRNGKeyArray,
  options: SamplingOptions,
) -> Int[Array, "*B"]:
  """The draw among the `options.kept` best tokens, best first."""
  if options.is_greedy:
    return tokens[..., 0]
  # The temperature does not change which tokens are best.
  return draw_among(scores / options.temperature, tokens, key, options.top_p)


def draw_among(
  scores: Float[Array, "*B n"],
  tokens: Int[Array, "*B n"],
  key: PRNGKeyArray,
  top_p: Float[Array, "*B"] | float | int | None = None,
  axis: MeshAxes | None = None,
) -> Int[Array, "*B"]:
  """A draw from the softmax over each row's own candidates, cut by `top_p`.

  Inside of `axis` each device has its own candidates. The token is -1 where every score is -inf.
  """
  axis = vocab_parallel.inside(axis)
  count = scores.shape[-1]
  index = vocab_parallel.first_row(axis, count) + jnp.arange(count, dtype=jnp.int32)
  # One block of candidate numbers, which unlike the tokens are equal for all rows.
  blocks = Blocks(1, lambda _: (jnp.moveaxis(scores, -1, 0), index), scores.shape[:-1], axis)
  number_B = draw(nucleus(blocks, top_p), key)
  local_B = number_B - vocab_parallel.first_row(axis, count)
  is_local_B = (local_B >= 0) & (local_B < count)
  local_B1 = jnp.where(is_local_B, local_B, 0)[..., None]
  token_B = jnp.take_along_axis(tokens, local_B1, axis=-1)[..., 0]
  if axis:
    token_B = lax.psum(jnp.where(is_local_B, token_B, 0), axis)
  return jnp.where(number_B < 0, -1, token_B)


def at_least(blocks: Blocks, min_p: float | int, temperature: float | int) -> Blocks:
  """Blocks in which tokens score -inf that are less than `min_p` times as likely as the best.

  The scores are those before they are divided by the temperature.
  """
  top = best(blocks, 1, normalizer=False)
  least_B = top[0][..., 0] + temperature * math.log(min_p)
  cut_of = lambda score_WB, _: jnp.where(score_WB >= least_B, score_WB, -jnp.inf)
  return _pinned(blocks, *top[:2]).map(cut_of)


def nucleus(blocks: Blocks, top_p: Float[Array, "*B"] | float | int | None) -> Blocks:
  """Blocks in which tokens outside of the `top_p` nucleus score -inf.

  The nucleus is the smallest set of best tokens whose mass reaches `top_p`, the first ones of those
  that tie. None or 1 leaves the blocks as they are.
  """
  if top_p is None or (isinstance(top_p, numbers.Number) and top_p == 1):
    return blocks
  kept = stored(blocks)
  top_B1, token_B1, log_z_B = best(kept, 1)
  edge_B = nucleus_edge(kept, top_p, log_z_B, bits=1 if is_stored(blocks) else 4)
  # The best token stays, whatever is rounded.
  edge_B = jnp.minimum(edge_B, top_B1[..., 0])
  return cut(_pinned(kept, top_B1, token_B1), edge_B, top_p, log_z_B)


def _pinned(blocks, top, token):
  """Blocks in which the best token, of `best(blocks, 1)`, keeps the score that was found there.

  XLA may compute scores once for each reader, stored ones too, and round them otherwise: compared
  with an edge that was found before, the best token might then be none.
  """
  top_B, token_B = top[..., 0], token[..., 0]

  def pin(score_WB, token_W):
    # Padding names some token, and scores -inf.
    is_best_WB = (token_W.reshape(-1, *[1] * token_B.ndim) == token_B) & ~jnp.isneginf(score_WB)
    return jnp.where(is_best_WB, top_B, score_WB.astype(jnp.float32))

  return blocks.map(pin)


def cut(
  blocks: Blocks,
  edge: Float[Array, "*B"],
  top_p: Float[Array, "*B"] | float | int,
  log_z: Float[Array, "*B"],
) -> Blocks:
  """Blocks in which tokens below `edge` score -inf, and those at it that `top_p` does not need.

  Of the tokens at the edge the first ones stay, at least one. Where `top_p` is not in (0, 1), all
  tokens do.
  """
  kept_of = lambda score: (score > edge, score == edge)

  def count(carry, index):
    mass_B, ties_CB = carry
    score_WB = blocks.block(index)[0].astype(jnp.float32)
    above_WB, tie_WB = kept_of(score_WB)
    mass_B += jnp.where(above_WB, jnp.exp(score_WB - log_z), 0.0).sum(axis=0)
    return mass_B, ties_CB.at[index].set(tie_WB.sum(axis=0, dtype=jnp.int32))

  zeros = jnp.zeros(blocks.batch, jnp.float32)
  start = zeros, jnp.zeros((blocks.count, *blocks.batch), jnp.int32)
  mass_B, ties_CB = blocks.fold(count, vocab_parallel.varying((start, log_z))[0])
  before_CB, ties_B = jnp.cumsum(ties_CB, axis=0) - ties_CB, ties_CB.sum(axis=0)
  if blocks.axis:
    ties_DB = vocab_parallel.gathered(ties_B, blocks.axis)
    is_earlier_D = jnp.arange(len(ties_DB)) < lax.axis_index(blocks.axis)
    before_CB += jnp.where(is_earlier_D.reshape(-1, *[1] * ties_B.ndim), ties_DB, 0).sum(axis=0)
    mass_B, ties_B = lax.psum(mass_B, blocks.axis), ties_DB.sum(axis=0)
  needed_B = (jnp.asarray(top_p) - mass_B) / jnp.exp(edge - log_z)
  # A little below the next whole number is that number, rounded.
  needed_B = jnp.clip(jnp.ceil(needed_B * (1 - 1e-5) - 1e-5), 1, 2**30).astype(jnp.int32)
  is_open_B = ~((jnp.asarray(top_p) > 0) & (jnp.asarray(top_p) < 1))
  has_more = (ties_B > needed_B).any()

  def block(index):
    score_WB, token_W = blocks.block(index)
    above_WB, tie_WB = kept_of(score_WB.astype(jnp.float32))

    def first():
      place_WB = before_CB[index] + jnp.cumsum(tie_WB, axis=0, dtype=jnp.int32)
      return tie_WB & (place_WB <= needed_B)

    # Sums over all tokens before one are slow, and ties rare.
    stays_WB = above_WB | lax.cond(has_more, first, lambda: tie_WB) | is_open_B
    return jnp.where(stays_WB, score_WB, -jnp.inf), token_W

  return blocks._replace(block=block)


def nucleus_edge(
  blocks: Blocks,
  top_p: Float[Array, "*B"] | float | int,
  log_z: Float[Array, "*B"] | None = None,
  bits: int = 1,
) -> Float[Array, "*B"]:
  """The lowest score in the nucleus: the highest float32 from which on the mass reaches `top_p`.

  Each pass over the blocks takes the mass from 2^bits - 1 numbers on, which settles `bits`, a
  divisor of 32, of the number: more bits save passes over scores that are computed anew, fewer
  save sums. A probability is exp(score - log_z); None: the log-normaliser of all blocks.
  """
  log_z_B = best(blocks, 1)[2] if log_z is None else log_z
  lowest = _to_ordinal(jnp.float32(-jnp.inf))
  digit_c = jnp.arange(1, 2**bits, dtype=jnp.uint32).reshape(-1, *[1] * len(blocks.batch))

  def masses_from(edge_cB):
    def add(total_cB, index):
      score_WB = blocks.block(index)[0].astype(jnp.float32)
      mass_WB = jnp.exp(score_WB - log_z_B)
      # One sum after another: a sum over [c, W, *B] is several times slower on CPUs.
      sums = [jnp.where(score_WB >= edge_B, mass_WB, 0.0).sum(axis=0) for edge_B in edge_cB]
      return total_cB + jnp.stack(sums)

    mass_cB = blocks.fold(add, jnp.zeros(edge_cB.shape, jnp.float32))
    return lax.psum(mass_cB, blocks.axis) if blocks.axis else mass_cB

  def settle(i, found_B):
    shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * i.astype(jnp.uint32)
    # Numbers below -inf or above inf are nan: the former count as -inf, the latter have no mass.
    edge_cB = _from_ordinal(jnp.maximum(found_B + (digit_c << shift), lowest))
    enough_B = (masses_from(edge_cB) >= top_p).sum(axis=0, dtype=jnp.uint32)
    return found_B + (enough_B << shift)

  found_B = vocab_parallel.varying((jnp.zeros(blocks.batch, jnp.uint32), log_z_B))[0]
  found_B = lax.fori_loop(0, 32 // bits, settle, found_B)
  return _from_ordinal(jnp.maximum(found_B, lowest))


def is_stored(blocks: Blocks) -> bool:
  """Whether the device stores all of these scores (`device.Device.stored`)."""
  return blocks.count * math.prod(blocks.batch) * blocks.width <= device.current().stored


def stored(blocks: Blocks) -> Blocks:
  """Blocks whose scores are stored, where the device stores so many, and equal in every reading."""
  if not is_stored(blocks):
    return blocks._replace(block=lambda index: lax.optimization_barrier(blocks.block(index)))
  if blocks.count == 1:
    # Without the barrier each reader may compute them anew, and round otherwise.
    only = lax.optimization_barrier(blocks.block(jnp.zeros((), jnp.int32)))
    return blocks._replace(block=lambda _: only)
  score_CWB, token_CW = lax.map(blocks.block, blocks.indices)
  return blocks._replace(block=lambda index: (score_CWB[index], token_CW[index]))


_SIGN = np.uint32(0x80000000)


def _to_ordinal(x: Float[Array, "*B"]) -> Array:
  """A uint32 in the order of the float32."""
  # The bits of a positive float sort as integers; those of a negative one sort backwards.
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_ordinal(ordinal):
  bits = jnp.where(ordinal >= _SIGN, ordinal ^ _SIGN, ~ordinal)
  return lax.bitcast_convert_type(bits, jnp.float32)
