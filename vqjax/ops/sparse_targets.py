"""Losses against a few tokens of each distribution, without the logits of the others.

A teacher often gives only its k best tokens with their probabilities. The student's
log-probabilities of k tokens, and of all others together, come from one pass over tiles
(`vqjax.ops.tiles`): the k scores are read from the tiles where they are computed, so that neither
[N, V] scores nor [N, k, D] rows exist. What a loss makes of them is arithmetic on [N, k] numbers.
"""

# The k scores are read from the tile that has their rows (`_merge`), so that they are rounded as
# they are in the normaliser. With `rest` they are removed from the tile before its sum: what is
# summed is then the mass of the other tokens alone, exact where 1 - sum p_j would lose its digits.
#
#   tile of scores    own[k]  <- gathered at the k rows
#   [n, v]            total   <- sum of exp(score - top), of all rows or of the rest
#
# The gradient is the softmax's with k onehots instead of one; the rest has a softmax of its own.

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from vqjax.ops import distillation, precision, statistics, tiles, vocab_parallel
from vqjax.ops.distillation import SoftTargetLoss
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.scores import LogSum, ScoreOptions, exp_shift
from vqjax.ops.tiles import Linear
from vqjax.ops.vocabulary import (
  TokenWeight,
  check_arrays,
  check_given,
  check_numbers,
  in_vocabulary,
)
from vqjax.types import MeshAxes

__all__ = [
  "TokenLogProbs",
  "linear_sparse_target_loss",
  "linear_token_log_probs",
  "linear_top_k_divergence",
]

# What becomes of the tokens beside the k that are given: see `linear_sparse_target_loss`.
Rest = Literal["ignore", "bucket", "renormalize"]


class TokenLogProbs(NamedTuple):
  """Log-probabilities of k tokens of each distribution, float32, in nats.

  Attributes:
    log_probs: log-probability of each of the k tokens.
    log_rest: log-probability of all other tokens together, or None.
  """

  log_probs: Float[Array, "*B k"]
  log_rest: Float[Array, "*B"] | None


@vocab_parallel.for_any_axes("hidden")
def linear_token_log_probs(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  tokens: Integer[ArrayLike, "*B k"],
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  rest: bool = False,
  mask: Bool[ArrayLike, "*B"] | None = None,
  options: ScoreOptions = ScoreOptions(),
) -> TokenLogProbs:
  """Log-probabilities of k tokens under each softmax(hidden · weightᵀ + bias).

  The results are exact and differentiable, in reverse mode, in `hidden`, `weight` and `bias`. They
  take one pass over the vocabulary, whatever k is, and k reads of each tile.

  Args:
    hidden: one vector for each distribution.
    weight: one row for each token of the vocabulary.
    tokens: k indices into the vocabulary for each distribution; the log-probability of one outside
      of it is nan.
    bias: one number for each row.
    rest: whether to compute the log-probability of all other tokens. It is a sum over them, not 1
      minus the others, and so exact where it is small; the k tokens must then be distinct, apart
      from those outside of the vocabulary.
    mask: False for distributions that are left out: their results are 0, without a gradient.
    options: how scores are computed.

  Raises:
    ValueError: as `linear_softmax`.
  """
  counted = TokenWeight.of(hidden.shape[:-1], mask)
  layer = _layer(counted.hide(hidden), weight, tokens, bias, options)
  found, valid = _token_log_probs(layer, tokens, rest, kept=counted.kept)
  log_probs = jnp.where(valid, found.log_probs, jnp.nan)
  return counted.of_each(found._replace(log_probs=log_probs))


@vocab_parallel.for_any_axes("hidden")
def linear_sparse_target_loss(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  tokens: Integer[ArrayLike, "*B k"],
  probs: Float[ArrayLike, "*B k"],
  bias: Float[ArrayLike, "V"] | None = None,
  *,
  rest: Rest = "ignore",
  mask: Bool[ArrayLike, "*B"] | None = None,
  token_weight: Float[ArrayLike, "*B"] | None = None,
  options: ScoreOptions = ScoreOptions(),
) -> SoftTargetLoss:
  """Cross-entropy and KL divergence of a linear student from k given probabilities.

  With q_j the given probability of token j and p the student's distribution over the whole
  vocabulary, the losses are -sum_j q_j log p_j and sum_j q_j (log q_j - log p_j). The k
  probabilities of a teacher usually sum to less than 1; `rest` says what the missing mass does:

    "ignore":       nothing: the sums run over the k tokens with q as it is. The divergence is then
                    a part of the whole one, and may be negative.
    "bucket":       all other tokens are one more outcome, of probability 1 - sum_j q_j (at least
                    0) under the teacher. The divergence is at most the one over all tokens.
    "renormalize":  both distributions are restricted to the k tokens: q / sum_j q_j against
                    p / sum_j p_j. The student's scores of other tokens have no gradient.

  Several targets of one hidden vector, as in multi-token prediction, are "ignore" with the share of
  each as its probability, 0 where a text ends: they share scores, normaliser and products.

  For renormalised targets against the whole distribution of the student, divide `probs` by their
  sum and use "ignore". A probability of 0 marks an unused entry, whose token may be any number and
  belongs to the others; an entry of another probability outside of the vocabulary makes the losses
  nan.

  The losses are differentiable, in reverse mode, in `probs` too.

  Args:
    hidden: one vector for each distribution.
    weight: one row for each token of the vocabulary.
    tokens: k tokens for each distribution, in any order; with "ignore" they may repeat.
    probs: probability of each of them under the teacher.
    bias: one number for each row.
    rest: what becomes of the mass of all other tokens.
    mask: False for distributions that are left out: their losses are 0 and have no gradient,
      whatever their arrays hold.
    token_weight: factor of each distribution's losses; one of weight 0 is left out.
    options: how the student's scores are computed; `probs` are used as they are.

  Raises:
    ValueError: as `linear_softmax`, `probs` has another shape than `tokens`, or `rest` is unknown.
  """
  check_given(hidden=hidden, tokens=tokens, probs=probs)
  check_arrays(mask=mask, token_weight=token_weight)
  _check_rest(rest)
  if probs.shape != tokens.shape:
    raise ValueError(
      f"`probs` must have the shape {tokens.shape} of `tokens`; got {probs.shape}. Give one"
      " probability for each of the k tokens."
    )
  counted = TokenWeight.of(hidden.shape[:-1], mask, token_weight)
  hidden, probs = counted.hide(hidden), counted.hide(probs.astype(jnp.float32))
  tokens = counted.hide(tokens)
  used = probs > 0
  layer = _layer(hidden, weight, tokens, bias, options)
  student, valid = _token_log_probs(layer, tokens, rest == "bucket", used, counted.kept)
  log_p = _outcomes(rest, student)
  if rest == "bucket":
    missing = 1 - probs.sum(-1, keepdims=True)
    # What rounding leaves of a whole distribution is not mass of other tokens.
    missing = jnp.where(missing > probs.shape[-1] * 2.0**-24, missing, 0.0)
    probs = jnp.concatenate([probs, missing], axis=-1)
  elif rest == "renormalize":
    total = probs.sum(-1, keepdims=True)
    probs = probs / jnp.where(total > 0, total, 1)
  # Two `where`: a log-probability of -inf and log 0 have no gradient where there is no mass.
  has_mass = probs > 0
  log_p = jnp.where(has_mass, log_p, 0.0)
  log_q = jnp.log(jnp.where(has_mass, probs, 1.0))
  loss = SoftTargetLoss(-(probs * log_p).sum(-1), (probs * (log_q - log_p)).sum(-1))
  known = (valid | ~used).all(axis=-1)
  return counted.of_each(jax.tree.map(lambda x: jnp.where(known, x, jnp.nan), loss))


@vocab_parallel.for_any_axes("hidden")
def linear_top_k_divergence(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  teacher_hidden: Float[ArrayLike, "*B E"],
  teacher_weight: Float[ArrayLike, "V E"] | RowFactory,
  bias: Float[ArrayLike, "V"] | None = None,
  teacher_bias: Float[ArrayLike, "V"] | None = None,
  *,
  k: int,
  rest: Rest = "bucket",
  mixture: float | int | None = 0.0,
  mask: Bool[ArrayLike, "*B"] | None = None,
  token_weight: Float[ArrayLike, "*B"] | None = None,
  teacher_softcap: float | int | None = None,
  options: ScoreOptions = ScoreOptions(),
) -> Float[Array, "*B"]:
  """Divergence of a linear student from a linear teacher on the teacher's k best tokens.

  The divergence is that of `linear_divergence` between distributions over the k tokens that the
  teacher finds most probable, with `rest` as in `linear_sparse_target_loss`. It is differentiable,
  in reverse mode, in all six arrays, the choice of the k tokens apart.

  All other arguments are those of `linear_soft_target_loss`.

  Args:
    k: number of tokens, 1 to 128.
    rest: what becomes of the mass of all other tokens. "bucket" takes a second pass over the
      teacher.
    mixture: 0 for the forward divergence, 1 for the reverse one, between them the weight of the
      teacher in the generalised Jensen-Shannon divergence, with "ignore" a part of the sum; None
      for the total variation.

  Raises:
    ValueError: as `linear_soft_target_loss`, `k` is below 1 or above 128 or the number of rows,
      `mixture` is outside [0, 1], or `rest` is unknown.
  """
  _check_rest(rest)
  distillation.check_mixture(mixture)
  check_numbers(k=k)
  student, teacher = distillation.layers_of(
    distillation.Side("", hidden, weight, bias, options.softcap),
    distillation.Side("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_softcap),
    options,
  )
  if not 1 <= k <= min(128, teacher.vocab):
    raise ValueError(
      f"`k` must be in [1, {min(128, teacher.vocab)}] for a vocabulary of {teacher.vocab}; got {k}."
      " 64 is usual."
    )
  counted = TokenWeight.of(hidden.shape[:-1], mask, token_weight)
  student, teacher = (
    dataclasses.replace(x, hidden=counted.hide(x.hidden)) for x in (student, teacher)
  )
  # The log-probability of a token, some token, is computed with those of the best.
  compute = functools.partial(statistics.distribution, statistics.Outputs(top_k=k))
  some = jnp.zeros(hidden.shape[:-1], jnp.int32)
  best = tiles.on_each_device((teacher,), some, compute, counted.kept)
  with_rest, of_teacher = rest == "bucket", TokenLogProbs(best.top_log_probs, None)
  if with_rest:
    of_teacher, _ = _token_log_probs(teacher, best.top_tokens, with_rest, kept=counted.kept)
  of_student, _ = _token_log_probs(student, best.top_tokens, with_rest, kept=counted.kept)
  log_p, log_q = _outcomes(rest, of_student), _outcomes(rest, of_teacher)
  return counted.of_each(_divergence(mixture, log_p, log_q))


def _outcomes(rest, found):
  """Log-probabilities [*B, k or k + 1] of the outcomes that a loss compares."""
  if rest == "bucket":
    return jnp.concatenate([found.log_probs, found.log_rest[..., None]], axis=-1)
  if rest == "renormalize":
    # Where none of the k tokens exists there is nothing to normalise, and -inf - (-inf) is nan.
    exists = ~jnp.isneginf(found.log_probs).all(axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(exists, found.log_probs, 0.0))
  return found.log_probs


def _divergence(mixture, log_p, log_q):
  """Divergence between the outcomes of the last axis, as `linear_divergence` defines it."""
  if mixture == 1:
    # The reverse divergence is the forward one with the sides exchanged.
    mixture, log_p, log_q = 0, log_q, log_p
  in_p, in_q = ~jnp.isneginf(log_p), ~jnp.isneginf(log_q)
  # Two `where`: no gradient may pass through log 0, not even times 0.
  log_p, log_q = jnp.where(in_p, log_p, 0.0), jnp.where(in_q, log_q, 0.0)
  p, q = jnp.where(in_p, jnp.exp(log_p), 0.0), jnp.where(in_q, jnp.exp(log_q), 0.0)
  if mixture is None:
    return jnp.abs(p - q).sum(axis=-1) / 2
  if mixture == 0:
    return jnp.where(in_q & ~in_p, jnp.inf, q * (log_q - log_p)).sum(axis=-1)
  p_ratio, q_ratio = distillation.log_ratios_to_mixture(mixture, log_p, log_q)
  # m is w q where p is 0, and (1 - w) p where q is 0.
  p_ratio = jnp.where(in_q, p_ratio, -math.log1p(-mixture))
  q_ratio = jnp.where(in_p, q_ratio, -math.log(mixture))
  return ((1 - mixture) * p * p_ratio + mixture * q * q_ratio).sum(axis=-1)


def _check_rest(rest):
  if rest not in ("ignore", "bucket", "renormalize"):
    raise ValueError(
      f'`rest` must be "ignore", "bucket" or "renormalize"; got {rest!r}. "bucket" keeps the mass'
      " of all other tokens as one outcome."
    )


# Row of a token outside of the vocabulary, below the first row of any device.
_ABSENT = -(2**30)


def _layer(hidden, weight, tokens, bias, options) -> Linear:
  """The layer, whose distributions have k tokens each."""
  check_given(hidden=hidden, tokens=tokens)
  batch = hidden.shape[:-1]
  if tokens.ndim != hidden.ndim or tokens.shape[:-1] != batch or tokens.shape[-1] < 1:
    raise ValueError(
      f"`tokens` must be {(*batch, 'k')} for `hidden` {hidden.shape}, with k at least 1; got"
      f" {tokens.shape}. Give the k tokens of each distribution."
    )
  return Linear.of(hidden, weight, bias, options)


def _token_log_probs(layer, tokens, rest, used=True, kept=None):
  """The log-probabilities, -inf for unused tokens and those outside, and a mask of the others."""
  valid, token = in_vocabulary(tokens, layer.vocab)
  valid &= used

  def body(cut, layers, row_PNk):
    (layer,) = layers
    axis = vocab_parallel.inside(layer.options.vocab_axis)
    return _pass(_Plan(cut, axis, rest), layer, row_PNk)

  found = tiles.on_each_device((layer,), jnp.where(valid, token, _ABSENT), body, kept)
  return found._replace(log_probs=jnp.where(valid, found.log_probs, -jnp.inf)), valid


class _Plan(NamedTuple):
  """Static description of a pass: see `linear_token_log_probs` for `rest`."""

  cut: tiles.Cut
  axis: MeshAxes | None
  rest: bool


class _Running(NamedTuple):
  """Statistics of the scores that were merged.

  Attributes:
    own: scores of the k tokens, -inf before their tiles.
    top: the largest score, of the rest alone if that is computed.
    total: sum of exp(score - top) over the scores that `top` is the largest of.
  """

  own: Array
  top: Array
  total: Array


# JAX's own gradient of the scans would store the scores of all tiles, [N, V].
@precision.custom_vjp
def _pass(plan, layer, row_PNk):
  return _pass_forward(plan, layer, row_PNk)[0]


def _pass_forward(plan, layer, row_PNk):
  lowest_PN = jnp.full(row_PNk.shape[:2], -jnp.inf, jnp.float32)
  lowest_PNk = jnp.full(row_PNk.shape, -jnp.inf, jnp.float32)
  start = _Running(own=lowest_PNk, top=lowest_PN, total=jnp.zeros_like(lowest_PN))
  merge = functools.partial(_merge, plan.rest)
  own_PNk, top_PN, total_PN = tiles.fold(plan.cut, (layer,), row_PNk, start, merge)
  if plan.axis:
    local, top_PN = top_PN, lax.pmax(top_PN, plan.axis)
    total_PN = lax.psum(total_PN * jnp.exp(local - exp_shift(top_PN)), plan.axis)
    own_PNk = lax.pmax(own_PNk, plan.axis)
  rest = LogSum(top_PN, jnp.log(total_PN)) if plan.rest else None
  if plan.rest:
    # What was summed are the other tokens: the normaliser has the k tokens in addition.
    rest_top_PN, top_PN = top_PN, jnp.maximum(top_PN, own_PNk.max(axis=-1))
    total_PN = total_PN * jnp.exp(rest_top_PN - exp_shift(top_PN))
    total_PN += jnp.exp(own_PNk - exp_shift(top_PN)[..., None]).sum(axis=-1)
  z = LogSum(top_PN, jnp.log(total_PN))
  found = TokenLogProbs(
    # In this order: own - log Z would lose digits where both are large.
    log_probs=(own_PNk - z.top[..., None]) - z.log_sum[..., None],
    log_rest=(
      jnp.minimum(((rest.top - z.top) - z.log_sum) + rest.log_sum, 0.0) if plan.rest else None
    ),
  )
  return found, (layer, row_PNk, own_PNk, z, rest)


def _merge(rest, old, scores, first_row, row_Pnk):
  """The statistics with a tile's scores added."""
  (score_Pnv,) = scores
  width, index_Pnk = score_Pnv.shape[-1], row_Pnk - first_row
  is_here_Pnk = (index_Pnk >= 0) & (index_Pnk < width)
  # From the tile, so that a score is rounded as it is in the normaliser: no probability exceeds 1.
  own_Pnk = jnp.take_along_axis(score_Pnv, jnp.clip(index_Pnk, 0, width - 1), axis=-1)
  # The maximum, for a column that overlaps the tile before has score -inf in this one.
  own_Pnk = jnp.where(is_here_Pnk, jnp.maximum(old.own, own_Pnk), old.own)
  if rest:
    remove = lambda score_v, index_k: score_v.at[index_k].set(-jnp.inf, mode="drop")
    # `drop` ignores an index beyond the end, but a negative one counts from the end.
    score_Pnv = jax.vmap(jax.vmap(remove))(score_Pnv, jnp.where(is_here_Pnk, index_Pnk, width))
  top_Pn = jnp.maximum(old.top, score_Pnv.max(axis=-1))
  shift_Pn = exp_shift(top_Pn)
  # exp(-inf - shift) is 0 where nothing was merged before.
  total_Pn = old.total * jnp.exp(old.top - shift_Pn)
  total_Pn += jnp.exp(score_Pnv - shift_Pn[..., None]).sum(axis=-1)
  return _Running(own=own_Pnk, top=top_Pn, total=total_Pn)


class _Cotangents(NamedTuple):
  """Per-token values that the cotangents of the scores are computed from.

  Attributes:
    row: rows of the k tokens.
    own: coefficients of their scores.
    z: normaliser.
    prob: coefficient of the probabilities.
    rest: log-sum of the rest, or None.
    share: coefficient of the probabilities within the rest, or None.
  """

  row: Array
  own: Array
  z: LogSum
  prob: Array
  rest: LogSum | None
  share: Array | None


def _pass_backward(plan, residuals, cotangents):
  layer, row_PNk, own_PNk, z, rest = residuals
  # d log p_j = onehot_j - p, and d log p(rest) = share within the rest - p.
  own, prob, share = cotangents.log_probs, -cotangents.log_probs.sum(axis=-1), None
  if plan.rest:
    # A rest without tokens has no share to give.
    share = jnp.where(jnp.isneginf(rest.top), 0.0, cotangents.log_rest)
    rest = rest._replace(
      top=exp_shift(rest.top), log_sum=jnp.where(jnp.isneginf(rest.top), 0.0, rest.log_sum)
    )
    prob -= cotangents.log_rest
    # The rule gives the k tokens a share of the rest as well: their own coefficient removes it.
    own -= _share(own_PNk, jax.tree.map(lambda x: x[..., None], rest)) * share[..., None]
  given = _Cotangents(row=row_PNk, own=own, z=z, prob=prob, rest=rest, share=share)
  given = vocab_parallel.varying((given, layer))[0]
  (gradient,) = tiles.gradients(plan.cut, (layer,), given, _d_scores)
  return gradient, None


def _share(score, rest):
  """exp(score) over the sum of the rest; at most 1, for scores outside of the rest too."""
  return jnp.exp(jnp.minimum((score - rest.top) - rest.log_sum, 0.0))


def _d_scores(scores, row_v11, given):
  """Cotangent of each score of the tile: onehots · own + p · prob + share of the rest."""
  (score_vPn,) = scores
  d_vPn = jnp.exp((score_vPn - given.z.top) - given.z.log_sum) * given.prob
  if given.rest is not None:
    d_vPn += _share(score_vPn, given.rest) * given.share
  return (statistics.add_at_rows(d_vPn, given.row - row_v11[0, 0, 0], given.own),)


_pass.defvjp(*map(vocab_parallel.own_promotion, (_pass_forward, _pass_backward)))
