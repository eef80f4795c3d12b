"""Weights [V, D] whose rows are composed, a tile at a time, from smaller arrays.

In the simplest case, a table of vectors, each row is its own. A row may also be composed of its
codes and of tables that all rows share; then only a tile of the weight ever exists, and the
gradient of a tile of rows goes to the arrays that they were composed of.
"""

# What the loops of `tiles` do with a factory, for each tile of rows:
#
#   part(start, v).all()              rows [v, D], composed from a part of `per_row` and `shared`
#   add_gradient(g, start, d_rows)    their cotangent, pulled back: a part of `per_row` is written,
#                                     and `shared`, which every tile reads, is added to
#
# A gradient has the form of its factory, with None for integers, so that it is a tree of the same
# structure to `jax.custom_vjp`.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import vocab_parallel
from vqjax.ops.vocabulary import check_given, value_of

__all__ = ["RowFactory", "columns"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowFactory:
  """A weight [V, D] = compose(per_row, shared), for any part of the rows.

  Attributes:
    per_row: a tree of arrays [V, ...], of which each row has its own part.
    shared: a tree of arrays that all rows are composed of; () for none.
    compose: (per_row [v, ...], shared) -> rows [v, D], differentiable in its floating-point arrays;
      row i of the result depends on row i of `per_row` only. It is compared by identity: a new
      lambda at each call would compile a program at each call. None: `per_row` is the table.
    axis: axis of the vocabulary in the arrays of `per_row`.
  """

  per_row: Any
  shared: Any
  compose: Callable[[Any, Any], Float[Array, "v D"]] | None = dataclasses.field(
    metadata={"static": True}
  )
  axis: ClassVar[int] = 0

  @property
  def is_table(self) -> bool:
    """Whether the rows exist as an array [V, D]."""
    return self.compose is None

  @property
  def is_stored(self) -> bool:
    """Whether the rows exist as one array, [V, D] or [D, V]."""
    return self.is_table or self.axis == 1

  @property
  def count(self) -> int:
    """Number of rows: V, or those of one device or part."""
    return jax.tree.leaves(self.per_row)[0].shape[self.axis]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the weight, (V, D)."""
    return jax.eval_shape(RowFactory.all, self).shape

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of the composed rows."""
    return jax.eval_shape(RowFactory.all, self).dtype

  def all(self) -> Float[Array, "V D"]:
    """All rows, as an array."""
    return self.per_row if self.compose is None else self.compose(self.per_row, self.shared)

  def part(self, start: Array, size: int) -> "RowFactory":
    """The factory of `size` rows from `start` on."""
    part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    return self.select(part)

  def at(self, index: Array) -> Float[Array, "W D"]:
    """The rows with the given indices, as an array."""
    return self.select(lambda x: x[index]).all()

  def select(self, choose: Callable[[Array], Array]) -> "RowFactory":
    """The factory of chosen rows: `choose` takes an array [V, ...] to [W, ...]."""
    per_row = jax.tree.map(choose, self.per_row)
    if self.compose is not None:
      # Replicated before it is composed: the partitioner does not split a gather whose index is
      # itself a slice of a sharded array.
      per_row = jax.tree.map(vocab_parallel.token_shards(None).whole, per_row)
    return dataclasses.replace(self, per_row=per_row)

  def zero_gradient(self, height: int) -> "RowFactory":
    """Gradients before the first of the tiles of `height` rows; None for integer arrays.

    Gradients of shared arrays, to which every tile adds, are at least float32.
    """
    if self.is_table and self.count % height == 0:
      # Every row is written, so that what is there before does not matter.
      return dataclasses.replace(self, per_row=lax.empty(self.per_row.shape, self.per_row.dtype))
    zeros = lambda x, dtype: jnp.zeros(x.shape, dtype) if _is_floating(x) else None
    return dataclasses.replace(
      self,
      per_row=jax.tree.map(lambda x: zeros(x, x.dtype), self.per_row),
      shared=jax.tree.map(lambda x: zeros(x, vocab_parallel.summed_dtype(x.dtype)), self.shared),
    )

  def rounded(self, gradient: "RowFactory") -> "RowFactory":
    """A gradient that began as `zero_gradient`, in the dtypes of the arrays."""
    return jax.tree.map(lambda x, d: None if d is None else d.astype(x.dtype), self, gradient)

  def add_gradient(
    self, gradient: "RowFactory", start: Array, d_rows: Float[Array, "v D"]
  ) -> "RowFactory":
    """`gradient` with the cotangent of the rows from `start` on pulled back and added."""

    def add(total, part):
      """Add [v, ...] to rows from `start` on, which may overlap the tile before."""
      part = part.astype(total.dtype)
      # Without an overlap each row is written once, and nothing has to be read.
      if total.shape[0] % part.shape[0]:
        part = part + lax.dynamic_slice_in_dim(total, start, part.shape[0])
      return lax.dynamic_update_slice_in_dim(total, part, start, axis=0)

    if self.is_table:
      return dataclasses.replace(gradient, per_row=add(gradient.per_row, d_rows))
    tile = self.part(start, d_rows.shape[0])
    leaves, tree = jax.tree.flatten((tile.per_row, tile.shared))
    # In float32: a vector that many rows of the tile share gets the sum of their cotangents.
    floats = [x.astype(vocab_parallel.summed_dtype(x.dtype)) for x in leaves if _is_floating(x)]

    def compose(floats):
      given = iter(floats)
      merged = [next(given) if _is_floating(x) else x for x in leaves]
      return self.compose(*jax.tree.unflatten(tree, merged))

    rows, pull = jax.vjp(compose, floats)
    whole = vocab_parallel.token_shards(None).whole
    pulled = iter(jax.tree.map(whole, pull(whole(d_rows.astype(rows.dtype)))[0]))
    # Flattened in the order of `leaves`: per_row first, then shared. None stands for integers.
    per_row = jax.tree.map(
      lambda x, total: add(total, next(pulled)) if _is_floating(x) else None,
      self.per_row,
      gradient.per_row,
    )
    shared = jax.tree.map(
      lambda x, total: total + next(pulled) if _is_floating(x) else None,
      self.shared,
      gradient.shared,
    )
    return dataclasses.replace(gradient, per_row=per_row, shared=shared)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Columns(RowFactory):
  """A weight whose rows are the columns of one array [D, V]."""

  axis: ClassVar[int] = 1

  def part(self, start: Array, size: int) -> "RowFactory":
    return dataclasses.replace(
      self, per_row=lax.dynamic_slice_in_dim(self.per_row, start, size, axis=1)
    )

  def at(self, index: Array) -> Float[Array, "W D"]:
    return jnp.moveaxis(self.per_row[:, index], 0, -1)

  def select(self, choose: Callable[[Array], Array]) -> "RowFactory":
    # XLA reads what is chosen where it lies: a transposition is another layout of the same array.
    return dataclasses.replace(self, per_row=choose(self.per_row.T).T)

  def zero_gradient(self, height: int) -> "RowFactory":
    make = lax.empty if self.count % height == 0 else jnp.zeros
    return dataclasses.replace(self, per_row=make(self.per_row.shape, self.per_row.dtype))

  def add_gradient(
    self, gradient: "RowFactory", start: Array, d_rows: Float[Array, "v D"]
  ) -> "RowFactory":
    total, part = gradient.per_row, d_rows.T.astype(gradient.per_row.dtype)
    if self.count % part.shape[1]:
      part = part + lax.dynamic_slice_in_dim(total, start, part.shape[1], axis=1)
    return dataclasses.replace(
      gradient, per_row=lax.dynamic_update_slice_in_dim(total, part, start, axis=1)
    )


def _transposed(per_row, shared):
  del shared
  return per_row.T


def columns(kernel: Float[Array, "D V"]) -> RowFactory:
  """The weight [V, D] whose rows are the columns of a kernel, as `flax.linen.Dense` has it.

  Neither the kernel nor its gradient is transposed or copied: a tile of columns at a time is read.

  Raises:
    TypeError: `kernel` is not an array.
  """
  check_given(kernel=kernel)
  return _Columns(value_of(kernel), (), _transposed)


def _is_floating(x):
  return jnp.issubdtype(x.dtype, jnp.floating)


def as_row_factory(weight: Array | RowFactory) -> RowFactory:
  """A weight as `RowFactory`; an array [V, D] is a table of rows.

  Raises:
    TypeError: `weight` is neither.
  """
  if isinstance(weight, RowFactory):
    return weight
  check_given(weight=weight)
  return RowFactory(value_of(weight), (), None)
