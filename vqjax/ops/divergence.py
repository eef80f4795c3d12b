"""Which sums over a vocabulary say how far a student is from a teacher, a block at a time?

p = softmax(s) is the student's distribution and q = softmax(t) the teacher's. The sums are kept
relative to running maxima; they are merged from block to block, then over the devices of an axis.
No gradient goes through the maxima, on which the loss does not depend.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class SoftTargetLoss(NamedTuple):
  """What a student loses on a teacher's distribution q, float32, in nats.

  Attributes:
    cross_entropy: -sum_v q_v log p_v.
    kl: sum_v q_v (log q_v - log p_v): the cross-entropy less the entropy of q.
  """

  cross_entropy: Float[Array, "*B"]
  kl: Float[Array, "*B"]


class Running(NamedTuple):
  """Sums over the rows so far, s the student's and t the teacher's scores.

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


def _shift(top):
  return jnp.where(jnp.isneginf(top), 0.0, top)


def _step(old, new):
  """How much lower the old top is; nothing was there below a top of -inf."""
  return jnp.where(jnp.isneginf(old), 0.0, old - _shift(new))


def nothing_yet(batch: tuple[int, ...]) -> Running:
  """The sums before the first block."""
  zero = jnp.zeros(batch, jnp.float32)
  least = jnp.full_like(zero, -jnp.inf)
  return Running(least, zero, least, zero, zero, zero)


def loss(sums: Running) -> SoftTargetLoss:
  """The losses, from the sums over the whole vocabulary."""
  log_sum, teacher_log_sum = jnp.log(sums.total), jnp.log(sums.teacher_total)
  cross_entropy = log_sum - sums.cross / sums.teacher_total
  entropy = teacher_log_sum - sums.moment / sums.teacher_total
  return SoftTargetLoss(cross_entropy, cross_entropy - entropy)


def merged(old: Running, s: Float[Array, "*B W"], t: Float[Array, "*B W"]) -> Running:
  """The sums with those of a block of scores added."""
  highest = lambda scores: lax.stop_gradient(scores).max(axis=-1)
  top = jnp.maximum(old.top, highest(s))
  teacher_top = jnp.maximum(old.teacher_top, highest(t))
  moved = _shrunk(old, top, teacher_top)
  s_above, t_above = s - _shift(top)[..., None], t - _shift(teacher_top)[..., None]
  likely = jnp.exp(t_above)
  # Where the teacher has no mass it does not matter what the student says, -inf included.
  times = lambda above: jnp.where(likely == 0, 0.0, likely * above).sum(axis=-1)
  return Running(
    top,
    moved.total + jnp.exp(s_above).sum(axis=-1),
    teacher_top,
    moved.teacher_total + likely.sum(axis=-1),
    moved.cross + times(s_above),
    moved.moment + times(t_above),
  )


def _shrunk(old, top, teacher_top):
  """The same sums, relative to higher tops."""
  step, teacher_step = _step(old.top, top), _step(old.teacher_top, teacher_top)
  shrink = jnp.exp(teacher_step)
  return Running(
    top,
    old.total * jnp.exp(step),
    teacher_top,
    old.teacher_total * shrink,
    (old.cross + step * old.teacher_total) * shrink,
    (old.moment + teacher_step * old.teacher_total) * shrink,
  )


def reduced(mine: Running, axis: str | None) -> Running:
  """The sums of all devices of the axis inside of which this runs."""
  if axis is None:
    return mine
  moved = _shrunk(mine, lax.pmax(mine.top, axis), lax.pmax(mine.teacher_top, axis))
  in_all = lambda x: lax.psum(x, axis)
  return Running(
    moved.top,
    in_all(moved.total),
    moved.teacher_top,
    in_all(moved.teacher_total),
    in_all(moved.cross),
    in_all(moved.moment),
  )
