"""How do a token's statistics of softmax(hidden · weightᵀ + bias) come from one pass over tiles?

A running maximum and running sums are merged from tile to tile (`_merged`), then over the devices
of the vocabulary's axis (`_reduced`). The backward pass says what the cotangent of a tile of scores
is (`_d_scores`), from the saved normaliser and the cotangents that are there.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from vqjax.ops import tiles, topk, vocab_parallel


class LinearSoftmax(NamedTuple):
  """What one pass over the vocabulary tells of each token's distribution, float32, in nats.

  Attributes:
    log_prob: log-probability of the token, never above 0.
    log_z: log-normaliser, log sum_v exp(score_v).
    entropy: -sum_v p_v log p_v, if asked for.
    mean_log_prob: mean of log p_v over the vocabulary (over the rows that no bias of -inf removes),
      if asked for: what label smoothing adds.
    top_log_probs: log-probabilities of the k best tokens, best first, if asked for.
    top_tokens: those tokens, int32; -1 where fewer than k have a probability.
  """

  log_prob: Float[Array, "*B"]
  log_z: Float[Array, "*B"]
  entropy: Float[Array, "*B"] | None
  mean_log_prob: Float[Array, "*B"] | None
  top_log_probs: Float[Array, "*B k"] | None
  top_tokens: Int[Array, "*B k"] | None


class Outputs(NamedTuple):
  """What is computed, and how."""

  scoring: tiles.Scoring
  entropy: bool
  mean: bool
  top_k: int
  axis: str | None


class _Plan(NamedTuple):
  outputs: Outputs
  cut: tiles.Cut


class _Found(NamedTuple):
  """What the pass over the tiles finds; None for what was not asked for."""

  log_prob: Array
  log_z: Array
  entropy: Array | None
  score_sum: Array | None
  top_log_prob: Array | None
  top_token: Array | None


def distribution(outputs, tile, hidden_ND, token_N, weight, bias_V):
  """`LinearSoftmax` of flat tokens; the rows may be one device's part of the vocabulary."""
  axis = vocab_parallel.inside(outputs.axis)
  hidden_ND, token_N, weight, bias_V = vocab_parallel.varying(
    (hidden_ND, token_N, weight, bias_V), *([axis] if axis else [])
  )
  parts = vocab_parallel.token_shards(outputs.axis)
  hidden_PND, token_PN = parts.split(hidden_ND), parts.split(token_N)
  cut = tiles.cut_tile(tile, hidden_PND.shape[1], weight.count)
  plan = _Plan(outputs, tiles.Cut(cut, parts))
  row_PN = token_PN - vocab_parallel.first_row(axis, weight.count)
  found = _pass(plan, hidden_PND, weight, bias_V, row_PN)
  mean_PN = None
  if outputs.mean:
    mean_PN = _mean_score(outputs, hidden_PND, weight, bias_V, found.score_sum) - found.log_z
  result = LinearSoftmax(
    found.log_prob, found.log_z, found.entropy, mean_PN, found.top_log_prob, found.top_token
  )
  return jax.tree.map(lambda x: parts.join(x, hidden_ND.shape[0]), result)


def _mean_score(outputs, hidden_PND, weight, bias_V, score_sum_PN):
  """Mean of a token's scores over the rows in the distribution."""
  axis = vocab_parallel.inside(outputs.axis)
  in_all = lambda x: lax.psum(vocab_parallel.varying(x, axis), axis) if axis else x
  kept_V = None if bias_V is None else ~jnp.isneginf(bias_V)
  rows = weight.count if kept_V is None else kept_V.sum()
  if score_sum_PN is None:
    weight_VD = weight.all()
    # The mean of hidden · row + bias is hidden · (mean row) + (mean bias).
    rows_VD = weight_VD if kept_V is None else jnp.where(kept_V[:, None], weight_VD, 0.0)
    score_sum_PN = hidden_PND.astype(jnp.float32) @ rows_VD.sum(axis=0, dtype=jnp.float32)
    if kept_V is not None:
      score_sum_PN += jnp.where(kept_V, bias_V, 0.0).sum(dtype=jnp.float32)
    score_sum_PN = in_all(score_sum_PN)
  return score_sum_PN / in_all(jnp.asarray(rows, jnp.float32))


class _Running(NamedTuple):
  """Statistics of the scores so far.

  Attributes:
    own: score of the token itself, -inf before its tile.
    top: the largest.
    total: sum of exp(score - top).
    moment: sum of exp(score - top) · (score - top), for the entropy.
    score_sum: sum of the scores, for their mean.
    best: the k best.
  """

  own: Array
  top: Array
  total: Array
  moment: Array | None
  score_sum: Array | None
  best: topk.TopK | None


class _Normalizer(NamedTuple):
  """log Z in two parts: added up, they would lose the small one under a large common offset."""

  top: Array
  log_sum: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(plan, hidden_PND, weight, bias_V, row_PN):
  """What is found of tokens at row `row`, which may be another device's row."""
  return _forward(plan, tiles.Linear(hidden_PND, weight, bias_V), row_PN)[0]


def _forward(plan, layer, row_PN):
  outputs = plan.outputs
  least_PN = jnp.full(row_PN.shape, -jnp.inf, jnp.float32)
  zero_PN = jnp.zeros(row_PN.shape, jnp.float32)
  start = _Running(
    least_PN,
    least_PN,
    zero_PN,
    zero_PN if outputs.entropy else None,
    zero_PN if outputs.mean and _is_curved(outputs, layer) else None,
    topk.empty(row_PN.shape, outputs.top_k) if outputs.top_k else None,
  )
  last = tiles.fold(plan.cut, (outputs.scoring,), (layer,), row_PN, start, _merged)
  last = _reduced(last, vocab_parallel.inside(outputs.axis), layer.weight.count)
  z = _Normalizer(last.top, jnp.log(last.total))
  excess_PN = last.moment / last.total if outputs.entropy else None
  found = _Found(
    (last.own - z.top) - z.log_sum,
    z.top + z.log_sum,
    z.log_sum - excess_PN if outputs.entropy else None,
    last.score_sum,
    (last.best.scores - z.top[..., None]) - z.log_sum[..., None] if outputs.top_k else None,
    last.best.tokens if outputs.top_k else None,
  )
  return found, (z, excess_PN)


def _is_curved(outputs, layer):
  """Whether the mean score is not hidden · (mean row), or the mean row is not at hand."""
  return outputs.scoring.softcap is not None or not layer.weight.is_table


def _merged(old, scores, first_row, row_Pn):
  """The statistics with a tile's scores added."""
  (score_Pnv,) = scores
  top_Pn = jnp.maximum(old.top, score_Pnv.max(axis=-1))
  # With every score so far at -inf the maximum is no number to subtract.
  shift_Pn = jnp.where(jnp.isneginf(top_Pn), 0.0, top_Pn)
  above_Pnv = score_Pnv - shift_Pn[..., None]
  weight_Pnv = jnp.exp(above_Pnv)
  step_Pn = jnp.where(jnp.isneginf(old.top), 0.0, old.top - shift_Pn)
  shrink_Pn = jnp.exp(step_Pn)
  moment = score_sum = best = None
  if old.moment is not None:
    # A row that is not there says -inf, and 0 · -inf is no number.
    tile_Pn = jnp.where(jnp.isneginf(score_Pnv), 0.0, weight_Pnv * above_Pnv).sum(axis=-1)
    moment = (old.moment + step_Pn * old.total) * shrink_Pn + tile_Pn
  if old.score_sum is not None:
    score_sum = old.score_sum + jnp.where(jnp.isneginf(score_Pnv), 0.0, score_Pnv).sum(axis=-1)
  if old.best is not None:
    row_v = first_row + jnp.arange(score_Pnv.shape[-1], dtype=jnp.int32)
    best = topk.merge(old.best, score_Pnv, row_v)
  # The score of the tile itself, not of a product of its own: another rounding of the same score
  # would make probabilities above 1.
  row_Pn = row_Pn - first_row
  width = score_Pnv.shape[-1]
  near_Pn1 = jnp.clip(row_Pn, 0, width - 1)[..., None]
  found_Pn = jnp.take_along_axis(score_Pnv, near_Pn1, axis=-1)[..., 0]
  here_Pn = (row_Pn >= 0) & (row_Pn < width)
  # A stale column says -inf, which must not replace what its own tile has said.
  own_Pn = jnp.where(here_Pn, jnp.maximum(old.own, found_Pn), old.own)
  total_Pn = old.total * shrink_Pn + weight_Pnv.sum(axis=-1)
  return _Running(own_Pn, top_Pn, total_Pn, moment, score_sum, best)


def _reduced(mine, axis, rows):
  """The statistics of all devices of the axis, from those of each."""
  if axis is None:
    return mine
  top = lax.pmax(mine.top, axis)
  shift = jnp.where(jnp.isneginf(top), 0.0, top)
  step = jnp.where(jnp.isneginf(mine.top), 0.0, mine.top - shift)
  shrink = jnp.exp(step)
  moment = best = None
  if mine.moment is not None:
    moment = lax.psum((mine.moment + step * mine.total) * shrink, axis)
  if mine.best is not None:
    token = jnp.where(
      mine.best.tokens < 0, -1, mine.best.tokens + vocab_parallel.first_row(axis, rows)
    )
    best = topk.across_devices(topk.TopK(mine.best.scores, token), axis)
  return _Running(
    lax.pmax(mine.own, axis),
    top,
    lax.psum(mine.total * shrink, axis),
    moment,
    None if mine.score_sum is None else lax.psum(mine.score_sum, axis),
    best,
  )


def _pass_forward(plan, hidden, weight, bias, row):
  operands = tiles.Linear(hidden, weight, bias)
  layer, wanted = tiles.values(operands), tiles.perturbed(operands)
  found, (z, excess) = _forward(plan, layer, row.value)
  return found, (tiles.Static(wanted), layer, row.value, z, excess, found.top_token)


class _Pull(NamedTuple):
  """What the cotangent of a tile of scores is made of, for each token; None: nothing.

  Attributes:
    row: row of the token.
    z: normaliser.
    own: coefficient of the score of the token itself.
    prob: coefficient of the probabilities.
    entropy: cotangent of the entropy.
    excess: expected score above the top one.
    score_sum: cotangent of the sum of scores.
    best: the best tokens' rows.
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


def _pass_backward(plan, saved, cotangents):
  wanted, layer, row_PN, z, excess_PN, top_token_PNk = saved
  known = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
  own, log_z, entropy, score_sum, best_own, _ = known
  pull = _Pull(
    row_PN,
    z,
    own,
    _total(log_z, None if own is None else -own, None if best_own is None else -best_own.sum(-1)),
    entropy,
    None if entropy is None else excess_PN,
    score_sum,
    None
    if best_own is None
    else top_token_PNk
    - vocab_parallel.first_row(vocab_parallel.inside(plan.outputs.axis), layer.weight.count),
    best_own,
  )
  pull = vocab_parallel.varying((pull, layer))[0]
  if not tiles.wants(wanted.value) or all(x is None for x in known[:5]):
    return None, None, None, None
  (found,) = tiles.gradients(
    plan.cut, (plan.outputs.scoring,), (layer,), (wanted.value,), pull, _d_scores
  )
  return found.hidden, found.weight, found.bias, None


def _total(*terms):
  """The sum of what is there; None where nothing is."""
  there = [x for x in terms if x is not None]
  return functools.reduce(jnp.add, there) if there else None


def _d_scores(scores, row_v11, pull):
  """(onehot · own + p · prob + ...): the cotangent of each score of the tile."""
  (score_vPn,) = scores
  above_vPn = score_vPn - pull.z.top
  prob_vPn = jnp.exp(above_vPn - pull.z.log_sum)
  d_vPn = None
  if pull.own is not None:
    d_vPn = jnp.where(row_v11 == pull.row, pull.own, 0.0)
  if pull.prob is not None:
    d_vPn = _total(d_vPn, prob_vPn * pull.prob)
  if pull.entropy is not None:
    # dH/ds = -p (s - E[s]); a removed row says 0 · -inf.
    slope_vPn = jnp.where(jnp.isneginf(score_vPn), 0.0, prob_vPn * (pull.excess - above_vPn))
    d_vPn = _total(d_vPn, slope_vPn * pull.entropy)
  if pull.score_sum is not None:
    d_vPn = _total(d_vPn, jnp.where(jnp.isneginf(score_vPn), 0.0, pull.score_sum))
  if pull.best_own is not None:
    d_vPn = _add_best(d_vPn, pull, row_v11[0, 0, 0])
  return (d_vPn,)


def _add_best(d_vPn, pull, first_row):
  """Adds the coefficient of each of the best tokens where its row is."""
  height, parts, width = d_vPn.shape
  row_Pnk = pull.best - first_row
  # A negative index would count from the end.
  row_Pnk = jnp.where(row_Pnk < 0, height, row_Pnk)
  part_P11, token_n1 = jnp.arange(parts)[:, None, None], jnp.arange(width)[:, None]
  return d_vPn.at[row_Pnk, part_P11, token_n1].add(pull.best_own, mode="drop")


_pass.defvjp(_pass_forward, _pass_backward, symbolic_zeros=True)
