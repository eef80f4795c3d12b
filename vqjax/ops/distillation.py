"""Distillation losses between two softmaxes, without the logits of either.

A student distribution p = softmax(s) is compared with a teacher distribution q = softmax(t) over
one vocabulary. Only [N]-sized sums, kept relative to running maxima, survive from one part of the
vocabulary to the next; they are then reduced over the devices of the vocabulary's mesh axis.

`linear_soft_target_loss` scores both layers tile by tile (`vqjax.ops.tiles`). Its gradients come
from a second pass that recomputes the scores: 4NV(D + E) floating-point operations for the loss,
and as many again for each gradient that is computed. `block_soft_target_loss` takes the student's
scores as `Blocks` in any order of tokens, and gathers the teacher's rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from vqjax.ops import softmax, tiles, vocab_parallel
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.ops.sampling import Blocks
from vqjax.ops.stable import exp_shift
from vqjax.ops.vocabulary import check_mask
from vqjax.types import Dtype


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
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  teacher_hidden: Float[Array, "*B E"],
  teacher_weight: Float[Array, "V E"] | RowFactory,
  bias: Float[Array, "V"] | None = None,
  teacher_bias: Float[Array, "V"] | None = None,
  *,
  mask: Bool[Array, "*B"] | None = None,
  temperature: float | int = 1.0,
  softcap: float | int | None = None,
  teacher_softcap: float | int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> SoftTargetLoss:
  """Cross-entropy and KL divergence of a linear student from a linear teacher.

  Both distributions are those of `linear_softmax`, their scores divided by `temperature`. The
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
    temperature: divides the scores of both, after their caps.
    softcap: largest absolute score of the student.
    teacher_softcap: largest absolute score of the teacher.
    tile: (tokens, vocabulary rows) that are scored at once on each device.
    dtype: dtype of the matrix products' operands; None: the promoted dtype of each layer.
    vocab_axis: mesh axis over which the rows of both weights are sharded.

  Raises:
    ValueError: the shapes do not fit together, `temperature` or a cap is not positive, a side of
      `tile` is below 1, or the mesh has no axis `vocab_axis`.
  """
  weight, teacher_weight = as_row_factory(weight), as_row_factory(teacher_weight)
  if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
    raise ValueError(
      f"`teacher_hidden` must have the leading axes of `hidden` {hidden.shape}; got"
      f" {teacher_hidden.shape}. Give both for the same tokens."
    )
  if weight.shape[0] != teacher_weight.shape[0] or not weight.shape[0]:
    raise ValueError(
      f"`teacher_weight` must have a row for each of the {weight.shape[0]} rows of `weight`, at"
      f" least 1; got {teacher_weight.shape}. Give both over one vocabulary."
    )
  _check_layer("", hidden, weight, bias, softcap)
  _check_layer("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_softcap)
  _check_positive("temperature", temperature)

  def scoring(hidden, weight, cap):
    operands = jnp.dtype(dtype or jnp.promote_types(hidden.dtype, weight.dtype))
    return tiles.Scoring(operands, cap, float(temperature))

  scorings = (
    scoring(hidden, weight, softcap),
    scoring(teacher_hidden, teacher_weight, teacher_softcap),
  )

  def body(rows, hiddens):
    per_row, shared, bias, teacher_per_row, teacher_shared, teacher_bias = rows
    student = tiles.Linear(
      hiddens[0], dataclasses.replace(weight, per_row=per_row, shared=shared), bias
    )
    teacher = tiles.Linear(
      hiddens[1],
      dataclasses.replace(teacher_weight, per_row=teacher_per_row, shared=teacher_shared),
      teacher_bias,
    )
    return _loss(scorings, tile, vocab_axis, student, teacher)

  def sharded(bias):
    filled = vocab_parallel.bias_of_padding(bias, weight.count, vocab_axis)
    return vocab_parallel.Sharded(filled, -jnp.inf)

  rows = (
    vocab_parallel.Sharded(weight.per_row, 0),
    vocab_parallel.Replicated(weight.shared),
    sharded(bias),
    vocab_parallel.Sharded(teacher_weight.per_row, 0),
    vocab_parallel.Replicated(teacher_weight.shared),
    sharded(teacher_bias),
  )
  if mask is not None:
    check_mask(mask, hidden.shape[:-1])
    # Before the products: 0 · nan in the backward pass would reach the gradients of the weights.
    hidden, teacher_hidden = (jnp.where(mask[..., None], x, 0) for x in (hidden, teacher_hidden))
  hiddens = tuple(x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden))
  losses = vocab_parallel.over_vocabulary(vocab_axis, body, rows, hiddens)
  losses = jax.tree.map(lambda x: x.reshape(hidden.shape[:-1]), losses)
  return losses if mask is None else jax.tree.map(lambda x: jnp.where(mask, x, 0), losses)


def block_soft_target_loss(
  blocks: Blocks,
  teacher_hidden: Float[Array, "*B E"],
  teacher_weight: Float[Array, "V E"] | RowFactory,
  teacher_bias: Float[Array, "V"] | None = None,
  *,
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
    temperature: divides the scores of both, after the cap.
    teacher_softcap: largest absolute score of the teacher.
    dtype: dtype of the operands of the teacher's matrix product; None: their promoted dtype.

  Raises:
    ValueError: the shapes do not fit together, or `temperature` or the cap is not positive.
  """
  weight = as_row_factory(teacher_weight)
  if teacher_hidden.shape[:-1] != tuple(blocks.batch):
    raise ValueError(
      f"`teacher_hidden` must have the leading axes {tuple(blocks.batch)} of `blocks`; got"
      f" {teacher_hidden.shape}. Give both for the same tokens."
    )
  _check_layer("teacher_", teacher_hidden, weight, teacher_bias, teacher_softcap)
  _check_positive("temperature", temperature)
  hidden, weight, bias = lax.stop_gradient((teacher_hidden, weight, teacher_bias))

  @jax.checkpoint
  def step(sums, index):
    score_WB, token_W = blocks.block(index)
    score_BW = jnp.moveaxis(score_WB, 0, -1)
    bias_W = None if bias is None else bias[token_W]
    teacher_BW = softmax.linear_scores(hidden, weight.at(token_W), bias_W, dtype, teacher_softcap)
    score_BW = score_BW.astype(jnp.float32)
    # Padding names some token that another block holds: the teacher must not count it twice.
    teacher_BW = jnp.where(jnp.isneginf(score_BW), -jnp.inf, teacher_BW)
    return _add_block(sums, score_BW / temperature, teacher_BW / temperature)

  return _finish(_all_reduce(blocks.fold(step, _zero_sums(blocks.batch)), blocks.axis))


def _check_layer(prefix, hidden, weight, bias, softcap):
  if hidden.shape[-1] != weight.shape[-1]:
    raise ValueError(
      f"`{prefix}weight` must be [V, {hidden.shape[-1]}] for `{prefix}hidden` {hidden.shape}; got"
      f" {weight.shape}. Transpose a kernel [{hidden.shape[-1]}, V]."
    )
  if bias is not None and bias.shape != weight.shape[:1]:
    raise ValueError(
      f"`{prefix}bias` must be [{weight.shape[0]}]; got {bias.shape}. Give one number for each row"
      f" of `{prefix}weight`."
    )
  if softcap is not None:
    _check_positive(f"{prefix}softcap", softcap)


def _check_positive(name, value):
  if not value > 0:
    raise ValueError(f"`{name}` must be positive; got {value}. Give a number above 0.")


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
  expected = lambda above: jnp.where(mass == 0, 0.0, mass * above).sum(axis=-1)
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
    cross=(old.cross + step * old.teacher_total) * shrink,
    moment=(old.moment + teacher_step * old.teacher_total) * shrink,
  )


def _all_reduce(local, axis):
  """The sums over all devices of a manual mesh axis."""
  if axis is None:
    return local
  moved = _relative_to(local, lax.pmax(local.top, axis), lax.pmax(local.teacher_top, axis))
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
  scorings: tuple[tiles.Scoring, tiles.Scoring]
  cut: tiles.Cut
  axis: str | None


class _Saved(NamedTuple):
  """Per-token values of the forward pass that the backward pass needs.

  Attributes:
    top: largest s.
    log_sum: log sum of exp(s - top); added to `top` it would round away under a large offset.
    teacher_top: largest t.
    teacher_log_sum: log sum of exp(t - teacher_top).
    mean: mean of s - top under q.
    teacher_mean: mean of t - teacher_top under q.
  """

  top: Array
  log_sum: Array
  teacher_top: Array
  teacher_log_sum: Array
  mean: Array
  teacher_mean: Array


def _loss(scorings, tile, vocab_axis, student, teacher):
  """Losses of flat tokens; the rows may be one device's part of the vocabulary."""
  axis = vocab_parallel.inside(vocab_axis)
  student, teacher = vocab_parallel.varying((student, teacher), *([axis] if axis else []))
  shards = vocab_parallel.token_shards(vocab_axis)
  n = student.hidden.shape[0]
  student = student._replace(hidden=shards.split(student.hidden))
  teacher = teacher._replace(hidden=shards.split(teacher.hidden))
  sides = tiles.cut_tile(tile, student.hidden.shape[1], student.weight.count)
  plan = _Plan(scorings, tiles.Cut(sides, shards), axis)
  return jax.tree.map(lambda x: shards.join(x, n), _pass(plan, student, teacher))


# JAX's own gradient of the scans would store the scores of all tiles, [N, V], twice.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(plan, student, teacher):
  return _forward(plan, student, teacher)[0]


def _forward(plan, student, teacher):
  merge = lambda sums, scores, first_row, given: _add_block(sums, *scores)
  start = _zero_sums(student.hidden.shape[:2])
  # Reduced once at the end, not at every tile: the sums of a device are relative to its own maxima.
  sums = tiles.fold(plan.cut, plan.scorings, (student, teacher), None, start, merge)
  sums = _all_reduce(sums, plan.axis)
  saved = _Saved(
    top=sums.top,
    log_sum=jnp.log(sums.total),
    teacher_top=sums.teacher_top,
    teacher_log_sum=jnp.log(sums.teacher_total),
    mean=sums.cross / sums.teacher_total,
    teacher_mean=sums.moment / sums.teacher_total,
  )
  return _finish(sums), saved


class _Cotangents(NamedTuple):
  """Per-token values that the cotangents of the scores are computed from.

  Attributes:
    saved: values of the forward pass.
    both: sum of the cotangents of both losses.
    kl: cotangent of the divergence.
  """

  saved: _Saved
  both: Array
  kl: Array


def _pass_forward(plan, student, teacher):
  losses, saved = _forward(plan, student, teacher)
  return losses, (student, teacher, saved)


def _pass_backward(plan, residuals, cotangents):
  student, teacher, saved = residuals
  given = _Cotangents(saved, cotangents.cross_entropy + cotangents.kl, cotangents.kl)
  given = vocab_parallel.varying((given, student, teacher))[0]
  return tiles.gradients(plan.cut, plan.scorings, (student, teacher), given, _d_scores)


def _d_scores(scores, row_v11, given):
  """Cotangents of the scores: (p - q) · g, and q · (mean of s under q - s) · g."""
  del row_v11
  s, t = scores
  saved = given.saved
  s_above, t_above = s - saved.top, t - saved.teacher_top
  p, q = jnp.exp(s_above - saved.log_sum), jnp.exp(t_above - saved.teacher_log_sum)
  slope = (saved.mean - s_above) * given.both - (saved.teacher_mean - t_above) * given.kl
  # 0 · inf where a bias of -inf removes a row from the teacher.
  return (p - q) * given.both, jnp.where(q == 0, 0.0, q * slope)


_pass.defvjp(_pass_forward, _pass_backward)
