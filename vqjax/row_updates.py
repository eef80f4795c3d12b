"""Optimisers of tables of which a step reads few rows: one number of state a row, no momentum.

A row w whose gradient in a step is g, the sum over all that read it, has a second moment v:

  v += mean(g²)                                Adagrad by rows (decay None)
  v = decay v + (1 - decay) mean(g²)           RMSProp by rows; the first gradient sets v
  w -= rate g / (√v + epsilon)

Rows whose gradient is zero keep w and v bit for bit, so that a step costs what the rows that it
reads cost. `rowwise` takes gradients of the whole table, as any rule of Optax. `update_rows` takes
the gradients of the rows that were read: no array of the table's size is made. Both, and
`vqjax.tables.HostTable` on the host, compute the same numbers.

Source: Lerer et al., PyTorch-BigGraph, 2019 (arXiv 1903.12287), whose Adagrad has a sum a row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, ArrayLike, Float, Integer

from vqjax.ops import vocab_parallel
from vqjax.ops.host_memory import read_rows, write_rows
from vqjax.ops.vocabulary import check_arrays, values_of

__all__ = ["RowMoments", "rowwise", "update_rows"]


class RowMoments(NamedTuple):
  """The state of `rowwise`.

  Attributes:
    moments: the second moments [V] of each table [V, D], at least float32.
  """

  moments: Any


def rowwise(
  learning_rate: optax.ScalarOrSchedule, decay: float | None = None, epsilon: float = 1e-8
) -> optax.GradientTransformation:
  """The rule for tables [V, D] among the parameters of a model.

    rules = {"table": rowwise(0.03), "matrix": optax.contrib.muon(2e-2), "vector": optax.adam(3e-3)}
    optimizer = optax.multi_transform(rules, vqjax.optimizer_labels)

  Moments lie on the devices of their rows.

  Args:
    learning_rate: a number, or a schedule of Optax.
    decay: the part of a moment that is kept where its row has a gradient, in [0, 1); None: all of
      it, as in Adagrad.
    epsilon: added to the root of a moment.

  Raises:
    ValueError: `decay` is out of range, or in `init` an array has no rows.
  """
  check_decay(decay)

  def begin(table):
    if jnp.ndim(table) < 2:
      raise ValueError(
        f"rowwise must be given tables [V, D]; got {jnp.shape(table)}. Give vectors to another"
        " rule: optax.multi_transform(rules, vqjax.optimizer_labels)."
      )
    # Not zeros of a shape, which would lie on one device.
    return jnp.zeros_like(table[..., 0], dtype=vocab_parallel.summed_dtype(table.dtype))

  def update(gradients, state, params=None):
    del params
    wide = lambda g, v: g.astype(v.dtype)
    found = jax.tree.map(
      lambda g, v: step_of(wide(g, v), v, decay, epsilon, jnp), gradients, state.moments
    )
    pick = lambda i: jax.tree.map(lambda _, pair: pair[i], gradients, found)
    return pick(0), RowMoments(pick(1))

  init = lambda params: RowMoments(jax.tree.map(begin, params))
  # A step of 0, times a negative number, is -0, which leaves rows as they are: also those of -0.
  return optax.chain(
    optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
  )


def update_rows(
  table: Float[ArrayLike, "V D"],
  moment: Float[ArrayLike, "V"],
  ids: Integer[ArrayLike, "*B"],
  gradients: Float[ArrayLike, "*B D"],
  learning_rate: ArrayLike,
  *,
  decay: float | None = None,
  epsilon: float = 1e-8,
  vocab_axis: str | None = None,
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
    vocab_axis: mesh axis over which the rows are sharded, or None. Every device of it reads all
      ids and gradients, and changes its own rows.

  Raises:
    ValueError: shapes do not fit, `decay` is out of range, or the devices do not divide the rows.
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
  if axis is None or not kinds or vocab_parallel.inside(axis):
    return local(*given)
  rows, count = given[0].shape[0], vocab_parallel.axis_size(axis)
  if rows % count:
    raise ValueError(
      f"the rows of `table` must be divisible by the {count} devices of {axis!r}; got {rows}. Make"
      f" a table of {rows + -rows % count} rows, of which the last are not read."
    )
  specs = (P(axis), P(axis), P(), P(), P()), (P(axis), P(axis))
  mapped = jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], axis_names={axis})
  # Outside of jit a shard_map that leaves axes automatic is an error.
  return jax.jit(mapped)(*given)


def _updated(table, moment, ids, gradients, rate, *, decay, epsilon, axis):
  """The rows of this device, after a step."""
  rows = table.shape[0]
  local = ids.reshape(-1) - vocab_parallel.first_row(axis, rows)
  # The index behind the last row is for rows of other devices: what is written there is dropped.
  index = jnp.where((local >= 0) & (local < rows), local, rows)
  order = jnp.argsort(index)
  flat = gradients.reshape(len(index), *table.shape[1:])
  index, wide = index[order], flat[order].astype(moment.dtype)
  # Position of each row among the different ones, and the rows at these positions.
  position = jnp.cumsum(jnp.diff(index, prepend=index[:1]) != 0)
  summed = jax.ops.segment_sum(wide, position, len(index), indices_are_sorted=True)
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
  if decay is not None and not 0 <= decay < 1:
    raise ValueError(f"`decay` must be in [0, 1), or None for Adagrad; got {decay}. 0.99 is usual.")


def check_step(shape: tuple[int, ...], ids: Any, gradients: Any) -> None:
  """Raise ValueError unless ids are integers, with a gradient each for a table of this shape."""
  if not np.issubdtype(ids.dtype, np.integer) or gradients.shape != (*ids.shape, *shape[1:]):
    raise ValueError(
      f"`ids` must be integers [*B] and `gradients` [*B, {', '.join(map(str, shape[1:]))}]; got"
      f" {ids.dtype} {ids.shape} and {gradients.shape}. Give the gradient of `table[ids]`."
    )
