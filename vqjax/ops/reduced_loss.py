"""Sum of weighted cross-entropies whose gradient is formed in the forward pass.

A sum has one cotangent for all tokens, so that its gradient can be computed before the cotangent is
known, and be multiplied by it later. All scores of a tile of tokens are kept until their gradient
has been added to that of the weight: 6NDV floating-point operations, where the tiles of
`vqjax.ops.statistics` compute scores once more and take 8NDV. The price is memory traffic: the
scores of the tile, and a gradient [V, D] that is read and written for each tile of tokens.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from vqjax.ops import device, statistics, tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.statistics import Outputs


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
  tokens: int, dim: int, vocab: int, itemsize: int, scratch: int, limits: device.Device
) -> int | None:
  """Number of tokens whose scores fit `scratch` bytes; None where recomputing them is faster.

  The product that is saved, 2NDV operations, is compared with the bytes that move instead: scores
  to memory and back, and for each tile of tokens but the first, the weight twice and its gradient
  in float32 both ways.
  """
  fitting = scratch // (4 * vocab)
  if not min(tokens, fitting):
    return None
  steps = math.ceil(tokens / fitting)
  # Where reductions fuse into products, kept scores are also read for the maximum and the sum.
  of_scores = (16 if limits.fuses else 8) * tokens * vocab
  of_weight = (steps - 1) * vocab * dim * (8 + 2 * itemsize)
  if 2 * tokens * dim * vocab <= limits.balance * (of_scores + of_weight):
    return None
  even = math.ceil(tokens / steps)
  rounded = 64 * math.ceil(even / 64)
  return rounded if rounded <= min(tokens, fitting) else min(even, fitting)


def plan(
  hidden_ND: Array, weight: RowFactory, outputs: Outputs, scratch: int
) -> tuple[int, int] | None:
  """The tile (tokens, rows) of `weighted_sum`; None where the tiles of `statistics` are better.

  They are on several devices, each of which would need a gradient of the whole weight, and for
  composed rows, which would be composed for each tile of tokens.
  """
  kinds = vocab_parallel.axis_types()
  alone = outputs.axis not in kinds or vocab_parallel.axis_size(outputs.axis) == 1
  if not (alone and weight.is_table and vocab_parallel.token_shards(outputs.axis).count == 1):
    return None
  if not hidden_ND.shape[0]:
    return None
  limits = device.current()
  itemsize = outputs.scoring.dtype.itemsize
  tokens = tile_of_tokens(*hidden_ND.shape, weight.count, itemsize, scratch, limits)
  return tokens and (tokens, tiles.cut_tile(None, tokens, weight.count).vocab)


class _Static(NamedTuple):
  outputs: Outputs
  terms: Terms
  cut: tiles.Cut
  limits: device.Device


def weighted_sum(
  outputs: Outputs,
  terms: Terms,
  tile: tuple[int, int],
  hidden_ND: Array,
  token_N: Array,
  token_weight_N: Array,
  weight: RowFactory,
  bias_V: Array | None,
) -> Array:
  """Sum of the losses times their weights, differentiable in all floating-point arrays."""
  static = _Static(
    outputs,
    terms,
    tiles.Cut(tiles.Tile(*tile), vocab_parallel.token_shards(outputs.axis)),
    device.current(),
  )
  operands = hidden_ND, weight.per_row, bias_V, token_weight_N, token_N
  return _sum(static, *vocab_parallel.varying(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(static, hidden_ND, weight_VD, bias_V, token_weight_N, token_N):
  """The sum alone, which needs no gradient and keeps no scores."""
  stats = statistics.distribution(
    static.outputs, None, hidden_ND, token_N, as_row_factory(weight_VD), bias_V
  )
  loss_N = static.terms.of(stats.log_prob, stats.log_z, stats.mean_log_prob)
  return (loss_N * token_weight_N).sum()


class _Gradients(NamedTuple):
  """Sums over the tiles of tokens so far, in float32; `bias` is None without one."""

  weight: Array
  bias: Array | None


def _forward(static, hidden_ND, weight_VD, bias_V, token_weight_N, token_N):
  scoring, (size, height) = static.outputs.scoring, static.cut.tile
  n, v = hidden_ND.shape[0], weight_VD.shape[0]
  layer = tiles.Linear(hidden_ND[None], as_row_factory(weight_VD), bias_V)
  tokens = tiles.TokenTiles(static.cut.shards, size, n)
  # The last tile may overlap its neighbour, whose tokens must not count twice.
  fresh = jnp.arange(tokens.count)[:, None, None] * size <= tokens.split(jnp.arange(n)[None])
  # Cotangents of scores are cast to the dtype of the products. Relative to the largest weight they
  # are of order 1, where those of a mean over many tokens would underflow in float16.
  largest = lax.stop_gradient(jnp.abs(token_weight_N).max())
  unit = jnp.where(largest == 0, 1.0, largest)
  row, token_weight = tokens.split(
    (token_N[None], (token_weight_N[None] / unit).astype(jnp.float32))
  )
  token_weight = jnp.where(fresh, token_weight, 0.0)
  index_v = jnp.arange(math.ceil(v / height), dtype=jnp.int32)
  rows = v if bias_V is None else (~jnp.isneginf(bias_V)).sum()

  def losses(own, log_z, score_sum):
    mean = None if score_sum is None else score_sum / rows - log_z
    return static.terms.of(own, log_z, mean)

  def token_step(sums, tile):
    index, row_Pn, token_weight_Pn = tile
    hidden_PnD = tokens.at(layer.hidden, index).astype(scoring.dtype)

    def score_step(running, index):
      v_edge = tiles.edge(index, height, v)
      part = tiles.tile_rows(static.cut, scoring, layer, v_edge.start)
      score_vPn = scoring.finish(tiles.product(part.weight, hidden_PnD, ((1,), (2,))), part.bias)
      if v % height:
        score_vPn = jnp.where(v_edge.fresh[:, None, None], score_vPn, -jnp.inf)
      return statistics.merge(running, (score_vPn,), v_edge.start, row_Pn, axis=0), score_vPn

    start = statistics.empty(static.outputs, row_Pn.shape, static.terms.label_smoothing > 0)
    start = vocab_parallel.varying((start, hidden_ND, weight_VD, bias_V, row_Pn))[0]
    # [tiles of rows, v, P, n]: each tile is written and read as a whole.
    last, scores = lax.scan(score_step, start, index_v)
    stats, (z, _) = statistics.finished(static.outputs, last)
    loss_Pn, pull = jax.vjp(losses, stats.log_prob, stats.log_z, stats.score_sum)
    d_log_prob, d_log_z, d_score_sum = pull(token_weight_Pn)
    given = statistics.Cotangents(
      row=row_Pn,
      z=z,
      own=d_log_prob,
      prob=d_log_z - d_log_prob,
      entropy=None,
      excess=None,
      score_sum=d_score_sum,
      best=None,
      best_own=None,
    )

    def gradient_step(carry, tile):
      (d_weight, d_bias), d_hidden = carry
      index, score_vPn = tile
      v_edge = tiles.edge(index, height, v)
      part = tiles.tile_rows(static.cut, scoring, layer, v_edge.start)
      row_v11 = (v_edge.start + jnp.arange(height, dtype=jnp.int32))[:, None, None]
      (d_vPn,) = statistics.d_scores((score_vPn,), row_v11, given)
      d_vPn = scoring.pull_back(score_vPn, d_vPn)
      if v % height:
        d_vPn = jnp.where(v_edge.fresh[:, None, None], d_vPn, 0.0)
      if d_bias is not None:
        d_bias = _add_at(d_bias, d_vPn.sum(axis=(1, 2)), v_edge.start)
      d_vPn = d_vPn.astype(scoring.dtype)
      d_rows = tiles.product(d_vPn, hidden_PnD, ((1, 2), (0, 1)))
      d_weight = _add_at(d_weight, d_rows, v_edge.start)
      return (_Gradients(d_weight, d_bias), d_hidden + part.d_hidden(d_vPn)), None

    zero = jnp.zeros(tiles.d_hidden_shape(hidden_PnD.shape), jnp.float32)
    zero = vocab_parallel.varying((zero, sums))[0]
    (sums, d_hidden), _ = lax.scan(gradient_step, (sums, zero), (index_v, scores))
    return sums, (tiles.d_hidden_of_tokens(d_hidden), loss_Pn)

  start = _Gradients(
    weight=jnp.zeros(weight_VD.shape, jnp.float32),
    bias=None if bias_V is None else jnp.zeros(bias_V.shape, jnp.float32),
  )
  start = vocab_parallel.varying((start, hidden_ND, weight_VD, bias_V, token_weight))[0]
  index = jnp.arange(tokens.count, dtype=jnp.int32)
  sums, (d_hidden, loss) = lax.scan(token_step, start, (index, row, token_weight))
  value = unit * (loss * token_weight).sum()
  d_hidden, loss = (x[0] for x in tokens.join((d_hidden, loss)))
  # Empty arrays carry the dtypes of the operands.
  like = tuple(None if x is None else x[:0] for x in (hidden_ND, weight_VD, bias_V, token_weight_N))
  return value, ((d_hidden, sums.weight, sums.bias), unit, loss, like)


def _add_at(total, part, start):
  old = lax.dynamic_slice_in_dim(total, start, part.shape[0])
  return lax.dynamic_update_slice_in_dim(total, old + part, start, axis=0)


def _backward(static, saved, cotangent):
  del static
  gradients, unit, loss, like = saved
  scaled = lambda d, scale, like: None if d is None else (scale * d).astype(like.dtype)
  of_operands = [scaled(d, cotangent * unit, x) for d, x in zip(gradients, like[:3], strict=True)]
  return (*of_operands, scaled(loss, cotangent, like[3]), None)


_sum.defvjp(_forward, _backward)
