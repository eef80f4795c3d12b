"""Optimisers of tables of which a step reads few rows: one number of state a row, no momentum.

A row w whose gradient in a step is g, the sum over all that read it, has a second moment v:

  v += mean(g²)                                Adagrad by rows (decay None)
  v = decay v + (1 - decay) mean(g²)           RMSProp by rows; the first gradient sets v
  w -= rate g / (√v + epsilon)

Rows whose gradient is zero keep w and v bit for bit, so that a step costs what the rows that it
reads cost. `rowwise` takes gradients of the whole table, as any rule of Optax. `update_rows` takes
the gradients of the rows that were read: no array of the table's size is made. Both, and
`vqjax.tables.HostTable` on the host, compute the same numbers.

A table may be stored as integers of 8 bits, as in `Int8Embedding(trained=True)`: `value_and_grad`
takes the gradient of its rows, and `rowwise` rounds each step up or down at random, so that it is
exact on average. There is no float copy: a number costs a byte where AdamW's costs twelve.

  levels = floor(w / scale + u),   u uniform in [0, 1)

Source: Lerer et al., PyTorch-BigGraph, 2019 (arXiv 1903.12287), whose Adagrad has a sum a row;
Gupta et al., Deep learning with limited numerical precision, 2015, for the rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from vqjax.ops import vocab_parallel
from vqjax.ops.host_memory import read_rows, write_rows
from vqjax.ops.vocabulary import check_arrays, values_of
from vqjax.types import MeshAxes

__all__ = ["RowMoments", "rowwise", "update_rows", "value_and_grad"]


class RowMoments(NamedTuple):
  """The state of `rowwise`.

  Attributes:
    moments: the second moments [V] of each table [V, D], at least float32.
    step: the number of steps so far, which the schedule and the rounding of int8 tables follow.
  """

  moments: Any
  step: Int[Array, ""]


def rowwise(
  learning_rate: optax.ScalarOrSchedule,
  decay: float | None = None,
  epsilon: float = 1e-8,
  *,
  weight_decay: float = 0.0,
  seed: int = 0,
) -> optax.GradientTransformation:
  """The rule for tables [V, D] among the parameters of a model.

    rules = {"table": rowwise(0.03), "matrix": optax.contrib.muon(2e-2), "vector": optax.adam(3e-3)}
    optimizer = optax.multi_transform(rules, vqjax.optimizer_labels)

  Moments lie on the devices of their rows.

  A table of int8 `levels` [V, D] with a `scale` [V, G] beside them stays one. Its gradient is that
  of `value_and_grad`; updates of levels are differences modulo 256, which the addition of int8
  undoes exactly, so that no other rule may come after this one. A scale stays while the largest
  number of its group fits it, since a new one rounds every number of the group again.

  Args:
    learning_rate: a number, or a schedule of Optax.
    decay: the part of a moment that is kept where its row has a gradient, in [0, 1); None: all of
      it, as in Adagrad.
    epsilon: added to the root of a moment.
    weight_decay: decoupled, of the rows that have a gradient.
    seed: of the rounding of int8 tables; its random numbers follow from the seed and the step, so
      that a resumed run repeats them.

  Raises:
    ValueError: `decay` is out of range, or in `init` an array has no rows.
  """
  check_decay(decay)
  # `optax.inject_hyperparams` makes an array of each number, 0 too.
  decays = isinstance(weight_decay, jax.core.Tracer) or weight_decay != 0

  def begin(table):
    if jnp.ndim(table) < 2:
      raise ValueError(
        f"rowwise must be given tables [V, D]; got {jnp.shape(table)}. Give vectors to another"
        " rule: optax.multi_transform(rules, vqjax.optimizer_labels)."
      )
    # Not zeros of a shape, which would lie on one device.
    return jnp.zeros_like(table[..., 0], dtype=vocab_parallel.summed_dtype(table.dtype))

  def begin_int8(table):
    moment = jnp.zeros_like(table["levels"][..., 0], dtype=table["scale"].dtype)
    return {"levels": moment, "scale": optax.MaskedNode()}

  def init(params):
    moments = _by_table(begin_int8, lambda tree: jax.tree.map(begin, tree), params)
    return RowMoments(moments, jnp.int32(0))

  def update(gradients, state, params=None):
    if decays and params is None:
      raise ValueError("rowwise: `params` must be given to `update` for `weight_decay`; got None.")
    rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    number = itertools.count()

    def stepped(g, v, w):
      step, after = step_of(g.astype(v.dtype), v, decay, epsilon, jnp)
      if decays:
        step = step + jnp.where((g != 0).any(-1, keepdims=True), weight_decay * w, 0)
      # A step of 0, times a negative number, is -0, which leaves all rows as they are, -0 too.
      return step * -jnp.asarray(rate, step.dtype), after

    def of_table(table, gradient, moments):
      levels, scale, g = table["levels"], table["scale"], gradient["levels"]
      rows = _rows_of_levels(levels, scale)
      step, after = stepped(g, moments["levels"], rows)
      key_of_table = jax.random.fold_in(key, next(number))
      new, new_scale = _rounded_rows(rows + step, scale, key_of_table)
      has_gradient = (g != 0).any(-1, keepdims=True)
      levels_step = jnp.where(has_gradient, new - levels, 0)
      scale_step = jnp.where(has_gradient, new_scale - scale, 0)
      return {"levels": (levels_step, after), "scale": (scale_step, optax.MaskedNode())}

    def of_others(params, gradients, moments):
      weights = gradients if params is None else params
      return jax.tree.map(stepped, gradients, moments, weights)

    tree = gradients if params is None else params
    found = _by_table(of_table, of_others, tree, gradients, state.moments)
    pick = lambda i: jax.tree.map(lambda _, pair: pair[i], gradients, found)
    return pick(0), RowMoments(pick(1), state.step + 1)

  return optax.GradientTransformation(init, update)


def _by_table(of: Callable, leaf: Callable, tree: Any, *others: Any) -> Any:
  """The tree with `of(table, *others)` at each int8 table, and `leaf(tree, *others)` elsewhere."""
  if _is_int8_table(tree):
    return of(tree, *others)
  if not _holds_table(tree):
    return leaf(tree, *others)
  inner = lambda name: (other[name] for other in others)
  return {name: _by_table(of, leaf, node, *inner(name)) for name, node in tree.items()}


def _holds_table(tree):
  if not isinstance(tree, Mapping):
    return False
  return _is_int8_table(tree) or any(map(_holds_table, tree.values()))


def _is_int8_table(node):
  found = isinstance(node, Mapping) and {"levels", "scale"} <= node.keys()
  return found and getattr(node["levels"], "dtype", None) == jnp.int8


_MOST = 127  # the largest level, as in `Int8Embedding`

# Part of its range that a new scale leaves free, and the part below which a scale is too large.
_ROOM, _LEAST = 1.1, 0.75


def _rows_of_levels(levels_VD, scale_VG):
  grouped_VGj = levels_VD.reshape(*scale_VG.shape, -1).astype(scale_VG.dtype)
  return (grouped_VGj * scale_VG[..., None]).reshape(levels_VD.shape)


def _rounded_rows(rows_VD, scale_VG, key):
  """Levels of rows, rounded up or down at random, and the scales that hold them."""
  rows_VGj = rows_VD.reshape(*scale_VG.shape, -1)
  needed_VG = jnp.abs(rows_VGj).max(axis=-1) / _MOST
  fits_VG = (needed_VG <= scale_VG) & (needed_VG >= _LEAST * scale_VG)
  new_VG = jnp.where(fits_VG | (needed_VG == 0), scale_VG, needed_VG * _ROOM)
  u_VGj = _uniform(key, rows_VD.shape).reshape(rows_VGj.shape)
  level_VGj = jnp.floor(rows_VGj / jnp.where(new_VG > 0, new_VG, 1)[..., None] + u_VGj)
  return jnp.clip(level_VGj, -_MOST, _MOST).astype(jnp.int8).reshape(rows_VD.shape), new_VG


def _uniform(key, shape):
  """Uniform numbers [V, D] in [0, 1), a hash of their indices.

  Arrays of `jax.random` are in memory before they are used, with their counters four times the
  table's bytes; XLA computes these where they are needed.
  """
  first, second = jax.random.bits(key, (2,), jnp.uint32)
  row_V1 = lax.broadcasted_iota(jnp.uint32, (shape[0], 1), 0)
  column_VD = lax.broadcasted_iota(jnp.uint32, shape, 1)
  mixed_VD = _mixed(_mixed(row_V1 ^ first) ^ column_VD * np.uint32(0x9E3779B9) ^ second)
  return (mixed_VD >> 8).astype(jnp.float32) * 2.0**-24


def _mixed(x):
  """The finaliser of MurmurHash3, of 32-bit words."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> shift)) * np.uint32(factor)
  return x ^ (x >> 16)


def value_and_grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
  """`jax.value_and_grad`, where int8 tables among the parameters have the gradient of their rows.

  The gradient has the tree of the parameters. At the `levels` of a table it has that of the rows,
  float32 [V, D], and at their `scale` zeros: `rowwise` chooses the scales. Elsewhere both functions
  are one.

  Args:
    function: (params, *args) -> a scalar, or with `has_aux` (scalar, anything).
    has_aux: as in JAX.

  Returns:
    (params, *args) -> (value of the function, gradient).
  """

  def computed(params, *args, **named):
    zeros = lambda table: jnp.zeros_like(table["levels"], dtype=table["scale"].dtype)
    own = lambda node, *others: others[0] if others else node
    floats = _by_table(lambda t: {"scale": t["scale"], "tangent": zeros(t)}, own, params)

    def inner(floats, *args, **named):
      with_levels = lambda table, floats: {"levels": table["levels"], **floats}
      return function(_by_table(with_levels, own, params, floats), *args, **named)

    value, found = jax.value_and_grad(inner, has_aux=has_aux)(floats, *args, **named)
    of_table = lambda table, found: {"levels": found["tangent"], "scale": found["scale"]}
    return value, _by_table(of_table, own, params, found)

  return computed


def update_rows(
  table: Float[ArrayLike, "V D"],
  moment: Float[ArrayLike, "V"],
  ids: Integer[ArrayLike, "*B"],
  gradients: Float[ArrayLike, "*B D"],
  learning_rate: ArrayLike,
  *,
  decay: float | None = None,
  epsilon: float = 1e-8,
  vocab_axis: MeshAxes | None = None,
) -> tuple[Float[Array, "V D"], Float[Array, "V"]]:
  """A table and its moments after a step, from the gradients of the rows that were read.

  Where both are donated they are changed in place, and a step needs memory for the rows it reads:

    update = jax.jit(update_rows, donate_argnums=(0, 1))
    table, moment = update(table, moment, ids, gradients, 0.03)

  Tables in the host's memory (`memory_kind="pinned_host"`) stay there, and their rows are sent.
  Steps that are below half of a bfloat16 table's spacing, 1/256 of a number, are lost.

  Args:
    table: float32 or bfloat16 [V, D].
    moment: second moments [V], zeros at first.
    ids: [*B]; gradients of ids outside [0, V) are left out, those of equal ids are added up.
    gradients: [*B, D], those of `table[ids]`.
    learning_rate: a number.
    decay: as of `rowwise`.
    epsilon: as of `rowwise`.
    vocab_axis: mesh axis over which the rows are sharded, a tuple of several, or None. Every device
      reads all ids and gradients, and changes its own rows.

  Raises:
    ValueError: shapes do not fit, `decay` is out of range, the mesh has no axis `vocab_axis`, or
      its devices do not divide the rows.
  """
  check_decay(decay)
  check_arrays(table=table, moment=moment, ids=ids, gradients=gradients)
  arrays = table, moment, ids, gradients = values_of((table, moment, ids, gradients))
  check_step(table.shape, ids, gradients)
  if moment.shape != table.shape[:1]:
    raise ValueError(
      f"`moment` must have a number for each row, {table.shape[:1]}; got {moment.shape}. Begin with"
      " jnp.zeros(len(table))."
    )
  local = functools.partial(_updated, decay=decay, epsilon=epsilon, axis=vocab_axis)
  compute = lambda given: _by_device(local, given, vocab_axis)
  return vocab_parallel.on_any_axes(
    compute, (*arrays, learning_rate), vocab=table.shape[0], vocab_axis=vocab_axis
  )


def _by_device(local, given, axis):
  """`local(*given)`, each device with its rows of the table and of the moments."""
  kinds = vocab_parallel.axis_types()
  if not vocab_parallel.names_of(axis) or not kinds or vocab_parallel.inside(axis):
    return local(*given)
  vocab_parallel.check_axes(axis)
  rows, count = given[0].shape[0], vocab_parallel.axis_size(axis)
  if rows % count:
    raise ValueError(
      f"the rows of `table` must be divisible by the {count} devices of {axis!r}; got {rows}. Make"
      f" a table of {rows + -rows % count} rows, of which the last are not read."
    )
  specs = (P(axis), P(axis), P(), P(), P()), (P(axis), P(axis))
  mapped = jax.shard_map(
    local, in_specs=specs[0], out_specs=specs[1], axis_names={*vocab_parallel.names_of(axis)}
  )
  # Outside of jit a shard_map that leaves axes automatic is an error.
  return jax.jit(mapped)(*given)


def _updated(table, moment, ids, gradients, rate, *, decay, epsilon, axis):
  """The rows of this device, after a step."""
  rows = table.shape[0]
  local = ids.reshape(-1) - vocab_parallel.first_row(axis, rows)
  # The index behind the last row is for rows of other devices: what is written there is dropped.
  index = jnp.where((local >= 0) & (local < rows), local, rows)
  order = jnp.argsort(index)
  flat = gradients.reshape(index.shape[0], *table.shape[1:])
  index, wide = index[order], flat[order].astype(moment.dtype)
  # Position of each row among the different ones, and the rows at these positions.
  position = jnp.cumsum(jnp.diff(index, prepend=index[:1]) != 0)
  # Not `segment_sum`, whose number of segments may be no symbol.
  summed = jnp.zeros_like(wide).at[position].add(wide, indices_are_sorted=True)
  index = jnp.full_like(index, rows).at[position].set(index)
  step, moments = step_of(summed, read_rows(moment, index), decay, epsilon, jnp)
  # In the order of Optax, so that numbers are the same.
  moved = read_rows(table, index).astype(moment.dtype) + step * -jnp.asarray(rate, moment.dtype)
  return write_rows(table, index, moved), write_rows(moment, index, moments)


def step_of(gradient, moment, decay, epsilon, xp):
  """(step without the rate, moments) of rows [*B, D] with moments [*B], in NumPy or JAX."""
  square = xp.square(gradient).mean(-1)
  if decay is None:
    after = moment + square
  else:
    after = xp.where(moment == 0, square, decay * moment + (1 - decay) * square)
  has_gradient = square != 0  # nan too
  after = xp.where(has_gradient, after, moment)
  step = gradient / (xp.sqrt(after) + epsilon)[..., None]
  return xp.where(has_gradient[..., None], step, 0).astype(moment.dtype), after.astype(moment.dtype)


def check_decay(decay: float | None) -> None:
  """Raise ValueError unless a decay is None or in [0, 1)."""
  if decay is None or isinstance(decay, jax.core.Tracer):
    return
  if not 0 <= decay < 1:
    raise ValueError(f"`decay` must be in [0, 1), or None for Adagrad; got {decay}. 0.99 is usual.")


def check_step(shape: tuple[int, ...], ids: Any, gradients: Any) -> None:
  """Raise ValueError unless ids are integers, with a gradient each for a table of this shape."""
  if not np.issubdtype(ids.dtype, np.integer) or gradients.shape != (*ids.shape, *shape[1:]):
    raise ValueError(
      f"`ids` must be integers [*B] and `gradients` [*B, {', '.join(map(str, shape[1:]))}]; got"
      f" {ids.dtype} {ids.shape} and {gradients.shape}. Give the gradient of `table[ids]`."
    )
