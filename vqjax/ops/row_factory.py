"""What is a weight [V, D] whose rows are composed, a tile at a time, from something smaller?

A table of vectors is the simplest case: each row is its own. A row may also be made of its codes
and of tables that all rows share; then only a tile of the weight ever exists, and the gradient of a
tile of rows goes to what they were composed of.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import vocab_parallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowFactory:
  """compose(own, shared) -> [V, D], for any part of the rows.

  Attributes:
    per_row: a tree of arrays [V, ...], of which each row has its own part.
    shared: a tree of arrays that all rows are composed of; () for none.
    compose: (own [v, ...], shared) -> rows [v, D], differentiable in what is to be trained; row i
      of the result depends on row i of `per_row` alone.
  """

  per_row: Any
  shared: Any
  compose: Callable[[Any, Any], Float[Array, "v D"]] = dataclasses.field(metadata={"static": True})

  @property
  def is_table(self) -> bool:
    """Whether the rows are there, in an array [V, D]."""
    return self.compose is _itself

  @property
  def count(self) -> int:
    """V, or how many of the rows are here."""
    return jax.tree.leaves(self.per_row)[0].shape[0]

  @property
  def _kind(self) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda rows: rows.all(), self)

  @property
  def shape(self) -> tuple[int, ...]:
    """(V, D)."""
    return self._kind.shape

  @property
  def dtype(self) -> jnp.dtype:
    """Of the composed rows."""
    return self._kind.dtype

  def all(self) -> Float[Array, "V D"]:
    """All rows: an array [V, D]."""
    return self.compose(self.per_row, self.shared)

  def part(self, start: Array, size: int) -> "RowFactory":
    """`size` rows from `start` on."""
    return self._some(lambda x: lax.dynamic_slice_in_dim(x, start, size))

  def at(self, index: Array) -> Float[Array, "W D"]:
    """The rows with the given indices."""
    return self._some(lambda x: x[index]).all()

  def _some(self, choose: Callable[[Array], Array]) -> "RowFactory":
    own = jax.tree.map(choose, self.per_row)
    if not self.is_table:
      # Composed of what is here: the partitioner does not split a look-up by a part of a row.
      own = jax.tree.map(vocab_parallel.token_shards(None).whole, own)
    return dataclasses.replace(self, per_row=own)

  def zeros(self, wanted: "RowFactory") -> "RowFactory":
    """Gradients of zero for what is `wanted`, a `RowFactory` of booleans; None for the rest.

    Those of shared arrays, to which every tile adds, are at least float32.
    """
    own = jax.tree.map(
      lambda x, wish: jnp.zeros_like(x) if wish else None, self.per_row, wanted.per_row
    )
    shared = jax.tree.map(
      lambda x, wish: jnp.zeros(x.shape, vocab_parallel.summed_dtype(x.dtype)) if wish else None,
      self.shared,
      wanted.shared,
    )
    return dataclasses.replace(self, per_row=own, shared=shared)

  def rounded(self, gradient: "RowFactory") -> "RowFactory":
    """A gradient that began as `zeros`, in the dtypes of what it is of."""
    return jax.tree.map(lambda x, d: None if d is None else d.astype(x.dtype), self, gradient)

  def with_gradient_of(
    self, gradient: "RowFactory", wanted: "RowFactory", start: Array, d_rows: Float[Array, "v D"]
  ) -> "RowFactory":
    """`gradient` with that of the rows from `start` on added, given their cotangent."""
    if self.is_table:
      return dataclasses.replace(gradient, per_row=_added(gradient.per_row, d_rows, start))
    tile = self.part(start, d_rows.shape[0])
    kept, tree = jax.tree.flatten((tile.per_row, tile.shared))
    wishes = jax.tree.leaves((wanted.per_row, wanted.shared))
    # In float32: a vector that many rows of the tile share gets the sum of their cotangents.
    trained = [
      x.astype(vocab_parallel.summed_dtype(x.dtype)) for x, wish in zip(kept, wishes) if wish
    ]

    def composed(trained):
      given = iter(trained)
      leaves = [next(given) if wish else x for x, wish in zip(kept, wishes)]
      return self.compose(*jax.tree.unflatten(tree, leaves))

    rows, pull = jax.vjp(composed, trained)
    whole = vocab_parallel.token_shards(None).whole
    found = iter(jax.tree.map(whole, pull(whole(d_rows.astype(rows.dtype)))[0]))
    own = jax.tree.map(
      lambda wish, sums: _added(sums, next(found), start) if wish else None,
      *(wanted.per_row, gradient.per_row),
    )
    shared = jax.tree.map(
      lambda wish, sums: sums + next(found) if wish else None,
      *(wanted.shared, gradient.shared),
    )
    return dataclasses.replace(gradient, per_row=own, shared=shared)


def _added(whole, part, start):
  old = lax.dynamic_slice_in_dim(whole, start, part.shape[0])
  return lax.dynamic_update_slice_in_dim(whole, old + part.astype(whole.dtype), start, axis=0)


def _itself(own, shared):
  del shared
  return own


def as_row_factory(weight: Array | RowFactory) -> RowFactory:
  """A weight as `RowFactory`: an array [V, D] is a table of them."""
  return weight if isinstance(weight, RowFactory) else RowFactory(weight, (), _itself)
