"""Sum of weighted cross-entropies whose gradient is formed in the forward pass.

A sum has one cotangent for all tokens, so that its gradient can be computed before the cotangent is
known, and be multiplied by it later. What is known of all scores of a tile of tokens is kept until
their gradient has been added to that of the weight: 6NDV floating-point operations, where the tiles
of `vqjax.ops.statistics` compute scores once more and take 8NDV. The price is memory traffic: the
scores of the tile, and a gradient [V, D] that is read and written for each tile of tokens.

Scores are computed and kept a tile of rows at a time. Where reductions fuse into products (TPUs),
one product with all rows makes the statistics and keeps exp(score - reference) in the dtype of the
cotangents, half of a score in bfloat16: relative errors of the same size as their own rounding.
"""

# One loop over tiles of tokens:
#
#   for each tile of tokens:     hidden [n, D]
#     `keep`         scores [tiles of rows, v, n], a tile of rows at a time  (`_scores`)
#                    or masses [V, n], by one product                        (`_masses`)
#     `finished`     log Z and the loss of each token, and with them d loss / d score
#     `gradients`    d_hidden[n]       written once
#                    d_weight [V, D]   added to, in float32, for every tile of tokens
#
# The cotangent of the sum comes later. It is one number, by which `_backward` multiplies all of it.

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from vqjax.ops import device, statistics, tiles, vocab_parallel
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
  gradient is behind the product that it belongs to, and the rest is behind the others.
  """
  itemsize, kept = jnp.dtype(dtype).itemsize, _kept_dtype(dtype, limits).itemsize
  fitting = scratch // (kept * vocab)
  if not min(tokens, fitting):
    return None
  steps = math.ceil(tokens / fitting)
  if limits.fuses:
    moved = 0.6 * (kept * tokens * vocab + 8 * steps * vocab * dim)
  else:
    moved = 8 * tokens * vocab + (steps - 1) * vocab * dim * (8 + 2 * itemsize)
  if 2 * tokens * dim * vocab <= limits.balance * moved:
    return None
  even = math.ceil(tokens / steps)
  rounded = 64 * math.ceil(even / 64)
  return rounded if rounded <= min(tokens, fitting) else min(even, fitting)


def _kept_dtype(dtype, limits):
  """Dtype of what is kept of a score: float32, or that of its cotangent."""
  return jnp.dtype(jnp.bfloat16 if limits.fuses and dtype == jnp.bfloat16 else jnp.float32)


class Plan(NamedTuple):
  """Static description of a sum.

  Attributes:
    terms: coefficients of the losses.
    options: how scores are computed.
    cut: tile (tokens, rows) whose scores are kept together, and token shards.
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


def loss_plan(layer: tiles.Linear, terms: Terms, scratch: int) -> Plan | None:
  """The plan of `weighted_sum`; None where the tiles of `statistics` are better.

  They are on several devices, each of which would need a gradient of the whole weight, and for
  composed rows, which would be composed for each tile of tokens. Where masses are kept, the slope
  of an output function would need the scores.
  """
  options, kinds = layer.options, vocab_parallel.axis_types()
  axis, shards = options.vocab_axis, vocab_parallel.token_shards(options.vocab_axis)
  alone = axis is None or not kinds or (axis in kinds and vocab_parallel.axis_size(axis) == 1)
  if not (alone and layer.weight.is_table and shards.count == 1):
    return None
  limits, (n, dim) = device.current(), layer.hidden.shape
  if not n or (limits.fuses and options.function is not None):
    return None
  vocab = layer.weight.count
  tokens = tile_of_tokens(n, dim, vocab, options.dtype, scratch, limits)
  if not tokens:
    return None
  # As many rows at once as a tile of statistics has for so many tokens.
  rows = tiles.cut_tile(None, tokens, vocab).vocab
  return Plan(terms, options, tiles.Cut(tiles.Tile(tokens, rows), shards), limits)


def weighted_sum(plan: Plan, layer: tiles.Linear, token_N: Array, token_weight_N: Array) -> Array:
  """Sum of the losses times their weights, differentiable in all floating-point arrays."""
  operands = layer.hidden, layer.weight.per_row, layer.bias, token_weight_N, token_N
  return _sum(plan, *vocab_parallel.varying(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(plan, hidden_ND, weight_VD, bias_V, token_weight_N, token_N):
  """The sum alone, which needs no gradient and keeps no scores."""
  layer = tiles.Linear(hidden_ND, as_row_factory(weight_VD), bias_V, plan.options)
  compute = functools.partial(statistics.distribution, plan.outputs)
  stats = tiles.on_each_device((layer,), token_N, compute)
  loss_N = plan.terms.of(stats.log_prob, stats.log_z, stats.mean_log_prob)
  return (loss_N * token_weight_N).sum()


class _Gradients(NamedTuple):
  """Sums over the tiles of tokens so far, in float32; `bias` is None without one."""

  weight: Array
  bias: Array | None


def _forward(plan, hidden_ND, weight_VD, bias_V, token_weight_N, token_N):
  n, v = hidden_ND.shape[0], weight_VD.shape[0]
  layer = tiles.Linear(hidden_ND[None], as_row_factory(weight_VD), bias_V, plan.options)
  tokens = tiles.TokenTiles(plan.cut.shards, plan.cut.tile.tokens, n)
  # The last tile may overlap its neighbour, whose tokens must not count twice.
  # Its tokens that the tile before has had get the weight 0, instead of a mask in every product.
  fresh = jnp.arange(tokens.count)[:, None, None] * tokens.size <= tokens.split(jnp.arange(n)[None])
  # Cotangents of scores are cast to the dtype of the products. Relative to the largest weight they
  # are of order 1, where those of a mean over many tokens would underflow in float16.
  largest = lax.stop_gradient(jnp.abs(token_weight_N).max())
  unit = jnp.where(largest == 0, 1.0, largest)
  row, token_weight = tokens.split(
    (token_N[None], (token_weight_N[None] / unit).astype(jnp.float32))
  )
  token_weight = jnp.where(fresh, token_weight, 0.0)
  rows = v if bias_V is None else (~jnp.isneginf(bias_V)).sum()
  keep, gradients = (_masses, _of_masses) if plan.limits.fuses else (_scores, _of_scores)

  def losses(own, log_z, score_sum):
    mean = None if score_sum is None else score_sum / rows - log_z
    return plan.terms.of(own, log_z, mean)

  def token_step(sums, tile):
    index, row_Pn, token_weight_Pn = tile
    hidden_PnD = tokens.at(layer.hidden, index).astype(plan.options.dtype)
    here = dataclasses.replace(layer, hidden=hidden_PnD)
    last, kept = keep(plan, here, row_Pn)
    stats, (z, _) = statistics.finished(plan.outputs, last)
    loss_Pn, pull = jax.vjp(losses, stats.log_prob, stats.log_z, stats.score_sum)
    d_log_prob, d_log_z, d_score_sum = pull(token_weight_Pn)
    given = statistics.Cotangents(
      row=row_Pn, z=z, own=d_log_prob, prob=d_log_z - d_log_prob, score_sum=d_score_sum
    )
    sums, d_hidden = gradients(plan, here, kept, given, stats, sums)
    return sums, (d_hidden, loss_Pn)

  start = _Gradients(
    weight=jnp.zeros(weight_VD.shape, jnp.float32),
    bias=None if bias_V is None else jnp.zeros(bias_V.shape, jnp.float32),
  )
  start = vocab_parallel.varying((start, hidden_ND, weight_VD, bias_V, token_weight))[0]
  index = jnp.arange(tokens.count, dtype=jnp.int32)
  sums, (d_hidden, loss) = lax.scan(token_step, start, (index, row, token_weight))
  value = unit * (loss * token_weight).sum()
  # There is one shard, since `plan` has nothing for several devices.
  d_hidden, loss = (x[0] for x in tokens.join((d_hidden, loss)))
  # Empty arrays carry the dtypes of the operands.
  like = tuple(None if x is None else x[:0] for x in (hidden_ND, weight_VD, bias_V, token_weight_N))
  return value, ((d_hidden, sums.weight, sums.bias), unit, loss, like)


def _scores(plan, layer, row_Pn):
  """Statistics of a tile of tokens, and its scores [tiles of rows, v, P, n]."""
  options, height, v = plan.options, plan.cut.tile.vocab, layer.weight.count

  def step(running, index):
    first, fresh_v = tiles.edge(index, height, v)
    part = tiles.tile_rows(plan.cut, layer, first)
    score_vPn = options.finish(tiles.product(part.weight, layer.hidden, ((1,), (2,))), part.bias)
    if v % height:
      score_vPn = jnp.where(fresh_v[:, None, None], score_vPn, -jnp.inf)
    return statistics.merge(running, (score_vPn,), first, row_Pn, axis=0), score_vPn

  start = statistics.empty(plan.outputs, row_Pn.shape, plan.terms.label_smoothing > 0)
  start = vocab_parallel.varying((start, layer, row_Pn))[0]
  return lax.scan(step, start, jnp.arange(math.ceil(v / height), dtype=jnp.int32))


def _of_scores(plan, layer, scores, given, stats, sums):
  """The sums with the gradients of a tile of tokens, and the cotangent of its hidden vectors."""
  del stats
  options, height, v = plan.options, plan.cut.tile.vocab, layer.weight.count

  def step(carry, tile):
    (d_weight, d_bias), d_hidden = carry
    index, score_vPn = tile
    first, fresh_v = tiles.edge(index, height, v)
    part = tiles.tile_rows(plan.cut, layer, first)
    row_v11 = (first + jnp.arange(height, dtype=jnp.int32))[:, None, None]
    (d_vPn,) = statistics.d_scores((score_vPn,), row_v11, given)
    d_vPn = options.pull_back(score_vPn, d_vPn)
    if v % height:
      d_vPn = jnp.where(fresh_v[:, None, None], d_vPn, 0.0)
    if d_bias is not None:
      d_bias = _add_at(d_bias, d_vPn.sum(axis=(1, 2)), first)
    d_vPn = d_vPn.astype(options.dtype)
    d_rows = tiles.product(d_vPn, layer.hidden, ((1, 2), (0, 1)))
    d_weight = _add_at(d_weight, d_rows, first)
    return (_Gradients(d_weight, d_bias), d_hidden + part.d_hidden(d_vPn)), None

  # In the layout that the products leave it in: it is turned once, behind the loop.
  zero = jnp.zeros(tiles.d_hidden_shape(layer.hidden.shape), jnp.float32)
  zero = vocab_parallel.varying((zero, sums))[0]
  index = jnp.arange(len(scores), dtype=jnp.int32)
  (sums, d_hidden), _ = lax.scan(step, (sums, zero), (index, scores))
  return sums, tiles.d_hidden_of_tokens(d_hidden)


def _masses(plan, layer, row_1n):
  """Statistics of a tile of tokens, exp(score - reference) [V, n], and its reference [n].

  Sum, own score and masses come from one pass over the product, since the reference is the maximum
  of some rows. Where the sum shows a score far above it, the exact maximum is the reference.
  """
  options, hidden_nD = plan.options, layer.hidden[0]
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
    lowest = jnp.full(row_1n.shape, -jnp.inf, jnp.float32)
    top_1n = tiles.fold(plan.cut, (layer,), (), lowest, higher)
    return below(scores(slice(None)), top_1n[0])

  score_Vn = scores(slice(None))
  own_n = jnp.where(row_V1 == row_1n, score_Vn, -jnp.inf).max(axis=0)
  score_sum = None
  if plan.terms.label_smoothing > 0:
    score_sum = jnp.where(jnp.isneginf(score_Vn), 0.0, score_Vn).sum(axis=0)[None]
  first = below(score_Vn, scores(slice(None, None, _STRIDE)).max(axis=0))
  failed_n = (first[0] > math.exp(statistics.HEADROOM)) | jnp.isneginf(first[2])
  # What does not depend on the reference stays outside, where it is part of the same fusion.
  total_n, mass_Vn, reference_n = lax.cond(failed_n.any(), exact, lambda: first)
  last = statistics.empty(plan.outputs, row_1n.shape, False)._replace(
    own=own_n[None], top=reference_n[None], total=total_n[None], score_sum=score_sum
  )
  return last, (mass_Vn, reference_n)


# Distance of the rows whose maximum is the first reference of a token.
_STRIDE = 512


def _bias(layer, rows):
  return None if layer.bias is None else layer.bias[rows, None].astype(jnp.float32)


def _of_masses(plan, layer, kept, given, stats, sums):
  """The sums with the gradients of a tile of tokens, and the cotangent of its hidden vectors."""
  options, (mass_Vn, reference_n), hidden_nD = plan.options, kept, layer.hidden[0]
  weight_VD = layer.weight.all().astype(options.dtype)
  row_V1 = jnp.arange(len(mass_Vn), dtype=jnp.int32)[:, None]
  # p = mass · exp(reference - log Z): one factor a token, instead of an exponential a score.
  scale_1n = given.prob * jnp.exp((exp_shift(reference_n) - given.z.top) - given.z.log_sum)
  # A rounded mass would leave little of p - 1 for a token that is nearly certain.
  own_1n = given.own + given.prob * jnp.exp(stats.log_prob)
  d_Vn = jnp.where(row_V1 == given.row, own_1n, mass_Vn * scale_1n)
  if given.score_sum is not None:
    is_removed = False if layer.bias is None else jnp.isneginf(_bias(layer, slice(None)))
    d_Vn += jnp.where(is_removed, 0.0, given.score_sum)
  d_Vn /= options.temperature
  d_bias = None if sums.bias is None else sums.bias + d_Vn.sum(axis=1)
  d_Vn = d_Vn.astype(options.dtype)
  d_weight = sums.weight + tiles.product(d_Vn, hidden_nD, ((1,), (0,)))
  d_hidden_nD = tiles.product(d_Vn, weight_VD, ((0,), (0,)))
  return _Gradients(d_weight, d_bias), d_hidden_nD[None]


def _add_at(total, part, start):
  old = lax.dynamic_slice_in_dim(total, start, part.shape[0])
  return lax.dynamic_update_slice_in_dim(total, old + part, start, axis=0)


def _backward(plan, saved, cotangent):
  del plan
  gradients, unit, loss, like = saved
  scaled = lambda d, scale, like: None if d is None else (scale * d).astype(like.dtype)
  of_operands = [scaled(d, cotangent * unit, x) for d, x in zip(gradients, like[:3], strict=True)]
  return (*of_operands, scaled(loss, cotangent, like[3]), None)


_sum.defvjp(_forward, _backward)
