"""Statistics of softmax(hidden · weightᵀ + bias) from one pass over tiles.

A running maximum and running sums are merged from tile to tile (`merge`), then over the devices of
the vocabulary's axis (`all_reduced`). The backward pass computes the cotangent of a tile of scores
(`d_scores`) from the saved normaliser and the cotangents of the statistics.
"""

# The way of a call, with one custom derivative around the loops:
#
#   distribution -> _pass -> _forward:   _Running   fold of `merge`, or of one product with all rows
#                                           |       where the device keeps the scores
#                                        all_reduced over the vocabulary's axis
#                                           |
#                            finished:   _Pass, the results, and LogSum, which is saved
#                  _pass_backward:       Cotangents -> `gradients` with the rule `d_scores`
#
# A tile may be merged in two ways. `merge` takes the maximum of the tile first and adds sums that
# are relative to it, which reads the scores twice. Where reductions fuse into the product (TPUs),
# that would compute or store the scores twice: `_merge_below` adds sums relative to the maximum of
# the tiles before, in one pass, and `fold` repeats the rows of a tile whose maximum is far above.

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from vqjax.ops import device, precision, tiles, topk, vocab_parallel
from vqjax.ops.scores import LogSum, exp_shift
from vqjax.types import Shape

__all__ = ["LinearSoftmax"]


class LinearSoftmax(NamedTuple):
  """Statistics of each token's distribution over the vocabulary, float32, in nats.

  Attributes:
    log_prob: log-probability of the token, never above 0.
    log_z: log-normaliser, log sum_v exp(score_v).
    entropy: -sum_v p_v log p_v, or None.
    mean_log_prob: mean of log p_v over the vocabulary, without the rows that a bias of -inf
      removes: the term of label smoothing. Or None.
    top_log_probs: log-probabilities of the k best tokens in descending order, or None.
    top_tokens: the k best tokens, int32; -1 where fewer than k have a probability. Or None.
    collision: sum_v p_v², the probability that two draws are equal, or None.
    is_best: whether no other token is more likely; the mean of it is the accuracy.
    rank: 1 + the number of tokens that are more likely, int32, or None.
  """

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]
  entropy: Float[Array, "*B"] | None
  mean_log_prob: Float[Array, "*B"] | None
  top_log_probs: Float[Array, "*B k"] | None
  top_tokens: Int[Array, "*B k"] | None
  collision: Float[Array, "*B"] | None
  is_best: Bool[Array, "*B"]
  rank: Int[Array, "*B"] | None


class Outputs(NamedTuple):
  """Static description of the statistics to compute.

  Attributes:
    entropy: whether to compute the entropy.
    mean: whether to compute the mean log-probability.
    top_k: number of best tokens.
    collision: whether to compute the sum of squared probabilities.
    rank: whether to compute the rank of the token.
  """

  entropy: bool = False
  mean: bool = False
  top_k: int = 0
  collision: bool = False
  rank: bool = False


class _Plan(NamedTuple):
  """Static description of a pass.

  Attributes:
    outputs: the statistics to compute.
    cut: tile and token shards.
    limits: those of the device; a compiled pass for others is another one.
    kept: number of tiles of rows whose scores are kept for the gradient.
  """

  outputs: Outputs
  cut: tiles.Cut
  limits: device.Device
  kept: int

  @property
  def fuses(self) -> bool:
    """Whether reductions fuse into the product of the scores."""
    return self.limits.fuses


class _Pass(NamedTuple):
  """Results of the pass over the tiles; None for statistics that are not computed."""

  log_prob: Array
  log_z: Array
  entropy: Array | None
  score_sum: Array | None
  top_log_prob: Array | None
  collision: Array | None
  top_token: Array | None
  is_best: Array
  rank: Array | None


def distribution(
  outputs: Outputs, cut: tiles.Cut, layers: tuple[tiles.Linear], row_PN: Array
) -> LinearSoftmax:
  """Statistics of tokens in shards; the body of `tiles.on_each_device`."""
  (layer,) = layers
  plan = _Plan(outputs, cut, device.current(), 0)
  # A given tile is a given limit of memory; the best tokens have a gradient in tiles alone.
  if layer.options.tile is None and not outputs.top_k and layer.counted is None:
    plan = _keeping(plan, layer)
  stats = _compiled_pass(plan, layer, row_PN)
  mean_PN = _mean_score(layer, stats.score_sum) - stats.log_z if outputs.mean else None
  return LinearSoftmax(
    log_prob=stats.log_prob,
    log_z=stats.log_z,
    entropy=stats.entropy,
    mean_log_prob=mean_PN,
    top_log_probs=stats.top_log_prob,
    top_tokens=stats.top_token,
    collision=stats.collision,
    is_best=stats.is_best,
    rank=stats.rank,
  )


def _keeping(plan, layer):
  """The plan with as many tiles of rows as fit the bytes of scores that may be kept."""
  limits, (n, v) = plan.limits, (layer.hidden.shape[1], layer.weight.count)
  scratch = layer.options.scratch
  fitting = (limits.kept if scratch is None else scratch) // tiles.score_bytes(layer.options.dtype)
  tile = plan.cut.tile
  if n * v <= fitting and n * v <= max(tile.tokens * tile.vocab, limits.kept // 4):
    return plan._replace(cut=plan.cut._replace(tile=tile._replace(vocab=v)), kept=1)
  count = min(math.ceil(v / tile.vocab), fitting // max(1, n * tile.vocab))
  # Where reductions fuse into products, scores of some tiles alone are not worth their way.
  return plan if plan.fuses and count * tile.vocab < v else plan._replace(kept=count)


def _mean_score(layer, score_sum_PN):
  """Mean of a token's scores over the rows that no bias of -inf removes."""
  weight, bias_V, axis = layer.weight, layer.bias, vocab_parallel.inside(layer.options.vocab_axis)
  total = lambda x: lax.psum(vocab_parallel.varying(x, axis), axis) if axis else x
  kept_V = None if bias_V is None else ~jnp.isneginf(bias_V)
  rows = weight.count if kept_V is None else kept_V.sum()
  if score_sum_PN is None:
    weight_VD = weight.all()
    # The mean of hidden · row + bias is hidden · (mean row) + (mean bias): no pass over the scores.
    rows_VD = weight_VD if kept_V is None else jnp.where(kept_V[:, None], weight_VD, 0.0)
    score_sum_PN = layer.hidden.astype(jnp.float32) @ rows_VD.sum(axis=0, dtype=jnp.float32)
    if kept_V is not None:
      score_sum_PN += jnp.where(kept_V, bias_V, 0.0).sum(dtype=jnp.float32)
    score_sum_PN = total(score_sum_PN) / layer.options.temperature
  return score_sum_PN / total(jnp.asarray(rows, jnp.float32))


class _Running(NamedTuple):
  """Statistics of the scores that were merged.

  Attributes:
    own: score of the token itself, -inf before its tile.
    top: the largest score.
    total: sum of exp(score - top).
    lost: what the rounding of `total` has lost: beside a nearly certain token the masses of a tile
      are below the digits of the sum.
    moment: sum of exp(score - top) · (score - top), for the entropy, or None.
    square: sum of exp(score - top)², or None.
    score_sum: sum of the scores, for their mean, or None.
    best: the k best scores, or None.
    least: score that those of more likely tokens exceed, or None.
    above: number of scores that exceed it, or None.
  """

  own: Array
  top: Array
  total: Array
  lost: Array
  moment: Array | None
  square: Array | None
  score_sum: Array | None
  best: topk.TopK | None
  least: Array | None = None
  above: Array | None = None


# JAX's own gradient of the scans would store the scores of all tiles, [N, V].
@precision.custom_vjp
def _pass(plan, layer, row_PN):
  """Statistics of tokens at index `row` of the rows, which may be another device's."""
  return _forward(plan, layer, row_PN)[0]


def _forward(plan, layer, row_PN):
  """Results of the pass, what its gradient needs, and the kept scores or None."""
  outputs, kept = plan.outputs, None
  # A softcap makes the mean score differ from hidden · (mean row); composed rows would all have to
  # be composed at once for their mean.
  sums_scores = outputs.mean and not (layer.options.function is None and layer.weight.is_table)
  start = empty(outputs, row_PN.shape, sums_scores)
  if outputs.rank:
    none = jnp.zeros(row_PN.shape, jnp.int32)
    start = start._replace(least=_least_above(layer, row_PN), above=none)
  if plan.kept:
    add = lambda old, score, *place: merge(old, (score,), place[0], row_PN, place[1], plan.fuses)
    start, kept = tiles.kept_scores(plan.cut, layer, plan.kept, start, add)
  if plan.fuses and not plan.kept:
    # A lower bound of the maximum, which the first tile may be summed below. One nat lower, since
    # another product rounds otherwise, and no number but a score may be the largest.
    start = start._replace(top=tiles.first_scores(plan.cut, layer).max(axis=-1) - 1.0)
    shortcut = tiles.Shortcut(_merge_below, _overflowed)
    exact = functools.partial(merge, fuses=True)
    last = tiles.fold(plan.cut, (layer,), row_PN, start, exact, shortcut)
  else:
    last = tiles.fold(plan.cut, (layer,), row_PN, start, merge, skip=plan.kept)
  axis = vocab_parallel.inside(layer.options.vocab_axis)
  if axis is not None:
    last = all_reduced(last, axis, row_PN, layer.weight.count)
  return *finished(outputs, last), kept


def _least_above(layer, row_PN):
  """The token's own score, from a product of its own, plus what rounding may add to an equal one.

  The count of the scores above it can then begin before the token's tile.
  """
  options, axis = layer.options, vocab_parallel.inside(layer.options.vocab_axis)
  index_PN = jnp.clip(row_PN, 0, layer.weight.count - 1)
  row_ND = layer.weight.at(index_PN.reshape(-1)).astype(options.dtype).astype(jnp.float32)
  row_PND = row_ND.reshape(*index_PN.shape, -1)
  hidden_PND = layer.hidden.astype(options.dtype).astype(jnp.float32)
  raw_PN = tiles.rounded_scores((hidden_PND * row_PND).sum(axis=-1), options.dtype)
  bias_PN = None if layer.bias is None else layer.bias[index_PN].astype(jnp.float32)
  size_PN = jnp.linalg.norm(hidden_PND, axis=-1) * jnp.linalg.norm(row_PND, axis=-1)
  least_PN = options.finish(raw_PN, bias_PN) + 2.0**-21 * size_PN / options.temperature
  if axis is None:
    return least_PN
  return vocab_parallel.from_owner(least_PN, row_PN, layer.weight.count, axis)


def empty(outputs: Outputs, shape: Shape, sums_scores: bool) -> _Running:
  """The statistics of no scores, for tokens of the given shape."""
  lowest, zero = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
  return _Running(
    own=lowest,
    top=lowest,
    total=zero,
    lost=zero,
    moment=zero if outputs.entropy else None,
    square=zero if outputs.collision else None,
    score_sum=zero if sums_scores else None,
    best=topk.empty(shape, outputs.top_k) if outputs.top_k else None,
  )


def finished(outputs: Outputs, last: _Running) -> tuple[_Pass, tuple]:
  """Results of a pass over all scores, and what its gradient needs."""
  # The logarithm of 1 + a little keeps the digits of the little.
  above = jnp.log1p(jnp.maximum(last.total - 1 + last.lost, -0.5))
  log_sum = jnp.where(last.total < 0.5, jnp.log(last.total), above)
  z = LogSum(last.top, log_sum)
  excess = last.moment / last.total if outputs.entropy else None
  # In this order: own - log Z would lose digits where both are large.
  below = lambda score, top, log_sum: jnp.minimum((score - top) - log_sum, 0.0)
  stats = _Pass(
    log_prob=below(last.own, z.top, z.log_sum),
    log_z=z.top + z.log_sum,
    entropy=z.log_sum - excess if outputs.entropy else None,
    score_sum=last.score_sum,
    top_log_prob=(
      below(last.best.scores, z.top[..., None], z.log_sum[..., None]) if outputs.top_k else None
    ),
    collision=last.square / last.total**2 if outputs.collision else None,
    top_token=last.best.tokens if outputs.top_k else None,
    is_best=last.own >= last.top,
    rank=None if last.above is None else 1 + last.above,
  )
  return stats, (z, excess)


def merge(old, scores, first_row, row_Pn, axis=-1, fuses=False):
  """The statistics with a tile's scores added; its rows are along `axis`.

  `fuses` says whether reductions fuse into the product of the scores.
  """
  top_Pn = jnp.maximum(old.top, scores[0].max(axis=axis))
  return _add(_moved(old, top_Pn), scores[0], first_row, row_Pn, axis, fuses)


def _merge_below(old, scores, first_row, row_Pn):
  """The statistics with a tile added to sums relative to the maximum of earlier tiles."""
  # Maximum, sums and own score are reductions of one product, since none needs another.
  new = _add(old, scores[0], first_row, row_Pn, axis=-1, fuses=True)
  return _moved(new, jnp.maximum(old.top, scores[0].max(axis=-1)))


# Nats by which a maximum may exceed that of earlier tiles: exp(60) times V is finite.
HEADROOM = 60.0


def _overflowed(old, new):
  """Whether a maximum rose by more than the headroom, or from -inf."""
  # Squares have twice the exponent.
  most = HEADROOM if old.square is None else HEADROOM / 2
  return (new.top - old.top > most).any()


def _add(old, score, first_row, row_Pn, axis, fuses):
  """The statistics with a tile, rows along `axis`, added to the sums relative to `old.top`."""
  above = score - jnp.expand_dims(exp_shift(old.top), axis)
  mass = jnp.exp(above)
  row_v = first_row + jnp.arange(score.shape[axis], dtype=jnp.int32)
  # The token's own score is read from the tile: a separate product hidden · row would round
  # differently from the same score in the normaliser, and could make a probability above 1.
  if fuses:
    # A reduction fuses into the product, which a gather does not.
    row = jnp.expand_dims(row_v, tuple(i for i in range(3) if i != axis % 3))
    own_Pn = jnp.where(row == jnp.expand_dims(row_Pn, axis), score, -jnp.inf).max(axis=axis)
  else:
    index_Pn, height = row_Pn - row_v[0], score.shape[axis]
    clipped = jnp.expand_dims(jnp.clip(index_Pn, 0, height - 1), axis)
    own_Pn = jnp.take_along_axis(score, clipped, axis=axis).squeeze(axis)
    own_Pn = jnp.where((index_Pn >= 0) & (index_Pn < height), own_Pn, -jnp.inf)
  moment, score_sum, best = old.moment, old.score_sum, old.best
  if moment is not None:
    # An absent row has score -inf and mass 0, whose product is nan.
    # Before the product as well, for the second derivative: 0 · -inf in a branch that is not taken.
    moment = moment + (mass * jnp.where(jnp.isneginf(score), 0.0, above)).sum(axis=axis)
  square = None if old.square is None else old.square + (mass**2).sum(axis=axis)
  if score_sum is not None:
    score_sum = score_sum + jnp.where(jnp.isneginf(score), 0.0, score).sum(axis=axis)
  if best is not None:
    best = topk.merge(best, score, row_v)
  above = old.above
  if above is not None:
    above = above + (score > jnp.expand_dims(old.least, axis)).sum(axis=axis, dtype=jnp.int32)
  part = mass.sum(axis=axis)
  total = old.total + part
  # Exactly what the rounded sum lacks (Knuth).
  added = total - old.total
  lost = (old.total - (total - added)) + (part - added)
  return _Running(
    own=jnp.maximum(old.own, own_Pn),
    top=old.top,
    total=total,
    lost=old.lost + lost,
    moment=moment,
    square=square,
    score_sum=score_sum,
    best=best,
    least=old.least,
    above=above,
  )


def _moved(old, top):
  """The statistics with sums relative to another maximum."""
  # Sums under a maximum of -inf are 0.
  step = jnp.where(jnp.isneginf(old.top), 0.0, old.top - exp_shift(top))
  shrink = jnp.exp(step)
  # Each of the terms x · exp(x - top) changes by step, and by the factor of its exponential.
  moment = None if old.moment is None else (old.moment + step * old.total) * shrink
  square = None if old.square is None else old.square * shrink**2
  total, lost = old.total * shrink, old.lost * shrink
  return old._replace(top=top, total=total, lost=lost, moment=moment, square=square)


def all_reduced(local, axis, row_PN, rows):
  """The statistics over all devices of the axis, each with `rows` rows."""
  moved = _moved(local, vocab_parallel.common_shift(local.top, axis))
  total = lambda x: None if x is None else lax.psum(x, axis)
  best = None
  if local.best is not None:
    first = vocab_parallel.first_row(axis, rows)
    token = jnp.where(local.best.tokens < 0, -1, local.best.tokens + first)
    best = topk.across_devices(topk.TopK(local.best.scores, token), axis)
  return _Running(
    own=vocab_parallel.from_owner(local.own, row_PN, rows, axis),
    top=moved.top,
    total=total(moved.total),
    lost=total(moved.lost),
    moment=total(moved.moment),
    square=total(moved.square),
    score_sum=total(local.score_sum),
    best=best,
    above=total(local.above),
  )


class Cotangents(NamedTuple):
  """Per-token values that the cotangents of the scores are computed from.

  Attributes:
    row: row of the token.
    z: normaliser.
    own: cotangent of the token's own score, without the terms below; see `own_cotangent`.
    prob: coefficient of the probabilities of all other tokens.
    score_sum: cotangent of the sum of scores.
    entropy: cotangent of the entropy.
    excess: mean of score - top under p.
    square: cotangent of the sum of p².
    collision: the sum of p².
    best: rows of the best tokens.
    best_own: coefficients of their scores.
  """

  row: Array
  z: LogSum
  own: Array | None
  prob: Array | None
  score_sum: Array | None
  entropy: Array | None = None
  excess: Array | None = None
  square: Array | None = None
  collision: Array | None = None
  best: Array | None = None
  best_own: Array | None = None


def own_cotangent(own: Array, prob: Array, log_prob: Array) -> Array:
  """Cotangent of a token's own score, from the coefficients of its score and of probabilities.

  It is p - 1 times a number for a likelihood. Of a nearly certain token that has the digits of
  log p alone: the rounding of a score, or of log Z, would be added to 1 - p and exceed it.
  """
  return (own + prob) + prob * jnp.expm1(log_prob)


def _pass_forward(plan, *primals):
  # With symbolic zeros each operand comes with a mark of whether it is differentiated.
  layer, row = jax.tree.map(lambda x: x.value, primals)
  stats, (z, excess), kept = _forward(plan, layer, row)
  return stats, (layer, row, z, excess, stats, kept)


def _pass_backward(plan, saved, cotangents):
  layer, row_PN, z, excess_PN, stats, kept = saved
  # XLA removes unused gradients of operands from the loops by itself, but not the terms of
  # statistics that a loss only reports (p · 0 may be nan), such as a scatter at each tile for an
  # unused top-5. Only symbolic zeros tell which they are.
  own, log_z, entropy, score_sum, best_own, square, *_ = (
    None if isinstance(x, SymbolicZero) else x for x in cotangents
  )
  if all(x is None for x in (own, log_z, entropy, score_sum, best_own, square)):
    return None, None
  # d log_prob = onehot - p, d log_z = p, and d top_log_prob = onehot - p for each of the k.
  of_prob = [log_z] if log_z is not None else []
  if own is not None:
    of_prob.append(-own)
  best_row = None
  if best_own is not None:
    of_prob.append(-best_own.sum(-1))
    axis = vocab_parallel.inside(layer.options.vocab_axis)
    best_row = stats.top_token - vocab_parallel.first_row(axis, layer.weight.count)
  prob = functools.reduce(jnp.add, of_prob) if of_prob else None
  given = Cotangents(
    row=row_PN,
    z=z,
    own=None if own is None else own_cotangent(own, prob, stats.log_prob),
    prob=prob,
    score_sum=score_sum,
    entropy=entropy,
    excess=None if entropy is None else excess_PN,
    square=square,
    collision=None if square is None else stats.collision,
    best=best_row,
    best_own=best_own,
  )
  given = vocab_parallel.varying((given, layer))[0]
  kept = None if kept is None else (kept,)
  (gradient,) = tiles.gradients(plan.cut, (layer,), given, d_scores, kept)
  return gradient, None


def d_scores(scores, row_v11, given):
  """Cotangent of each score of the tile: p · prob, or own in the token's row, + ..."""
  (score_vPn,) = scores
  above_vPn = score_vPn - given.z.top
  prob_vPn = jnp.exp(above_vPn - given.z.log_sum)
  terms = []
  if given.prob is not None:
    terms.append(prob_vPn * given.prob)
  if given.own is not None:
    terms[0] = jnp.where(row_v11 == given.row, given.own, terms[0])
  if given.entropy is not None:
    # dH/ds = -p (s - E[s]); an absent row would be 0 · -inf, here or in the second derivative.
    finite_vPn = jnp.where(jnp.isneginf(score_vPn), 0.0, above_vPn)
    terms.append(prob_vPn * (given.excess - finite_vPn) * given.entropy)
  if given.square is not None:
    terms.append(2 * prob_vPn * (prob_vPn - given.collision) * given.square)
  if given.score_sum is not None:
    terms.append(jnp.where(jnp.isneginf(score_vPn), 0.0, given.score_sum))
  d_vPn = functools.reduce(jnp.add, terms)
  if given.best_own is not None:
    d_vPn = add_at_rows(d_vPn, given.best - row_v11[0, 0, 0], given.best_own)
  return (d_vPn,)


def add_at_rows(d_vPn: Array, row_Pnk: Array, own_Pnk: Array) -> Array:
  """A tile with numbers added at k rows of each token; rows outside of it are left out."""
  height, _, width = d_vPn.shape
  # `drop` ignores indices beyond the end, but a negative index counts from the end.
  row_Pnk = jnp.where(row_Pnk < 0, height, row_Pnk)
  token_n1 = jnp.arange(width)[:, None]
  add = lambda d_vn, row_nk, own_nk: d_vn.at[row_nk, token_n1].add(own_nk, mode="drop")
  # A batch of scatters stays on the devices of its shards; one scatter would gather its indices.
  return jax.vmap(add, in_axes=(1, 0, 0), out_axes=1)(d_vPn, row_Pnk, own_Pnk)


_pass.defvjp(
  *map(vocab_parallel.own_promotion, (_pass_forward, _pass_backward)), symbolic_zeros=True
)
# Eagerly, `jax.shard_map` has no rule for symbolic zeros; compiled, it needs none.
_compiled_pass = jax.jit(_pass, static_argnums=0, inline=True)
