"""Sum of weighted cross-entropies whose gradient is formed in the forward pass.

A sum has one cotangent for all tokens, so that its gradient can be computed before the cotangent is
known, and be multiplied by it later. What is known of all scores of a tile of tokens is kept until
their gradient has been added to that of the weight: 6NDV floating-point operations, where the tiles
of `vqjax.ops.statistics` compute scores once more and take 8NDV. The price is memory traffic: the
scores of the tile, and a gradient [V, D] that is read and written for each tile of tokens.

Scores are one product of a tile of tokens with all rows of the device. Where reductions fuse into
products (TPUs), it makes the statistics and keeps exp(score - reference) in the dtype of the
cotangents, half of a score in bfloat16: relative errors of the same size as their own rounding.
Elsewhere it keeps the scores, in bfloat16 where the device rounds them (`device.Device.rounds`).
"""

# One loop over tiles of tokens:
#
#   for each tile of tokens:     hidden [n, D]
#     `keep`         scores [n, V]  (`_scores`), or masses [V, n]  (`_masses`), by one product
#     `finished`     log Z and the loss of each token, and with them d loss / d score
#     `gradients`    d_hidden[n]       written once
#                    d_weight [V, D]   added to, in float32, for every tile of tokens
#
# The cotangent of the sum comes later. It is one number, by which `_backward` multiplies all of it.
#
# On a mesh each device has its rows and its shard of the tokens. log Z is reduced for every tile of
# tokens; the gradients of shards, and of hidden vectors that met other devices' rows, at the end.

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from vqjax.ops import device, precision, statistics, tiles, vocab_parallel
from vqjax.ops.row_factory import as_row_factory
from vqjax.ops.scores import ScoreOptions, exp_shift
from vqjax.ops.statistics import Outputs
from vqjax.types import Dtype

__all__ = ["tile_of_tokens"]


class Terms(NamedTuple):
  """Coefficients of a token's loss, -(1 - s) log p(token) - s · mean_v log p_v + z (log Z)²."""

  label_smoothing: float
  z_loss: float

  def of(self, log_prob: Array, log_z: Array, mean_log_prob: Array | None) -> Array:
    """The loss of each token, in nats."""
    loss = -log_prob
    if self.label_smoothing:
      loss = (1 - self.label_smoothing) * loss - self.label_smoothing * mean_log_prob
    return loss + self.z_loss * log_z**2 if self.z_loss else loss


def tile_of_tokens(
  tokens: int, dim: int, vocab: int, dtype: Dtype, scratch: int, limits: device.Device
) -> int | None:
  """Number of tokens whose scores fit `scratch` bytes; None where recomputing them is faster.

  The product that is saved, 2NDV operations, is compared with the bytes that move instead: scores
  to memory and back, and for each tile of tokens but the first, the weight twice and its gradient
  in float32 both ways. Where reductions fuse into products, half of the traffic of masses and
  gradient is behind the product that it belongs to, and the rest is behind the others. Where scores
  are rounded they move in either case, and half of the gradient's way is behind its product.
  """
  itemsize, kept = jnp.dtype(dtype).itemsize, _kept_dtype(dtype, limits).itemsize
  fitting = scratch // (kept * vocab)
  if not min(tokens, fitting):
    return None
  fitting = min(fitting, _MOST_TOKENS)
  steps = math.ceil(tokens / fitting)
  if limits.fuses:
    moved = 0.6 * (kept * tokens * vocab + 8 * steps * vocab * dim)
  elif limits.rounds:
    moved = 4 * (steps - 1) * vocab * dim
  else:
    moved = 10 * tokens * vocab + (steps - 1) * vocab * dim * (8 + 2 * itemsize)
  if 2 * tokens * dim * vocab <= limits.balance * moved:
    return None
  rounded = tiles.part(tokens, fitting)
  return rounded if rounded <= fitting else math.ceil(tokens / steps)


# Larger tiles of tokens gain nothing anywhere.
_MOST_TOKENS = 4096


def _kept_dtype(dtype, limits):
  """Dtype of what is kept of a score: float32, or that of its cotangent."""
  narrow = (limits.fuses or limits.rounds) and dtype == jnp.bfloat16
  return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


class Plan(NamedTuple):
  """Static description of a sum.

  Attributes:
    terms: coefficients of the losses.
    options: how scores are computed.
    cut: tile (tokens, all rows of the device) whose scores are kept together, and token shards.
    limits: those of the device.
  """

  terms: Terms
  options: ScoreOptions
  cut: tiles.Cut
  limits: device.Device

  @property
  def outputs(self) -> Outputs:
    """The statistics that the terms are made of."""
    return Outputs(mean=self.terms.label_smoothing > 0)


def weighted_sum(
  terms: Terms,
  cut: tiles.Cut,
  layers: tuple[tiles.Linear],
  row_PN: Array,
  token_weight_PN: Array,
) -> Array:
  """Sum of the losses times their weights [], differentiable in all floating-point arrays.

  The body of `tiles.on_each_device`. A token of weight 0 adds nothing, whatever its loss is.
  """
  (layer,) = layers
  plan = _plan(terms, cut, layer)
  if plan is None:
    return _tiled_sum(terms, cut, layer, row_PN, token_weight_PN)
  axis = vocab_parallel.inside(layer.options.vocab_axis)
  layer, row_PN = vocab_parallel.varying((layer, row_PN), axis)
  return _sum(plan, layer, token_weight_PN, row_PN)


def _tiled_sum(terms, cut, layer, row_PN, token_weight_PN):
  """The sum of losses whose gradient is formed in a pass of its own."""
  outputs = Outputs(mean=terms.label_smoothing > 0)
  stats = statistics.distribution(outputs, cut, (layer,), row_PN)
  loss_PN = terms.of(stats.log_prob, stats.log_z, stats.mean_log_prob)
  return (_of_counted(loss_PN, token_weight_PN) * token_weight_PN).sum()


def _of_counted(loss, token_weight):
  """Losses, 0 for tokens of weight 0, whose own may be nan or inf.

  Before the product: its gradient in the weight is the loss, and 0 · nan is nan.
  """
  return jnp.where(token_weight == 0, 0.0, loss)


def _plan(terms, cut, layer):
  """The plan of `_sum`; None where the tiles of `statistics` are better.

  They are for composed rows, which would be composed for each tile of tokens. Where masses are
  kept, the slope of an output function would need the scores, and an axis of shards would keep
  reductions from fusing.
  """
  options, limits, (shards, n, dim) = layer.options, device.current(), layer.hidden.shape
  if not (layer.weight.is_table and options.tile is None and n):
    return None
  if limits.fuses and (options.function is not None or shards > 1):
    return None
  scratch = limits.scratch if options.scratch is None else options.scratch
  vocab = layer.weight.count
  tokens = tile_of_tokens(n, dim, vocab, options.dtype, scratch, limits)
  if not tokens:
    return None
  if layer.counted is not None:
    tokens = min(tokens, cut.tile.tokens)
  return Plan(terms, options, cut._replace(tile=tiles.Tile(tokens, vocab)), limits)


@precision.custom_vjp
def _sum(plan, layer, token_weight_PN, row_PN):
  """The sum alone, which needs no gradient and keeps no scores."""
  tile = tiles.cut_tile(None, layer.hidden.shape[1], layer.weight.count)
  cut = plan.cut._replace(tile=tile)
  return _tiled_sum(plan.terms, cut, layer, row_PN, token_weight_PN)


class _Gradients(NamedTuple):
  """Sums over the tiles of tokens so far, in float32; `bias` is None without one."""

  weight: Array
  bias: Array | None


def _forward(plan, layer, token_weight_PN, row_PN):
  (shards, n, _), v = layer.hidden.shape, layer.weight.count
  axis = vocab_parallel.inside(plan.options.vocab_axis)
  tokens = tiles.TokenTiles(plan.cut.shards, plan.cut.tile.tokens, n)
  # The last tile may overlap its neighbour, whose tokens must not count twice.
  # Its tokens that the tile before has had get the weight 0, instead of a mask in every product.
  fresh = jnp.arange(tokens.count)[:, None, None] * tokens.size <= tokens.split(jnp.arange(n)[None])
  # Cotangents of scores are cast to the dtype of the products. Relative to the largest weight they
  # are of order 1, where those of a mean over many tokens would underflow in float16.
  largest = lax.stop_gradient(jnp.abs(token_weight_PN).max())
  unit = jnp.where(largest == 0, 1.0, largest)
  row, token_weight = tokens.split((row_PN, (token_weight_PN / unit).astype(jnp.float32)))
  token_weight = jnp.where(fresh, token_weight, 0.0)
  rows = _rows_kept(layer, axis)
  keep, gradients = (_masses, _of_masses) if plan.limits.fuses else (_scores, _of_scores)

  def losses(own, log_z, score_sum):
    mean = None if score_sum is None else score_sum / rows - log_z
    return plan.terms.of(own, log_z, mean)

  def token_step(index, carry):
    sums, d_hidden, loss = carry
    # One shard has no axis: XLA writes a result over an operand of the same shape alone.
    here, row_Pn, weight_Pn = jax.tree.map(
      lambda x: x[0] if shards == 1 else x,
      (tokens.at(layer.hidden, index), *tiles.taken((row, token_weight), index)),
    )
    here = dataclasses.replace(layer, hidden=here.astype(plan.options.dtype))
    last, kept = keep(plan, here, row_Pn)
    if axis is not None:
      last = statistics.all_reduced(last, axis, row_Pn, v)
    stats, (z, _) = statistics.finished(plan.outputs, last)
    loss_Pn, pull = jax.vjp(losses, stats.log_prob, stats.log_z, stats.score_sum)
    d_log_prob, d_log_z, d_score_sum = pull(weight_Pn)
    prob_Pn = d_log_z - d_log_prob
    own_Pn = statistics.own_cotangent(d_log_prob, prob_Pn, stats.log_prob)
    given = statistics.Cotangents(row=row_Pn, z=z, own=own_Pn, prob=prob_Pn, score_sum=d_score_sum)
    given = vocab_parallel.varying((given, here))[0]
    if not plan.limits.fuses:
      # The last reader of the scores is their gradient, which then takes their place in memory.
      kept = lax.optimization_barrier((kept, loss_Pn))[0]
    sums, part = gradients(plan, here, kept, given, sums)
    new = jax.tree.map(lambda x: x[None] if shards == 1 else x, (part, loss_Pn))
    return sums, *tiles.replaced((d_hidden, loss), index, new)

  weight, bias = layer.weight.per_row, layer.bias
  zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
  # Shards stay apart: a sum over them would be an all-reduce at every tile.
  apart = lambda x: (
    zeros(*x.shape) if shards == 1 else plan.cut.shards.keep(zeros(shards, *x.shape))
  )
  sums = _Gradients(apart(weight), None if bias is None else apart(bias))
  start = sums, zeros(tokens.count, shards, tokens.size, weight.shape[1])
  start = *vocab_parallel.varying((start, layer))[0], zeros(*row.shape)
  last = tokens.upto(layer.counted)
  sums, d_hidden, loss = lax.fori_loop(np.int32(0), last, token_step, start)
  # A token outside of the vocabulary makes the sum nan, and has no gradient.
  value = unit * (_of_counted(loss, token_weight) * token_weight).sum()
  d_hidden, loss = (tokens.join(x) for x in (d_hidden, loss))
  loss = _of_counted(loss, token_weight_PN)
  if shards > 1:
    sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
  # Empty arrays carry the dtypes of the operands.
  like = tuple(None if x is None else x[:0] for x in (layer.hidden, weight, bias, token_weight_PN))
  return value, ((d_hidden, *sums), unit, loss, like)


def _rows_kept(layer, axis):
  """Number of rows on all devices that no bias of -inf removes."""
  if layer.bias is None:
    return layer.vocab
  kept = (~jnp.isneginf(layer.bias)).sum()
  return lax.psum(kept, axis) if axis else kept


def _scores(plan, layer, row_Pn):
  """Statistics of a tile of tokens, and its raw scores [n, V] or, of P shards, [P, n, V]."""
  weight_VD = plan.cut.shards.whole(layer.weight.per_row.astype(plan.options.dtype))
  raw_PnV = tiles.raw_scores(layer.hidden, weight_VD, ((layer.hidden.ndim - 1,), (1,)))
  start = statistics.empty(plan.outputs, row_Pn.shape, plan.terms.label_smoothing > 0)
  start = vocab_parallel.varying((start, layer, row_Pn))[0]
  score_PnV = _finished(plan, layer, raw_PnV)
  return statistics.merge(start, (score_PnV,), 0, row_Pn), (raw_PnV, weight_VD)


def _finished(plan, layer, raw_PnV):
  bias = None if layer.bias is None else layer.bias.astype(jnp.float32)
  return plan.options.finish(raw_PnV.astype(jnp.float32), bias)


def _of_scores(plan, layer, kept, given, sums):
  """The sums with the gradients of a tile of tokens, and the cotangent of its hidden vectors."""
  (raw_PnV, weight_VD), options = kept, plan.options
  score_PnV = _finished(plan, layer, raw_PnV)
  given = jax.tree.map(lambda x: x[..., None], given)
  row_V = jnp.arange(raw_PnV.shape[-1], dtype=jnp.int32)
  (d_PnV,) = statistics.d_scores((score_PnV,), row_V, given)
  d_PnV = options.pull_back(score_PnV, d_PnV)
  d_bias = None if sums.bias is None else sums.bias + d_PnV.sum(axis=-2)
  d_PnV = d_PnV.astype(options.dtype)
  n, shards = d_PnV.ndim - 2, tuple(range(d_PnV.ndim - 2))
  d_weight = sums.weight + tiles.product(d_PnV, layer.hidden, ((n,), (n,)), (shards, shards))
  return _Gradients(d_weight, d_bias), tiles.product(d_PnV, weight_VD, ((n + 1,), (0,)))


def _masses(plan, layer, row_n):
  """Statistics of a tile of tokens, exp(score - reference) [V, n], and its reference [n].

  Sum, own score and masses come from one pass over the product, since the reference is the maximum
  of some rows. Where the sum shows a score far above it, the exact maximum is the reference.
  """
  options, hidden_nD = plan.options, layer.hidden
  dtype = _kept_dtype(options.dtype, plan.limits)
  weight_VD = layer.weight.all().astype(options.dtype)
  row_V1 = jnp.arange(layer.weight.count, dtype=jnp.int32)[:, None]

  def scores(rows):
    # Without the axis of shards, which would keep reductions from fusing into the product.
    raw = tiles.product(weight_VD[rows], hidden_nD, ((1,), (1,)))
    return options.finish(raw, _bias(layer, rows))

  def below(score_Vn, reference_n):
    mass_Vn = jnp.exp(score_Vn - exp_shift(reference_n))
    return mass_Vn.sum(axis=0), mass_Vn.astype(dtype), reference_n

  def exact():
    higher = lambda top, scores, *_: jnp.maximum(top, scores[0].max(axis=-1))
    lowest = jnp.full((1, *row_n.shape), -jnp.inf, jnp.float32)
    whole = dataclasses.replace(layer, hidden=hidden_nD[None], counted=None)
    (top_n,) = tiles.fold(plan.cut, (whole,), (), lowest, higher)
    return below(scores(slice(None)), top_n)

  score_Vn = scores(slice(None))
  own_n = jnp.where(row_V1 == row_n, score_Vn, -jnp.inf).max(axis=0)
  score_sum = None
  if plan.terms.label_smoothing > 0:
    score_sum = jnp.where(jnp.isneginf(score_Vn), 0.0, score_Vn).sum(axis=0)
  first = below(score_Vn, scores(slice(None, None, _STRIDE)).max(axis=0))
  failed_n = (first[0] > math.exp(statistics.HEADROOM)) | jnp.isneginf(first[2])
  # What does not depend on the reference stays outside, where it is part of the same fusion.
  total_n, mass_Vn, reference_n = lax.cond(failed_n.any(), exact, lambda: first)
  last = statistics.empty(plan.outputs, row_n.shape, False)._replace(
    own=own_n, top=reference_n, total=total_n, score_sum=score_sum
  )
  return last, (mass_Vn, reference_n)


# Distance of the rows whose maximum is the first reference of a token.
_STRIDE = 512


def _bias(layer, rows):
  return None if layer.bias is None else layer.bias[rows, None].astype(jnp.float32)


def _of_masses(plan, layer, kept, given, sums):
  """The sums with the gradients of a tile of tokens, and the cotangent of its hidden vectors."""
  options, (mass_Vn, reference_n), hidden_nD = plan.options, kept, layer.hidden
  weight_VD = layer.weight.all().astype(options.dtype)
  row_V1 = jnp.arange(len(mass_Vn), dtype=jnp.int32)[:, None]
  # p = mass · exp(reference - log Z): one factor a token, instead of an exponential a score.
  scale_n = given.prob * jnp.exp((exp_shift(reference_n) - given.z.top) - given.z.log_sum)
  d_Vn = jnp.where(row_V1 == given.row, given.own, mass_Vn * scale_n)
  if given.score_sum is not None:
    is_removed = False if layer.bias is None else jnp.isneginf(_bias(layer, slice(None)))
    d_Vn += jnp.where(is_removed, 0.0, given.score_sum)
  d_Vn /= options.temperature
  d_bias = None if sums.bias is None else sums.bias + d_Vn.sum(axis=1)
  d_Vn = d_Vn.astype(options.dtype)
  d_weight = sums.weight + tiles.product(d_Vn, hidden_nD, ((1,), (0,)))
  d_hidden_nD = tiles.product(d_Vn, weight_VD, ((0,), (0,)))
  return _Gradients(d_weight, d_bias), d_hidden_nD


def _backward(plan, saved, cotangent):
  gradients, unit, loss, like = saved
  scaled = lambda d, scale, like: None if d is None else (scale * d).astype(like.dtype)
  hidden, weight, bias = (
    scaled(d, cotangent * unit, x) for d, x in zip(gradients, like[:3], strict=True)
  )
  layer = tiles.Linear(hidden, as_row_factory(weight), bias, plan.options)
  return layer, scaled(loss, cotangent, like[3]), None


_sum.defvjp(*map(vocab_parallel.own_promotion, (_forward, _backward)))
