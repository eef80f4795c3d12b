"""Distillation losses between two softmaxes, without the logits of either.

A student distribution p = softmax(s) is compared with a teacher distribution q = softmax(t) over
one vocabulary. Only [N]-sized sums survive from one part of the vocabulary to the next; they are
then reduced over the devices of the vocabulary's mesh axis.

`linear_soft_target_loss` and `linear_divergence` score both layers tile by tile
(`vqjax.ops.tiles`). Each takes one pass, in which the sums are kept relative to running maxima; a
mixture of both distributions, which needs their normalisers first, takes a second one. The
gradients come from one more pass that recomputes the scores, with a rule for the cotangents of both
layers' scores in a tile: 4NV(D + E) floating-point operations for a pass, and as many again for
each gradient that is computed. `block_soft_target_loss` takes the student's scores as `Blocks` in
any order of tokens, and gathers the teacher's rows.
"""

# Both layers are scored in the same tile, s of the student and t of the teacher:
#
#   layers_of -> on_each_device -> _pass:
#     fold with `_add_block`    sums of exp(s), exp(t), exp(t) · s and exp(t) · t, less the maxima
#     `_all_reduce`             over the devices, whose maxima differ
#     `_finish`                 KL and cross-entropy are quotients of these sums: one pass
#     mixture                   m = w q + (1 - w) p needs both normalisers first: a second fold
#     gradients                 with the rule `_d_soft_targets` or `_d_mixture`
#
# The losses from blocks add the same sums, and differentiate them by JAX, one block at a time.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from vqjax.ops import precision, sampling, softmax, tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory
from vqjax.ops.sampling import Blocks
from vqjax.ops.scores import ScoreOptions, check_softcap, exp_shift
from vqjax.ops.tiles import Linear
from vqjax.ops.vocabulary import TokenWeight, check_given, check_numbers
from vqjax.types import Dtype, MeshAxes

__all__ = [
  "Readings",
  "SoftTargetLoss",
  "block_soft_target_loss",
  "linear_divergence",
  "linear_soft_target_loss",
]


class SoftTargetLoss(NamedTuple):
  """Losses of a student p against a teacher q, float32, in nats.

  Attributes:
    cross_entropy: -sum_v q_v log p_v.
    kl: sum_v q_v (log q_v - log p_v): the cross-entropy minus the entropy of q.
  """

  cross_entropy: Float[Array, "*B"]
  kl: Float[Array, "*B"]


@vocab_parallel.for_any_axes("hidden")
def linear_soft_target_loss(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  teacher_hidden: Float[ArrayLike, "*B E"],
  teacher_weight: Float[ArrayLike, "V E"] | RowFactory,
  bias: Float[ArrayLike, "V"] | None = None,
  teacher_bias: Float[ArrayLike, "V"] | None = None,
  *,
  mask: Bool[ArrayLike, "*B"] | None = None,
  token_weight: Float[ArrayLike, "*B"] | None = None,
  teacher_softcap: float | int | None = None,
  options: ScoreOptions = ScoreOptions(),
) -> SoftTargetLoss:
  """Cross-entropy and KL divergence of a linear student from a linear teacher.

  Both distributions are those of `linear_softmax`, their scores divided by the temperature. The
  losses are exact and differentiable, in reverse mode, in all six arrays. A teacher under
  `jax.lax.stop_gradient`, or one that is not differentiated, costs only its scores. Distillation at
  a temperature T usually multiplies the loss by T²; that is left to the caller. A row that a bias
  of -inf removes from the student but not from the teacher makes the loss infinite.

  Args:
    hidden: hidden vectors of the student.
    weight: rows of the student, [V, D] or a `RowFactory` that composes them a tile at a time.
    teacher_hidden: hidden vectors of the teacher, of its own width E.
    teacher_weight: rows of the teacher.
    bias: bias of the student's scores.
    teacher_bias: bias of the teacher's scores.
    mask: False for tokens that are left out: their losses are 0 and have no gradient, whatever
      their hidden vectors hold.
    token_weight: factor of each token's losses; a token of weight 0 is left out.
    teacher_softcap: largest absolute score of the teacher.
    options: how the student's scores are computed, and but for the cap the teacher's.

  Raises:
    ValueError: the shapes do not fit together, `teacher_softcap` is not positive and finite, or the
      mesh has no axis `vocab_axis`.
    TypeError: an operand is not an array, or `teacher_softcap` is not a Python number.
  """
  student = Side("", hidden, weight, bias, options.softcap)
  teacher = Side("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_softcap)
  layers = layers_of(student, teacher, options)
  return _compare(0, layers, TokenWeight.of(hidden.shape[:-1], mask, token_weight))


@vocab_parallel.for_any_axes("hidden")
def linear_divergence(
  hidden: Float[ArrayLike, "*B D"],
  weight: Float[ArrayLike, "V D"] | RowFactory,
  teacher_hidden: Float[ArrayLike, "*B E"],
  teacher_weight: Float[ArrayLike, "V E"] | RowFactory,
  bias: Float[ArrayLike, "V"] | None = None,
  teacher_bias: Float[ArrayLike, "V"] | None = None,
  *,
  mixture: float | int | None = 0.5,
  mask: Bool[ArrayLike, "*B"] | None = None,
  token_weight: Float[ArrayLike, "*B"] | None = None,
  teacher_softcap: float | int | None = None,
  options: ScoreOptions = ScoreOptions(),
) -> Float[Array, "*B"]:
  """Forward KL, reverse KL or Jensen-Shannon divergence in nats, or total variation.

  With p of the student, q of the teacher, w = `mixture` and m = w q + (1 - w) p:

    w = 0:      KL(q, p) = sum_v q_v (log q_v - log p_v), the forward divergence;
    w = 1:      KL(p, q), the reverse divergence, which prefers few modes of the teacher;
    otherwise:  w KL(q, m) + (1 - w) KL(p, m), the generalised Jensen-Shannon divergence;
    w = None:   sum_v |q_v - p_v| / 2, the total variation distance, which has no mixture.

  The third, divided by w, tends to the first as w tends to 0, and likewise at the other end; it is
  at most -w log w - (1 - w) log(1 - w), and finite where a bias of -inf removes a row from one side
  alone. The result is exact and differentiable, in reverse mode, in all six arrays. The mixture
  and the variation take one more pass than the others. Source: Agarwal et al. (2024), On-policy
  distillation of language models, whose D_JSD(β) this is with β = w.

  All other arguments are those of `linear_soft_target_loss`.

  Args:
    mixture: weight w of the teacher in the mixture, in [0, 1], a Python number; None for the total
      variation.

  Raises:
    ValueError: as `linear_soft_target_loss`, or `mixture` is outside [0, 1].
    TypeError: as `linear_soft_target_loss`.
  """
  check_mixture(mixture)
  student = Side("", hidden, weight, bias, options.softcap)
  teacher = Side("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_softcap)
  layers = layers_of(student, teacher, options)
  counted = TokenWeight.of(hidden.shape[:-1], mask, token_weight)
  if mixture == 0:
    return _compare(0, layers, counted).kl
  if mixture == 1:
    # The reverse divergence is the forward one with the sides exchanged.
    return _compare(0, layers[::-1], counted).kl
  return _compare(None if mixture is None else float(mixture), layers, counted)


class Side(NamedTuple):
  """One of the two layers, and the prefix of its arguments' names."""

  prefix: str
  hidden: Array
  weight: Array | RowFactory
  bias: Array | None
  softcap: float | int | None


def layers_of(student: Side, teacher: Side, options: ScoreOptions) -> tuple[Linear, Linear]:
  """The layers of both sides, whose options differ in the cap and the operands' dtype.

  Raises:
    ValueError: the layers are of different tokens or vocabularies, or as `Linear.of`.
    TypeError: as `Linear.of`.
  """
  for side in (student, teacher):
    check_given(**{f"{side.prefix}hidden": side.hidden})
  if student.hidden.shape[:-1] != teacher.hidden.shape[:-1]:
    raise ValueError(
      f"`teacher_hidden` must have the leading axes of `hidden` {student.hidden.shape}; got"
      f" {teacher.hidden.shape}. Give both for the same tokens."
    )
  check_softcap(teacher.softcap, "teacher_softcap")
  layers = []
  for side in (student, teacher):
    own = dataclasses.replace(options, softcap=side.softcap)
    layers.append(Linear.of(side.hidden, side.weight, side.bias, own, prefix=side.prefix))
  rows, teacher_rows = (layer.weight.shape for layer in layers)
  if rows[0] != teacher_rows[0]:
    raise ValueError(
      f"`teacher_weight` must have a row for each of the {rows[0]} rows of `weight`; got"
      f" {teacher_rows}. Give both over one vocabulary."
    )
  return tuple(layers)


def _compare(mixture, layers, counted):
  """The losses [*B] of two layers, student and teacher: see `_Plan.mixture`."""
  layers = tuple(dataclasses.replace(x, hidden=counted.hide(x.hidden)) for x in layers)

  def body(cut, layers, _):
    axis = vocab_parallel.inside(layers[0].options.vocab_axis)
    return _pass(_Plan(cut, axis, mixture), *layers)

  return counted.of_each(tiles.on_each_device(layers, None, body, counted.kept))


def block_soft_target_loss(
  blocks: Blocks,
  teacher_hidden: Float[Array, "*B E"],
  teacher_weight: Float[Array, "V E"] | RowFactory,
  teacher_bias: Float[Array, "V"] | None = None,
  *,
  mask: Bool[Array, "*B"] | None = None,
  token_weight: Float[Array, "*B"] | None = None,
  temperature: float | int = 1.0,
  teacher_softcap: float | int | None = None,
  dtype: Dtype | None = None,
) -> SoftTargetLoss:
  """Cross-entropy and KL divergence of a student in blocks from a linear teacher.

  The losses are exact and differentiable, in reverse mode, in the arrays that the blocks are
  computed from; the teacher has no gradient. The gradient computes each block once more instead of
  keeping it. A token that the student scores -inf cannot be distinguished from padding of a block,
  and is left out of both distributions.

  Args:
    blocks: the student's scores; inside of a mesh axis each device has its own blocks.
    teacher_hidden: hidden vectors of the teacher, one for each row of the blocks.
    teacher_weight: all rows of the teacher, on every device.
    teacher_bias: bias of the teacher's scores.
    mask: False for tokens that are left out: their losses are 0 and have no gradient. The blocks
      must score them finitely; give their hidden vectors as zeros.
    token_weight: factor of each token's losses; a token of weight 0 is left out.
    temperature: divides the scores of both, after the cap.
    teacher_softcap: largest absolute score of the teacher.
    dtype: dtype of the operands of the teacher's matrix product; None: their promoted dtype.

  Raises:
    ValueError: the shapes do not fit together, or `temperature` or the cap is not positive and
      finite.
    TypeError: an operand is not an array, or an option not a Python number.
  """
  check_softcap(teacher_softcap, "teacher_softcap")
  options = ScoreOptions(temperature=temperature, softcap=teacher_softcap, dtype=dtype)
  teacher = Linear.of(teacher_hidden, teacher_weight, teacher_bias, options, prefix="teacher_")
  if teacher_hidden.shape[:-1] != tuple(blocks.batch):
    raise ValueError(
      f"`teacher_hidden` must have the leading axes {tuple(blocks.batch)} of `blocks`; got"
      f" {teacher_hidden.shape}. Give both for the same tokens."
    )
  counted = TokenWeight.of(tuple(blocks.batch), mask, token_weight)
  teacher = dataclasses.replace(teacher, hidden=counted.hide(teacher_hidden))
  teacher = lax.stop_gradient(teacher)

  def step(sums, index):
    score_WB, token_W = blocks.block(index)
    score_BW = jnp.moveaxis(score_WB, 0, -1)
    bias_W = None if teacher.bias is None else teacher.bias[token_W]
    row_WE = teacher.weight.at(token_W)
    teacher_BW = softmax.linear_scores(teacher.hidden, row_WE, bias_W, dtype, teacher_softcap)
    score_BW = score_BW.astype(jnp.float32)
    # Padding names some token that another block holds: the teacher must not count it twice.
    teacher_BW = jnp.where(jnp.isneginf(score_BW), -jnp.inf, teacher_BW)
    return _add_block(sums, score_BW / temperature, teacher_BW / temperature)

  sums = sampling.summed(blocks, step, _zero_sums(blocks.batch), _emptied)
  return counted.of_each(_finish(_all_reduce(sums, blocks.axis)))


def divergence_from_last(blocks: Blocks) -> Float[Array, "L *B"]:
  """KL(q, p) in nats of each of L rows of distributions p from a last row, q.

  It is differentiable in reverse mode, in both; the gradient computes each block once more.

  Args:
    blocks: scores with leading axes [L + 1, *B].
  """

  def step(sums, index):
    score_WLB = blocks.block(index)[0].astype(jnp.float32)
    score_LBW = jnp.moveaxis(score_WLB, 0, -1)
    own_LBW, last_LBW = score_LBW[:-1], score_LBW[-1:]
    return _add_block(sums, own_LBW, jnp.broadcast_to(last_LBW, own_LBW.shape))

  shape = (blocks.batch[0] - 1, *blocks.batch[1:])
  sums = sampling.summed(blocks, step, _zero_sums(shape), _emptied)
  return _finish(_all_reduce(sums, blocks.axis)).kl


class Readings(NamedTuple):
  """Distributions of S layers at positions *B, and their distances from that of the last layer.

  Attributes:
    tokens: the k most likely tokens, best first.
    log_probs: their log-probabilities, in nats.
    entropy: of each distribution, in nats.
    target_log_prob: log-probability of the token that follows, in nats; -inf for a target outside
      the vocabulary.
    kl: KL(last, layer) = sum_v q_v (log q_v - log p_v) of the last layer's q, in nats.
    total_variation: sum_v |q_v - p_v| / 2.
    rank: 1 + the number of tokens that are more likely than the last layer's best one.
  """

  tokens: Int[Array, "S *B k"]
  log_probs: Float[Array, "S *B k"]
  entropy: Float[Array, "S *B"]
  target_log_prob: Float[Array, "S *B"]
  kl: Float[Array, "S *B"]
  total_variation: Float[Array, "S *B"]
  rank: Int[Array, "S *B"]


def readings(blocks: Blocks, targets: Int[Array, "*B"], k: int) -> Readings:
  """What the layers predict, without an array [S, *B, V].

  The blocks are computed three times: for the normalisers and the best tokens, for the scores of
  single tokens, and for the sums of the normalised distributions.

  Args:
    blocks: scores with leading axes [S, *B], the last layer's last.
    targets: the token that follows each position.
    k: number of best tokens, in [1, V].
  """
  score_SBk, token_SBk, log_z_SB = sampling.best(blocks, k)
  wanted_2B = jnp.stack((targets, token_SBk[-1, ..., 0]))

  def find(found_2SB, index):
    score_WSB, token_W = blocks.block(index)
    is_wanted_W2B = token_W.reshape(-1, *[1] * wanted_2B.ndim) == wanted_2B
    # Padding names some token that another block holds, and scores -inf.
    score_W2SB = jnp.where(is_wanted_W2B[:, :, None], score_WSB[:, None], -jnp.inf)
    return jnp.maximum(found_2SB, score_W2SB.max(axis=0).astype(jnp.float32))

  least_2SB = jnp.full((2, *blocks.batch), -jnp.inf, jnp.float32)
  found_2SB = blocks.fold(find, least_2SB)
  if blocks.axis is not None:
    found_2SB = lax.pmax(found_2SB, blocks.axis)
  target_SB, best_SB = found_2SB

  def add(sums, index):
    score_WSB = blocks.block(index)[0].astype(jnp.float32)
    log_p_WSB = score_WSB - log_z_SB
    p_WSB, log_q_W1B = jnp.exp(log_p_WSB), log_p_WSB[:, -1:]
    q_W1B = jnp.exp(log_q_W1B)
    expected = lambda mass, value: jnp.where(mass == 0, 0.0, mass * value).sum(axis=0)
    terms = (
      -expected(p_WSB, log_p_WSB),
      expected(q_W1B, log_q_W1B - log_p_WSB),
      jnp.abs(q_W1B - p_WSB).sum(axis=0) / 2,
      (score_WSB > best_SB).sum(axis=0),
    )
    return tuple(total + term for total, term in zip(sums, terms))

  zero_SB = jnp.zeros(blocks.batch, jnp.float32)
  sums = blocks.fold(add, (zero_SB, zero_SB, zero_SB, jnp.zeros(blocks.batch, jnp.int32)))
  if blocks.axis is not None:
    sums = lax.psum(sums, blocks.axis)
  entropy_SB, kl_SB, variation_SB, above_SB = sums
  return Readings(
    tokens=token_SBk,
    log_probs=score_SBk - log_z_SB[..., None],
    entropy=entropy_SB,
    target_log_prob=target_SB - log_z_SB,
    kl=kl_SB,
    total_variation=variation_SB,
    rank=1 + above_SB,
  )


def check_mixture(mixture: float | int | None) -> None:
  """Raise an error unless a weight of the teacher is a number in [0, 1] or None."""
  if mixture is None:
    return
  check_numbers(mixture=mixture)
  if not 0 <= mixture <= 1:
    raise ValueError(
      f"`mixture` must be in [0, 1]; got {mixture}. Give 0 for the forward KL divergence, 1 for the"
      " reverse one, 0.5 for the Jensen-Shannon divergence, or None for the total variation."
    )


class _Sums(NamedTuple):
  """Sums of student scores s and teacher scores t over some of the vocabulary.

  Attributes:
    top: largest s.
    total: sum of exp(s - top).
    teacher_top: largest t.
    teacher_total: sum of exp(t - teacher_top).
    cross: sum of exp(t - teacher_top) · (s - top).
    moment: sum of exp(t - teacher_top) · (t - teacher_top).
  """

  top: Array
  total: Array
  teacher_top: Array
  teacher_total: Array
  cross: Array
  moment: Array


def _zero_sums(batch):
  zero = jnp.zeros(batch, jnp.float32)
  lowest = jnp.full_like(zero, -jnp.inf)
  return _Sums(
    top=lowest, total=zero, teacher_top=lowest, teacher_total=zero, cross=zero, moment=zero
  )


def _emptied(sums):
  """Sums of nothing, relative to the maxima of others."""
  zero = jnp.zeros_like(sums.total)
  return sums._replace(total=zero, teacher_total=zero, cross=zero, moment=zero)


def _add_block(old: _Sums, s: Float[Array, "*B W"], t: Float[Array, "*B W"]) -> _Sums:
  """The sums with a block of scores added."""
  # The losses do not depend on the maxima, so no gradient has to pass through them.
  highest = lambda scores: lax.stop_gradient(scores).max(axis=-1)
  top = jnp.maximum(old.top, highest(s))
  teacher_top = jnp.maximum(old.teacher_top, highest(t))
  moved = _relative_to(old, top, teacher_top)
  s_above, t_above = s - exp_shift(top)[..., None], t - exp_shift(teacher_top)[..., None]
  mass = jnp.exp(t_above)
  # Where the teacher has no mass a student score of -inf must not make the sum nan.
  # Before the product, for the second derivative: 0 · -inf in a branch that is not taken.
  expected = lambda above: (mass * jnp.where(mass == 0, 0.0, above)).sum(axis=-1)
  return _Sums(
    top=top,
    total=moved.total + jnp.exp(s_above).sum(axis=-1),
    teacher_top=teacher_top,
    teacher_total=moved.teacher_total + mass.sum(axis=-1),
    cross=moved.cross + expected(s_above),
    moment=moved.moment + expected(t_above),
  )


def _relative_to(old, top, teacher_top):
  """The sums relative to higher maxima."""
  # Nothing has been added under a maximum of -inf, so the sums there are 0 and need no step.
  step = jnp.where(jnp.isneginf(old.top), 0.0, old.top - exp_shift(top))
  teacher_step = jnp.where(
    jnp.isneginf(old.teacher_top), 0.0, old.teacher_top - exp_shift(teacher_top)
  )
  shrink = jnp.exp(teacher_step)
  return _Sums(
    top=top,
    total=old.total * jnp.exp(step),
    teacher_top=teacher_top,
    teacher_total=old.teacher_total * shrink,
    # s - top becomes s - top + step for each of the terms, whose masses add up to teacher_total.
    # A student score of -inf makes `cross` infinite, and -inf · 0 is nan.
    cross=jnp.where(shrink == 0, 0.0, old.cross + step * old.teacher_total) * shrink,
    moment=(old.moment + teacher_step * old.teacher_total) * shrink,
  )


def _all_reduce(local, axis):
  """The sums over all devices of a manual mesh axis."""
  if axis is None:
    return local
  top, teacher_top = (vocab_parallel.common_shift(x, axis) for x in (local.top, local.teacher_top))
  moved = _relative_to(local, top, teacher_top)
  total = lambda x: lax.psum(x, axis)
  return moved._replace(
    total=total(moved.total),
    teacher_total=total(moved.teacher_total),
    cross=total(moved.cross),
    moment=total(moved.moment),
  )


def _finish(sums):
  """The losses, from the sums over the whole vocabulary."""
  cross_entropy = jnp.log(sums.total) - sums.cross / sums.teacher_total
  entropy = jnp.log(sums.teacher_total) - sums.moment / sums.teacher_total
  return SoftTargetLoss(cross_entropy, cross_entropy - entropy)


class _Plan(NamedTuple):
  """Static description of a comparison.

  Attributes:
    cut: tile and token shards.
    axis: manual mesh axis of the vocabulary, or None.
    mixture: weight of the teacher in the generalised Jensen-Shannon divergence; None: total
      variation; 0: the results are those of `SoftTargetLoss`.
  """

  cut: tiles.Cut
  axis: MeshAxes | None
  mixture: float | None

  @property
  def is_mean(self) -> bool:
    """Whether the result is a mean of functions of p / q, by a second pass (`_slopes`)."""
    return self.mixture != 0


class _Saved(NamedTuple):
  """Per-token values of the forward pass that the backward pass needs.

  Attributes:
    top: largest s.
    log_sum: log sum of exp(s - top); added to `top` it would round away under a large offset.
    teacher_top: largest t.
    teacher_log_sum: log sum of exp(t - teacher_top).
    mean: mean of s - top under q; in a second pass, that of the student's slope under p.
    teacher_mean: mean of t - teacher_top under q; in a second pass, that of the teacher's slope.
  """

  top: Array
  log_sum: Array
  teacher_top: Array
  teacher_log_sum: Array
  mean: Array
  teacher_mean: Array


# JAX's own gradient of the scans would store the scores of all tiles, [N, V], twice.
@precision.custom_vjp
def _pass(plan, student, teacher):
  return _forward(plan, student, teacher)[0]


def _forward(plan, student, teacher):
  layers, batch = (student, teacher), student.hidden.shape[:2]
  add = lambda sums, scores, first_row, given: _add_block(sums, *scores)
  # Reduced once at the end, not at every tile: the sums of a device are relative to its own maxima.
  sums = tiles.fold(plan.cut, layers, None, _zero_sums(batch), add)
  sums = _all_reduce(sums, plan.axis)
  saved = _Saved(
    top=sums.top,
    log_sum=jnp.log(sums.total),
    teacher_top=sums.teacher_top,
    teacher_log_sum=jnp.log(sums.teacher_total),
    mean=sums.cross / sums.teacher_total,
    teacher_mean=sums.moment / sums.teacher_total,
  )
  if not plan.is_mean:
    return _finish(sums), saved

  def add_to_means(old, scores, first_row, saved):
    del first_row
    log_probs = _log_probs(scores, jax.tree.map(lambda x: x[..., None], saved))
    # 0 · log 0 is 0.
    means = [
      jnp.where(mass == 0, 0.0, mass * slope).sum(axis=-1)
      for mass, slope in zip(map(jnp.exp, log_probs), _slopes(plan.mixture, *log_probs))
    ]
    return tuple(map(jnp.add, old, means))

  # Quotients of probabilities need both normalisers, hence a second pass.
  zero = jnp.zeros(batch, jnp.float32)
  means = tiles.fold(plan.cut, layers, saved, (zero, zero), add_to_means)
  of_student, of_teacher = lax.psum(means, plan.axis) if plan.axis else means
  return of_student + of_teacher, saved._replace(mean=of_student, teacher_mean=of_teacher)


def _log_probs(scores, saved):
  """log p and log q of a tile of scores of both sides."""
  s, t = scores
  return (s - saved.top) - saved.log_sum, (t - saved.teacher_top) - saved.teacher_log_sum


def _slopes(mixture, log_p, log_q):
  """Functions f and g of each token, of which a divergence is sum_v p_v f_v + q_v g_v.

  They are its derivatives by p and by q, too: p log(p / m) + q log(q / m) and |p - q| are
  homogeneous, so that the derivatives of f and g cancel.
  """
  if mixture is None:
    half = jnp.sign(jnp.exp(log_p) - jnp.exp(log_q)) / 2
    return half, -half
  p_ratio, q_ratio = log_ratios_to_mixture(mixture, log_p, log_q)
  return (1 - mixture) * p_ratio, mixture * q_ratio


# A log-probability so low that the probability is 0 in float32.
_NO_MASS = -200.0


def log_ratios_to_mixture(
  mixture: float | int, log_p: Float[Array, "*B"], log_q: Float[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
  """log(p / m) and log(q / m), where m = mixture · q + (1 - mixture) · p.

  Where p is 0 the first, where q is 0 the second, and where both are 0 each is arbitrary.
  """
  # A number of which exp is 0 as well: -inf - (-inf) would be nan, and 0 · nan in derivatives.
  gap = jnp.maximum(log_q, _NO_MASS) - jnp.maximum(log_p, _NO_MASS)
  # log(larger / m) = -log1p(w · expm1(-|gap|)), with the weight w of the smaller: no overflow, and
  # no cancellation where both are nearly equal.
  is_above = gap > 0
  of_smaller = jnp.where(is_above, 1 - mixture, mixture)
  larger = -jnp.log1p(of_smaller * jnp.expm1(jnp.where(is_above, -gap, gap)))
  return jnp.where(is_above, larger - gap, larger), jnp.where(is_above, larger, larger + gap)


class _Cotangents(NamedTuple):
  """Per-token values that the cotangents of the scores are computed from.

  Attributes:
    saved: values of the forward pass.
    both: sum of the cotangents of both losses, or the cotangent of the one of a second pass.
    kl: cotangent of the divergence; None for a second pass.
  """

  saved: _Saved
  both: Array
  kl: Array | None


def _pass_forward(plan, student, teacher):
  losses, saved = _forward(plan, student, teacher)
  return losses, (student, teacher, saved)


def _pass_backward(plan, residuals, cotangents):
  student, teacher, saved = residuals
  if not plan.is_mean:
    given = _Cotangents(saved, cotangents.cross_entropy + cotangents.kl, cotangents.kl)
    rule = _d_soft_targets
  else:
    given = _Cotangents(saved, cotangents, None)
    rule = functools.partial(_d_means, plan.mixture)
  given = vocab_parallel.varying((given, student, teacher))[0]
  return tiles.gradients(plan.cut, (student, teacher), given, rule)


def _d_soft_targets(scores, row_v11, given):
  """Cotangents of the scores: (p - q) · g, and q · (mean of s under q - s) · g."""
  del row_v11
  s, t = scores
  saved = given.saved
  s_above, t_above = s - saved.top, t - saved.teacher_top
  p, q = jnp.exp(s_above - saved.log_sum), jnp.exp(t_above - saved.teacher_log_sum)
  # 0 · inf where a bias of -inf removes a row from the teacher. Before the product as well, for the
  # second derivative: 0 · inf in a branch that is not taken.
  s_above, t_above = (jnp.where(q == 0, 0.0, above) for above in (s_above, t_above))
  slope = (saved.mean - s_above) * given.both - (saved.teacher_mean - t_above) * given.kl
  return (p - q) * given.both, jnp.where(q == 0, 0.0, q * slope)


def _d_means(mixture, scores, row_v11, given):
  """Cotangents of the scores: p · (slope - its mean under p) · g, and so for q."""
  del row_v11
  log_probs = _log_probs(scores, given.saved)
  of_p, of_q = _slopes(mixture, *log_probs)
  p, q = map(jnp.exp, log_probs)
  return (
    jnp.where(p == 0, 0.0, p * (of_p - given.saved.mean) * given.both),
    jnp.where(q == 0, 0.0, q * (of_q - given.saved.teacher_mean) * given.both),
  )


_pass.defvjp(*map(vocab_parallel.own_promotion, (_pass_forward, _pass_backward)))


class LinearComparison(NamedTuple):
  """Two softmaxes over one vocabulary, beside each other.

  Attributes:
    kl: sum_v q_v (log q_v - log p_v) of the student p from the teacher q, in nats, [N].
    agrees: whether both have the same most probable token, bool [N].
    log_prob: log-probability of the token under the student, [N].
    teacher_log_prob: log-probability of the token under the teacher, [N].
  """

  kl: Float[Array, "N"]
  agrees: Bool[Array, "N"]
  log_prob: Float[Array, "N"]
  teacher_log_prob: Float[Array, "N"]


def linear_comparison(
  students: Sequence[Side], teacher: Side, tokens: Array
) -> list[LinearComparison]:
  """Divergence, agreement and log-probabilities of tokens in one pass, without a gradient.

  Args:
    students: one or more students, which share the scores of the teacher; their hidden vectors are
      [N, D].

  Returns:
    The comparison of each student.

  Raises:
    ValueError: the shapes do not fit together.
  """
  pairs = [layers_of(student, teacher, ScoreOptions()) for student in students]
  layers = pairs[0][1], *(student for student, _ in pairs)
  return tiles.on_each_device(layers, tokens.astype(jnp.int32), _compared)


def _compared(cut, layers, token_PN):
  """The comparisons of all layers with the first, the teacher."""

  def add(old, scores, first_row, token):
    at = token - first_row
    is_here = (at >= 0) & (at < scores[0].shape[-1])
    at = jnp.clip(at, 0, scores[0].shape[-1] - 1)[..., None]
    found = []
    for (top, best, own), score in zip(old[0], scores):
      highest = score.max(axis=-1)
      best = jnp.where(highest > top, first_row + score.argmax(axis=-1), best)
      # The score of a row in the overlap of two tiles is -inf in the second.
      mine = jnp.take_along_axis(score, at, axis=-1)[..., 0]
      own = jnp.where(is_here, jnp.maximum(own, mine), own)
      found.append((jnp.maximum(top, highest), best, own))
    sums = [_add_block(some, score, scores[0]) for some, score in zip(old[1], scores[1:])]
    return found, sums

  lowest = jnp.full(token_PN.shape, -jnp.inf, jnp.float32)
  nothing = [(lowest, jnp.zeros_like(token_PN), lowest)] * len(layers)
  start = nothing, [_zero_sums(token_PN.shape)] * (len(layers) - 1)
  found, sums = tiles.fold(cut, layers, token_PN, start, add)
  (_, teacher_best, teacher_own), *found = found
  return [
    LinearComparison(
      kl=_finish(some).kl,
      agrees=best == teacher_best,
      log_prob=own - some.top - jnp.log(some.total),
      teacher_log_prob=teacher_own - some.teacher_top - jnp.log(some.teacher_total),
    )
    for (_, best, own), some in zip(found, sums)
  ]
