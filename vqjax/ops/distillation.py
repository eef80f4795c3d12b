"""How far is softmax(hidden · weightᵀ) from a teacher's distribution, without logits of either?

Student and teacher are scored tile by tile over the same vocabulary (`tiles`), each from its own
hidden vectors and weight; only [N]-sized sums survive from tile to tile. Cross-entropy and
Kullback-Leibler divergence come from one pass, their gradients from a second one that recomputes
the scores: 4NV(D + D') operations for the loss, and as many for each of the gradients that are
needed. A frozen teacher costs its scores and nothing else.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from vqjax.ops import divergence, tiles, vocab_parallel
from vqjax.ops.divergence import SoftTargetLoss
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.types import Dtype


def linear_soft_target_loss(
  hidden: Float[Array, "*B D"],
  weight: Float[Array, "V D"] | RowFactory,
  teacher_hidden: Float[Array, "*B E"],
  teacher_weight: Float[Array, "V E"] | RowFactory,
  bias: Float[Array, "V"] | None = None,
  teacher_bias: Float[Array, "V"] | None = None,
  *,
  temperature: float | int = 1.0,
  softcap: float | int | None = None,
  teacher_softcap: float | int | None = None,
  tile: tuple[int, int] | None = None,
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> SoftTargetLoss:
  """Cross-entropy and divergence of p = softmax(student) from q = softmax(teacher), exactly.

  Both distributions are those of `linear_softmax`, their scores divided by `temperature`.
  Differentiable, in reverse mode, in all six arrays; what needs no gradient has none computed, so
  that a teacher under `jax.lax.stop_gradient`, or one that is not differentiated, costs its scores
  alone. Distillation at a temperature T usually multiplies the loss by T²; that is left to the
  caller. A row that a bias of -inf removes from the student alone makes the loss infinite.

  Args:
    hidden: the student's vector for each token.
    weight: the student's row for each word, or `RowFactory` that are composed a tile at a time.
    teacher_hidden: the teacher's vector for each token, of a width of its own.
    teacher_weight: the teacher's row for each word.
    bias: the student's score for each word.
    teacher_bias: the teacher's score for each word.
    temperature: divides the scores of both, after their caps.
    softcap: largest absolute score of the student.
    teacher_softcap: largest absolute score of the teacher.
    tile: (tokens, vocabulary rows) scored at once, on each device.
    dtype: dtype of the matrix products' operands; by default each pair's own.
    vocab_axis: mesh axis over which the rows of both weights are spread.

  Raises:
    ValueError: shapes that do not fit together, a temperature or a cap that is not positive, a tile
      below 1, or a mesh without `vocab_axis`.
  """
  weight, teacher_weight = as_row_factory(weight), as_row_factory(teacher_weight)
  _check(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias)
  for name, value in (
    ("temperature", temperature),
    ("softcap", softcap),
    ("teacher_softcap", teacher_softcap),
  ):
    if value is not None and not value > 0:
      raise ValueError(f"{name} {value} is not positive; give a number above 0")
  scoring = lambda h, w, cap: tiles.Scoring(
    jnp.dtype(dtype or jnp.promote_types(h.dtype, w.dtype)), cap, float(temperature)
  )
  scorings = (
    scoring(hidden, weight, softcap),
    scoring(teacher_hidden, teacher_weight, teacher_softcap),
  )

  def body(rows, hiddens):
    own, by_all, bias, teacher_own, teacher_by_all, teacher_bias = rows
    student = dataclasses.replace(weight, per_row=own, shared=by_all)
    teacher = dataclasses.replace(teacher_weight, per_row=teacher_own, shared=teacher_by_all)
    layers = student, bias, teacher, teacher_bias
    return _loss(scorings, tile, vocab_axis, layers, hiddens)

  vocab = weight.count
  ragged = lambda bias: vocab_parallel.Sharded(
    vocab_parallel.bias_of_padding(bias, vocab, vocab_axis), -jnp.inf
  )
  rows = (
    vocab_parallel.Sharded(weight.per_row, 0),
    vocab_parallel.Replicated(weight.shared),
    ragged(bias),
    vocab_parallel.Sharded(teacher_weight.per_row, 0),
    vocab_parallel.Replicated(teacher_weight.shared),
    ragged(teacher_bias),
  )
  flat = lambda x: x.reshape(-1, x.shape[-1])
  hiddens = flat(hidden), flat(teacher_hidden)
  found = vocab_parallel.over_vocabulary(vocab_axis, body, rows, hiddens)
  return SoftTargetLoss(*(x.reshape(hidden.shape[:-1]) for x in found))


def _check(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias):
  if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
    raise ValueError(
      f"hidden {hidden.shape} and teacher_hidden {teacher_hidden.shape} are not of the same tokens"
    )
  if weight.shape[0] != teacher_weight.shape[0] or not weight.shape[0]:
    raise ValueError(
      f"weight {weight.shape} and teacher_weight {teacher_weight.shape} need a row for each word of"
      " one vocabulary"
    )
  for name, h, w, b in (
    ("weight", hidden, weight, bias),
    ("teacher_weight", teacher_hidden, teacher_weight, teacher_bias),
  ):
    if h.shape[-1] != w.shape[-1]:
      raise ValueError(f"{name} {w.shape} does not fit hidden {h.shape}: it is [V, D]")
    if b is not None and b.shape != w.shape[:1]:
      raise ValueError(f"a bias of shape {b.shape} does not fit {name} {w.shape}: it is [V]")


class _Plan(NamedTuple):
  scorings: tuple[tiles.Scoring, tiles.Scoring]
  cut: tiles.Cut
  axis: str | None


def _loss(scorings, tile, vocab_axis, layers, hiddens):
  axis = vocab_parallel.inside(vocab_axis)
  arrays = (*hiddens, *layers)
  hidden, teacher_hidden, *rest = vocab_parallel.varying(arrays, *([axis] if axis else []))
  parts = vocab_parallel.token_shards(vocab_axis)
  n = hidden.shape[0]
  hidden, teacher_hidden = parts.split(hidden), parts.split(teacher_hidden)
  weight, bias, teacher_weight, teacher_bias = rest
  cut = tiles.Cut(tiles.cut_tile(tile, hidden.shape[1], weight.count), parts)
  found = _pass(
    _Plan(scorings, cut, axis),
    *(hidden, weight, bias),
    *(teacher_hidden, teacher_weight, teacher_bias),
  )
  return SoftTargetLoss(*(parts.join(x, n) for x in found))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(plan, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias):
  student = tiles.Linear(hidden, weight, bias)
  teacher = tiles.Linear(teacher_hidden, teacher_weight, teacher_bias)
  return _forward(plan, student, teacher)[0]


def _forward(plan, student, teacher):
  merge = lambda old, scores, first_row, given: divergence.merged(old, *scores)
  start = divergence.nothing_yet(student.hidden.shape[:2])
  last = tiles.fold(plan.cut, plan.scorings, (student, teacher), None, start, merge)
  last = divergence.reduced(last, plan.axis)
  return divergence.loss(last), _Saved(
    *(last.top, jnp.log(last.total), last.teacher_top, jnp.log(last.teacher_total)),
    *(last.cross / last.teacher_total, last.moment / last.teacher_total),
  )


class _Saved(NamedTuple):
  """Normalisers in two parts, as `softmax` keeps them, and q's means of s - top and t - top."""

  top: Array
  log_sum: Array
  teacher_top: Array
  teacher_log_sum: Array
  expected: Array
  teacher_expected: Array


class _Pull(NamedTuple):
  """What the cotangents of the scores are made of, for each token."""

  saved: _Saved
  both: Array
  kl: Array | None


def _pass_forward(plan, *operands):
  layers = tiles.Linear(*operands[:3]), tiles.Linear(*operands[3:])
  wanted = tiles.perturbed(layers)
  student, teacher = tiles.values(layers)
  found, saved = _forward(plan, student, teacher)
  return found, (tiles.Static(wanted), student, teacher, saved)


def _pass_backward(plan, residuals, cotangents):
  static, student, teacher, saved = residuals
  cross_entropy, kl = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
  there = [x for x in (cross_entropy, kl) if x is not None]
  if not there:
    return (None,) * 6
  pull = _Pull(saved, functools.reduce(jnp.add, there), kl)
  layers = student, teacher
  pull = vocab_parallel.varying((pull, layers))[0]
  found = tiles.gradients(plan.cut, plan.scorings, layers, static.value, pull, _d_scores)
  return (*found[0], *found[1])


def _d_scores(scores, row_v11, pull):
  """Of the student (p - q) · g; of the teacher q · (q's mean of s - s) · g, and so for the KL."""
  del row_v11
  s, t = scores
  saved = pull.saved
  s_above, t_above = s - saved.top, t - saved.teacher_top
  p, q = jnp.exp(s_above - saved.log_sum), jnp.exp(t_above - saved.teacher_log_sum)
  slope = (saved.expected - s_above) * pull.both
  if pull.kl is not None:
    slope = slope - (saved.teacher_expected - t_above) * pull.kl
  return (p - q) * pull.both, jnp.where(q == 0, 0.0, q * slope)


_pass.defvjp(_pass_forward, _pass_backward, symbolic_zeros=True)
