"""Top-k and sampling from softmax(hidden · weightᵀ + bias).

A few rows are scored by one product with the weight where it lies, since at batch 1 decoding takes
the time in which the weight is read. The scores of many rows come a block of the vocabulary at a
time, and no array [N, V] exists. `vqjax.ops.sampling` selects and draws.
"""

# Two ways to the scores, of which `linear_blocks` takes the faster one:
#
#   few vectors     one product [V, N] with the weight in place, read as one block  (`stored_block`)
#   many vectors    a product of each block of rows, when the block is read         (`row_blocks`)

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import device, precision, sampling, softmax, symbolic, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.scores import ScoreOptions, exp_shift
from vqjax.ops.tiles import Linear
from vqjax.ops.vocabulary import allowed_of, is_count, key_of
from vqjax.types import Dtype, MeshAxes

__all__ = ["linear_sample", "linear_top_k"]


def linear_blocks(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  bias: Float[Array, "V"] | None,
  vocab: int,
  options: ScoreOptions = ScoreOptions(),
  width: int | None = None,
) -> sampling.Blocks:
  """The scores hidden · weightᵀ + bias, a block of the vocabulary at a time.

  Inside of a `shard_map` over the axis of the vocabulary, `weight` and `bias` are the device's own
  rows of the `vocab` rows of all devices. The scores of many vectors come in blocks of at most
  `width` tokens, as in `sampling.row_blocks`.
  """
  weight = as_row_factory(weight)
  options, batch = options.resolved(hidden, weight), hidden.shape[:-1]
  dtype, axis, rows = options.dtype, options.vocab_axis, math.prod(batch)
  finish = lambda product_WB, cut: options.finish_rows(product_WB, cut(bias))
  # A slice of an array is copied, and so is one that is cast: one product reads it in place.
  in_place, limits = weight.is_stored and weight.dtype == dtype, device.current()
  if in_place and rows <= limits.few and rows * weight.count <= limits.stored:
    product_VB = softmax.rows_scores(weight, hidden, dtype)
    return sampling.stored_block(product_VB, vocab, finish, axis)
  scores = lambda cut: finish(softmax.rows_scores(weight.select(cut), hidden, dtype), cut)
  return sampling.row_blocks(batch, weight.count, vocab, scores, axis, width)


@vocab_parallel.for_any_axes("hidden")
@symbolic.for_any_batch("hidden")
def linear_top_k(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  k: int,
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  softcap: float | int | None = None,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
  precision: str | None = None,
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
  """The k most likely tokens under softmax(hidden · weightᵀ + bias), exactly.

  Example:
    >>> import jax
    >>> from vqjax import linear_top_k
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> weight = jax.random.normal(jax.random.key(1), (1000, 8))
    >>> log_probs, tokens = linear_top_k(hidden, weight, 5)
    >>> print(tokens.shape)
    (4, 5)

  All other arguments are those of `linear_softmax`.

  Args:
    k: number of tokens.

  Returns:
    Log-probabilities in nats, best first, float32, and tokens, int32; -inf and -1 where fewer than
    k tokens have a probability. Tokens of equal scores come in the order of their numbers.

  Raises:
    ValueError: the shapes do not fit together, `k` is outside [1, V], `softcap` is not positive, or
      the mesh has no axis `vocab_axis`.
  """
  options = ScoreOptions(softcap=softcap, dtype=dtype, vocab_axis=vocab_axis, precision=precision)
  layer = Linear.of(hidden, weight, bias, options)
  if not is_count(k) or not 1 <= k <= layer.vocab:
    raise ValueError(
      f"`k` must be in [1, {layer.vocab}] for a vocabulary of {layer.vocab}; got {k}. 50 is usual."
    )
  score_Bk, token_Bk, log_z_B = _over_blocks(lambda blocks: sampling.best(blocks, k), layer)
  # Where nothing has a probability, -inf - (-inf) would be nan.
  return score_Bk - exp_shift(log_z_B)[..., None], token_Bk


@vocab_parallel.for_any_axes("hidden")
def linear_sample(
  hidden: Float[ArrayLike, "*B D"],
  key: PRNGKeyArray,
  weight: Float[ArrayLike, "V D"] | RowFactory,
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  temperature: float | int = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  allowed: Bool[ArrayLike, "..."] | None = None,
  softcap: float | int | None = None,
  dtype: Dtype | None = None,
  vocab_axis: MeshAxes | None = None,
  precision: str | None = None,
) -> Int[Array, "*B"]:
  """Draws from softmax(hidden · weightᵀ + bias), exactly; -1 where no token is allowed.

  A row with a score of inf or nan has no distribution: its draw is -1, its log-probabilities nan.
  The filters apply in the order allowed, temperature, top_k, top_p.

  Example:
    >>> import jax
    >>> from vqjax import linear_sample
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> weight = jax.random.normal(jax.random.key(1), (1000, 8))
    >>> drawn = linear_sample(hidden, jax.random.key(2), weight, temperature=0.8, top_p=0.9)
    >>> print(drawn.shape)
    (4,)

  All other arguments are those of `linear_softmax`.

  Args:
    key: source of randomness.
    temperature: divides the scores; 0 takes the arg max. A Python number, like `softcap`.
    top_k: keep only the k best tokens.
    top_p: keep only the smallest set of best tokens with this mass.
    allowed: marks the tokens that may be drawn, [V] or [*B, V].

  Raises:
    ValueError: the shapes do not fit together, an option is outside its range, or the mesh has no
      axis `vocab_axis`.
  """
  scoring = ScoreOptions(softcap=softcap, dtype=dtype, vocab_axis=vocab_axis, precision=precision)
  layer = Linear.of(hidden, weight, bias, scoring)
  options = sampling.SamplingOptions(temperature, top_k, top_p)
  key = key_of(key)
  allowed = allowed_of(allowed, hidden.shape[:-1])
  # Read here: inside of the axis the layer has a device's rows, and counts them over all devices.
  vocab = layer.vocab

  def draw(blocks, key, allowed):
    blocks = sampling.allow(blocks, allowed, vocab)
    return sampling.sample(blocks, key, options)

  compute = functools.partial(_over_blocks, draw)
  return symbolic.by_chunks(compute, hidden, layer, key, allowed)


def _over_blocks(body: Callable, layer: Linear, *shared: Any) -> Any:
  """`body(blocks, *shared)`; each device has the blocks of its own rows."""
  weight, vocab, options = layer.weight, layer.vocab, layer.options

  def run(rows, hidden, *shared):
    per_row, bias, shared_rows = rows
    local = dataclasses.replace(weight, per_row=per_row, shared=shared_rows)
    with precision.using(options.precision):
      return body(linear_blocks(hidden, local, bias, vocab, options), *shared)

  rows = (
    vocab_parallel.Sharded(weight.per_row, 0, weight.axis),
    vocab_parallel.Sharded(layer.bias, -jnp.inf),
    vocab_parallel.Replicated(weight.shared),
  )
  return vocab_parallel.over_vocabulary(options.vocab_axis, run, rows, layer.hidden, *shared)
