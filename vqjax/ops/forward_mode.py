"""Forward-mode derivative of the tiled log-probability.

The losses have custom rules for reverse mode, with which `jax.jvp` cannot differentiate them.
Hessian-vector products need no rule of their own: `jax.jvp` of `jax.grad` of a loss differentiates
the backward pass, in as little memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from vqjax.ops import symbolic, tiles, vocab_parallel
from vqjax.ops.row_factory import as_row_factory
from vqjax.ops.scores import ScoreOptions, exp_shift
from vqjax.ops.tiles import Linear
from vqjax.ops.vocabulary import check_arrays, in_vocabulary

__all__ = ["linear_log_prob_jvp"]


@vocab_parallel.for_any_axes("hidden")
@symbolic.for_any_batch("hidden")
def linear_log_prob_jvp(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"],
  tokens: Integer[Array, "*B"],
  bias: Float[Array, "V"] | None = None,
  *,
  tangents: tuple[Array, ...],
  options: ScoreOptions = ScoreOptions(),
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
  """Log-probability of `tokens` and its derivative in a direction, in tiles.

    d log p(token) = d s_token - sum_v p_v d s_v, where s = hidden · weightᵀ + bias.

  The result is that of `jax.jvp` of `linear_log_prob`, whose custom rule is for reverse mode alone.
  No array of N·V scores or derivatives is held.

  All other arguments are those of `linear_log_prob`.

  Args:
    tangents: the direction: arrays of the shapes of hidden and weight, and of bias if it is given.

  Raises:
    ValueError: `tangents` have other shapes than the primals, or as `linear_softmax`.
    TypeError: as `linear_softmax`.
  """
  check_arrays(hidden=hidden, weight=weight, tokens=tokens, bias=bias)
  primals = (hidden, weight) if bias is None else (hidden, weight, bias)
  wanted, given = ([jnp.shape(x) for x in arrays] for arrays in (primals, tangents))
  if wanted != given:
    raise ValueError(
      f"`tangents` must have the shapes {wanted} of hidden, weight and bias; got {given}. Give an"
      " array of zeros for an operand that the direction leaves alone."
    )
  score = Linear.of(hidden, weight, bias, options, tokens)
  valid, token = in_vocabulary(tokens, score.vocab)
  d_hidden, d_weight, *d_bias = tangents
  # d (hidden · row) = d_hidden · row + hidden · d_row, as one product of twice the width.
  slope = Linear(
    hidden=jnp.concatenate([d_hidden, hidden], axis=-1),
    weight=as_row_factory(jnp.concatenate([weight, d_weight], axis=-1)),
    bias=d_bias[0] if d_bias else None,
    # The cap's own slope is applied to the finished scores, in `_merge`.
    options=ScoreOptions(dtype=score.options.dtype),
  )
  found = tiles.on_each_device((score, slope), token, _log_prob_jvp)
  return tuple(jnp.where(valid, x, jnp.nan) for x in found)


class _Sums(NamedTuple):
  """Sums over the rows that were merged; exponentials are relative to `top`."""

  own: Array
  d_own: Array
  top: Array
  total: Array
  d_total: Array


def _log_prob_jvp(cut, layers, row_PN):
  """Log-probabilities and derivatives; the body of `tiles.on_each_device`."""
  options = layers[0].options
  zero_PN = jnp.zeros(row_PN.shape, jnp.float32)
  lowest_PN = jnp.full(row_PN.shape, -jnp.inf, jnp.float32)
  start = _Sums(lowest_PN, zero_PN, lowest_PN, zero_PN, zero_PN)
  sums = tiles.fold(cut, layers, row_PN, start, functools.partial(_merge, options))
  axis = vocab_parallel.inside(options.vocab_axis)
  if axis is not None:
    top = lax.pmax(sums.top, axis)
    shrink = jnp.exp(jnp.where(jnp.isneginf(sums.top), -jnp.inf, sums.top - exp_shift(top)))
    add = lambda x: lax.psum(x, axis)
    # One device has the token's own row, and zero is the derivative on the others.
    sums = _Sums(
      own=lax.pmax(sums.own, axis),
      d_own=add(sums.d_own),
      top=top,
      total=add(sums.total * shrink),
      d_total=add(sums.d_total * shrink),
    )
  # The derivative of log Z is the mean, under the softmax, of the scores' derivatives.
  return (
    (sums.own - sums.top) - jnp.log(sums.total),
    sums.d_own - sums.d_total / sums.total,
  )


def _merge(options, old, scores, first_row, row_Pn):
  """The sums with a tile added."""
  score_Pnv, slope_Pnv = scores
  absent = jnp.isneginf(score_Pnv)
  slope_Pnv = jnp.where(absent, 0.0, options.pull_back(score_Pnv, slope_Pnv))
  top_Pn = jnp.maximum(old.top, score_Pnv.max(axis=-1))
  shift_Pn = exp_shift(top_Pn)
  mass_Pnv = jnp.exp(score_Pnv - shift_Pn[..., None])
  shrink_Pn = jnp.exp(jnp.where(jnp.isneginf(old.top), 0.0, old.top - shift_Pn))
  width = score_Pnv.shape[-1]
  index_Pn = row_Pn - first_row
  clipped_Pn1 = jnp.clip(index_Pn, 0, width - 1)[..., None]
  at_token = lambda x: jnp.take_along_axis(x, clipped_Pn1, axis=-1)[..., 0]
  # A column that overlaps the tile before is absent from this one.
  is_here = (index_Pn >= 0) & (index_Pn < width) & ~at_token(absent)
  return _Sums(
    own=jnp.where(is_here, at_token(score_Pnv), old.own),
    d_own=jnp.where(is_here, at_token(slope_Pnv), old.d_own),
    top=top_Pn,
    total=old.total * shrink_Pn + mass_Pnv.sum(axis=-1),
    d_total=old.d_total * shrink_Pn + (mass_Pnv * slope_Pnv).sum(axis=-1),
  )
