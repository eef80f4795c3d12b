"""Statistics of softmax(hidden · weightᵀ + bias) from one pass over tiles.

A running maximum and running sums are merged from tile to tile (`merge`), then over the devices of
the vocabulary's axis (`_all_reduce`). The backward pass computes the cotangent of a tile of scores
(`d_scores`) from the saved normaliser and the cotangents of the statistics.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from vqjax.ops import device, tiles, topk, vocab_parallel
from vqjax.ops.stable import exp_shift


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
  """

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]
  entropy: Float[Array, "*B"] | None
  mean_log_prob: Float[Array, "*B"] | None
  top_log_probs: Float[Array, "*B k"] | None
  top_tokens: Int[Array, "*B k"] | None


class Outputs(NamedTuple):
  """Static description of the statistics to compute.

  Attributes:
    scoring: how scores are computed.
    entropy: whether to compute the entropy.
    mean: whether to compute the mean log-probability.
    top_k: number of best tokens.
    axis: mesh axis of the vocabulary, or None.
  """

  scoring: tiles.Scoring
  entropy: bool
  mean: bool
  top_k: int
  axis: str | None


class _Plan(NamedTuple):
  outputs: Outputs
  cut: tiles.Cut
  fuses: bool
  keeps: bool


class _Pass(NamedTuple):
  """Results of the pass over the tiles; None for statistics that are not computed."""

  log_prob: Array
  log_z: Array
  entropy: Array | None
  score_sum: Array | None
  top_log_prob: Array | None
  top_token: Array | None


def distribution(outputs: Outputs, tile, hidden_ND, token_N, weight, bias_V) -> LinearSoftmax:
  """Statistics of flat tokens; the rows may be one device's part of the vocabulary."""
  axis = vocab_parallel.inside(outputs.axis)
  hidden_ND, token_N, weight, bias_V = vocab_parallel.varying(
    (hidden_ND, token_N, weight, bias_V), *([axis] if axis else [])
  )
  shards = vocab_parallel.token_shards(outputs.axis)
  hidden_PND = shards.split(hidden_ND)
  # Indices into the rows of this device, outside of them for tokens of another device.
  row_PN = shards.split(token_N) - vocab_parallel.first_row(axis, weight.count)
  sides = tiles.cut_tile(tile, hidden_PND.shape[1], weight.count)
  plan = _Plan(
    outputs=outputs,
    cut=tiles.Cut(sides, shards),
    fuses=device.current().fuses,
    # A given tile is a given limit of memory; the best tokens have a gradient in tiles alone.
    keeps=tile is None and not outputs.top_k and tiles.are_kept(hidden_PND.shape[1] * weight.count),
  )
  stats = _compiled_pass(plan, hidden_PND, weight, bias_V, row_PN)
  mean_PN = None
  if outputs.mean:
    mean_PN = _mean_score(outputs, hidden_PND, weight, bias_V, stats.score_sum) - stats.log_z
  result = LinearSoftmax(
    log_prob=stats.log_prob,
    log_z=stats.log_z,
    entropy=stats.entropy,
    mean_log_prob=mean_PN,
    top_log_probs=stats.top_log_prob,
    top_tokens=stats.top_token,
  )
  return jax.tree.map(lambda x: shards.join(x, hidden_ND.shape[0]), result)


def _mean_score(outputs, hidden_PND, weight, bias_V, score_sum_PN):
  """Mean of a token's scores over the rows that no bias of -inf removes."""
  axis = vocab_parallel.inside(outputs.axis)
  total = lambda x: lax.psum(vocab_parallel.varying(x, axis), axis) if axis else x
  kept_V = None if bias_V is None else ~jnp.isneginf(bias_V)
  rows = weight.count if kept_V is None else kept_V.sum()
  if score_sum_PN is None:
    weight_VD = weight.all()
    # The mean of hidden · row + bias is hidden · (mean row) + (mean bias): no pass over the scores.
    rows_VD = weight_VD if kept_V is None else jnp.where(kept_V[:, None], weight_VD, 0.0)
    score_sum_PN = hidden_PND.astype(jnp.float32) @ rows_VD.sum(axis=0, dtype=jnp.float32)
    if kept_V is not None:
      score_sum_PN += jnp.where(kept_V, bias_V, 0.0).sum(dtype=jnp.float32)
    score_sum_PN = total(score_sum_PN) / outputs.scoring.temperature
  return score_sum_PN / total(jnp.asarray(rows, jnp.float32))


class _Running(NamedTuple):
  """Statistics of the scores that were merged.

  Attributes:
    own: score of the token itself, -inf before its tile.
    top: the largest score.
    total: sum of exp(score - top).
    moment: sum of exp(score - top) · (score - top), for the entropy, or None.
    score_sum: sum of the scores, for their mean, or None.
    best: the k best scores, or None.
  """

  own: Array
  top: Array
  total: Array
  moment: Array | None
  score_sum: Array | None
  best: topk.TopK | None


class _Normalizer(NamedTuple):
  """log Z in two parts: a sum would round `log_sum` away under a large offset."""

  top: Array
  log_sum: Array


# JAX's own gradient of the scans would store the scores of all tiles, [N, V].
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(plan, hidden_PND, weight, bias_V, row_PN):
  """Statistics of tokens at index `row` of the rows, which may be another device's."""
  return _forward(plan, tiles.Linear(hidden_PND, weight, bias_V), row_PN)[0]


def _forward(plan, layer, row_PN, score_VPN=None):
  outputs = plan.outputs
  # A softcap makes the mean score differ from hidden · (mean row); composed rows would all have to
  # be composed at once for their mean.
  sums_scores = outputs.mean and (outputs.scoring.output is not None or not layer.weight.is_table)
  start = empty(outputs, row_PN.shape, sums_scores)
  if score_VPN is not None:
    last = merge(start, (score_VPN,), 0, row_PN, axis=0, fuses=plan.fuses)
  elif plan.fuses:
    # A lower bound of the maximum, which the first tile may be summed below.
    start = start._replace(top=tiles.first_scores(plan.cut, outputs.scoring, layer).max(axis=-1))
    shortcut = tiles.Shortcut(_merge_below, _overflowed)
    exact = functools.partial(merge, fuses=True)
    last = tiles.fold(plan.cut, (outputs.scoring,), (layer,), row_PN, start, exact, shortcut)
  else:
    last = tiles.fold(plan.cut, (outputs.scoring,), (layer,), row_PN, start, merge)
  axis = vocab_parallel.inside(outputs.axis)
  return finished(outputs, _all_reduce(last, axis, row_PN, layer.weight.count))


def empty(outputs: Outputs, shape: tuple[int, ...], sums_scores: bool) -> _Running:
  """The statistics of no scores, for tokens of the given shape."""
  lowest, zero = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
  return _Running(
    own=lowest,
    top=lowest,
    total=zero,
    moment=zero if outputs.entropy else None,
    score_sum=zero if sums_scores else None,
    best=topk.empty(shape, outputs.top_k) if outputs.top_k else None,
  )


def finished(outputs: Outputs, last: _Running) -> tuple[_Pass, tuple[_Normalizer, Array | None]]:
  """Results of a pass over all scores, and what its gradient needs."""
  z = _Normalizer(last.top, jnp.log(last.total))
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
    top_token=last.best.tokens if outputs.top_k else None,
  )
  return stats, (z, excess)


def merge(old, scores, first_row, row_Pn, axis=-1, fuses=False):
  """The statistics with a tile's scores added; its rows are along `axis`.

  `fuses` says whether reductions fuse into the product of the scores.
  """
  top_Pn = jnp.maximum(old.top, scores[0].max(axis=axis))
  return _add(_moved(old, top_Pn), scores[0], first_row, row_Pn, axis, fuses)


def _merge_below(old, scores, first_row, row_Pn):
  """The statistics with a tile added to sums relative to the maximum of earlier tiles.

  Maximum, sums and own score are reductions of the product in one pass, since none needs another.
  """
  new = _add(old, scores[0], first_row, row_Pn, axis=-1, fuses=True)
  return _moved(new, jnp.maximum(old.top, scores[0].max(axis=-1)))


HEADROOM = 60.0
"""Nats by which a maximum may exceed that of earlier tiles: exp(60) times V is finite."""


def _overflowed(old, new):
  """Whether a maximum rose by more than the headroom, or from -inf."""
  return (new.top - old.top > HEADROOM).any()


def _add(old, score, first_row, row_Pn, axis, fuses):
  """The statistics with a tile, rows along `axis`, added to the sums relative to `old.top`."""
  above = score - jnp.expand_dims(exp_shift(old.top), axis)
  mass = jnp.exp(above)
  row_v = first_row + jnp.arange(score.shape[axis], dtype=jnp.int32)
  moment, score_sum, best = old.moment, old.score_sum, old.best
  if moment is not None:
    # An absent row has score -inf and mass 0, whose product is nan.
    # Before the product as well, for the second derivative: 0 · -inf in a branch that is not taken.
    moment = moment + (mass * jnp.where(jnp.isneginf(score), 0.0, above)).sum(axis=axis)
  if score_sum is not None:
    score_sum = score_sum + jnp.where(jnp.isneginf(score), 0.0, score).sum(axis=axis)
  if best is not None:
    best = topk.merge(best, score, row_v)
  return _Running(
    own=jnp.maximum(old.own, _own_score(score, row_v, row_Pn, axis, fuses)),
    top=old.top,
    total=old.total + mass.sum(axis=axis),
    moment=moment,
    score_sum=score_sum,
    best=best,
  )


def _own_score(score, row_v, row_Pn, axis, fuses):
  """The token's own score, -inf where it is in another tile.

  It is read from the tile: a separate product hidden · row would round differently from the same
  score in the normaliser, and could make a probability above 1.
  """
  if fuses:
    # A reduction fuses into the product, which a gather does not.
    row = jnp.expand_dims(row_v, tuple(i for i in range(3) if i != axis % 3))
    return jnp.where(row == jnp.expand_dims(row_Pn, axis), score, -jnp.inf).max(axis=axis)
  index_Pn, height = row_Pn - row_v[0], score.shape[axis]
  clipped = jnp.expand_dims(jnp.clip(index_Pn, 0, height - 1), axis)
  own_Pn = jnp.take_along_axis(score, clipped, axis=axis).squeeze(axis)
  return jnp.where((index_Pn >= 0) & (index_Pn < height), own_Pn, -jnp.inf)


def _moved(old, top):
  """The statistics with sums relative to another maximum."""
  # Sums under a maximum of -inf are 0.
  step = jnp.where(jnp.isneginf(old.top), 0.0, old.top - exp_shift(top))
  shrink = jnp.exp(step)
  moment = None if old.moment is None else (old.moment + step * old.total) * shrink
  return old._replace(top=top, total=old.total * shrink, moment=moment)


def _all_reduce(local, axis, row_PN, rows):
  """The statistics over all devices of the axis, each with `rows` rows."""
  if axis is None:
    return local
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
    moment=total(moved.moment),
    score_sum=total(local.score_sum),
    best=best,
  )


class Cotangents(NamedTuple):
  """Per-token values that the cotangents of the scores are computed from.

  Attributes:
    row: row of the token.
    z: normaliser.
    own: coefficient of the token's own score.
    prob: coefficient of the probabilities.
    entropy: cotangent of the entropy.
    excess: mean of score - top under p.
    score_sum: cotangent of the sum of scores.
    best: rows of the best tokens.
    best_own: coefficients of their scores.
  """

  row: Array
  z: _Normalizer
  own: Array | None
  prob: Array | None
  entropy: Array | None
  excess: Array | None
  score_sum: Array | None
  best: Array | None
  best_own: Array | None


def _pass_forward(plan, *primals):
  hidden, weight, bias, row = jax.tree.map(lambda x: x.value, primals)
  layer = tiles.Linear(hidden, weight, bias)
  score = tiles.all_scores(plan.cut, plan.outputs.scoring, layer) if plan.keeps else None
  stats, (z, excess) = _forward(plan, layer, row, score)
  return stats, (layer, row, z, excess, stats.top_token, score)


def _pass_backward(plan, saved, cotangents):
  layer, row_PN, z, excess_PN, top_token_PNk, score_VPN = saved
  # XLA removes unused gradients of operands from the loops by itself, but not the terms of
  # statistics that a loss only reports (p · 0 may be nan), such as a scatter at each tile for an
  # unused top-5. Only symbolic zeros tell which they are.
  own, log_z, entropy, score_sum, best_own, _ = (
    None if isinstance(x, SymbolicZero) else x for x in cotangents
  )
  if all(x is None for x in (own, log_z, entropy, score_sum, best_own)):
    return None, None, None, None
  # d log_prob = onehot - p, d log_z = p, and d top_log_prob = onehot - p for each of the k.
  of_prob = [log_z] if log_z is not None else []
  if own is not None:
    of_prob.append(-own)
  best_row = None
  if best_own is not None:
    of_prob.append(-best_own.sum(-1))
    axis = vocab_parallel.inside(plan.outputs.axis)
    best_row = top_token_PNk - vocab_parallel.first_row(axis, layer.weight.count)
  given = Cotangents(
    row=row_PN,
    z=z,
    own=own,
    prob=functools.reduce(jnp.add, of_prob) if of_prob else None,
    entropy=entropy,
    excess=None if entropy is None else excess_PN,
    score_sum=score_sum,
    best=best_row,
    best_own=best_own,
  )
  given = vocab_parallel.varying((given, layer))[0]
  scoring = plan.outputs.scoring
  kept = None if score_VPN is None else (score_VPN,)
  (gradient,) = tiles.gradients(plan.cut, (scoring,), (layer,), given, d_scores, kept)
  return gradient.hidden, gradient.weight, gradient.bias, None


def d_scores(scores, row_v11, given):
  """Cotangent of each score of the tile: onehot · own + p · prob + ..."""
  (score_vPn,) = scores
  above_vPn = score_vPn - given.z.top
  prob_vPn = jnp.exp(above_vPn - given.z.log_sum)
  terms = []
  if given.own is not None:
    terms.append(jnp.where(row_v11 == given.row, given.own, 0.0))
  if given.prob is not None:
    terms.append(prob_vPn * given.prob)
  if given.entropy is not None:
    # dH/ds = -p (s - E[s]); an absent row would be 0 · -inf, here or in the second derivative.
    finite_vPn = jnp.where(jnp.isneginf(score_vPn), 0.0, above_vPn)
    terms.append(prob_vPn * (given.excess - finite_vPn) * given.entropy)
  if given.score_sum is not None:
    terms.append(jnp.where(jnp.isneginf(score_vPn), 0.0, given.score_sum))
  d_vPn = functools.reduce(jnp.add, terms)
  if given.best_own is not None:
    height, _, width = d_vPn.shape
    row_Pnk = given.best - row_v11[0, 0, 0]
    # `drop` ignores indices beyond the end, but a negative index counts from the end.
    row_Pnk = jnp.where(row_Pnk < 0, height, row_Pnk)
    token_n1 = jnp.arange(width)[:, None]
    add = lambda d_vn, row_nk, own_nk: d_vn.at[row_nk, token_n1].add(own_nk, mode="drop")
    # A batch of scatters stays on the devices of its shards; one scatter would gather its indices.
    d_vPn = jax.vmap(add, in_axes=(1, 0, 0), out_axes=1)(d_vPn, row_Pnk, given.best_own)
  return (d_vPn,)


_pass.defvjp(_pass_forward, _pass_backward, symbolic_zeros=True)
# Eagerly, `jax.shard_map` has no rule for symbolic zeros; compiled, it needs none.
_compiled_pass = jax.jit(_pass, static_argnums=0, inline=True)
