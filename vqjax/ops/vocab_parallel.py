"""Over which devices of a mesh does an op spread the rows of a vocabulary, and its tokens?

The mesh is the one in context (`jax.set_mesh`); without one everything here does nothing. Rows are
spread over one named axis by `jax.shard_map`, every other axis stays automatic. Tokens are laid out
in as many parts as the automatic axes have devices, so that a loop over tiles of tokens cuts inside
each device's part and never across devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array


class Sharded(NamedTuple):
  """Arrays whose first axis is the vocabulary, and what fills the rows that make it divisible."""

  rows: Any
  pad_value: float | int


class Replicated(NamedTuple):
  """Arrays that every device of the axis has whole, beside those that it has a part of.

  Their gradients, which the devices add up, travel in float32 at least.
  """

  rows: Any


def axis_types() -> dict[str, AxisType]:
  """The axes of the mesh in context, with their types; empty without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types))


def platform() -> str:
  """What the program is compiled for: the mesh in context says it, else the default backend."""
  device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  return getattr(device, "platform", None) or jax.default_backend()


def devices() -> int:
  """Devices of the mesh in context; 1 without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.size


def axis_size(axis: str) -> int:
  """Devices along an axis of the mesh in context."""
  return jax.sharding.get_abstract_mesh().shape[axis]


def inside(axis: str | None) -> str | None:
  """The axis, where this code runs once for each of its devices; None where arrays are whole."""
  return axis if axis_types().get(axis) == AxisType.Manual else None


def rows_in_all(axis: str | None, rows: int) -> int:
  """Rows on all devices of an axis inside of which `rows` are here."""
  return rows if inside(axis) is None else rows * axis_size(axis)


def first_row(axis: str | None, rows: int) -> Array | int:
  """Index in the whole vocabulary of the first of the `rows` that are here."""
  return 0 if inside(axis) is None else lax.axis_index(axis) * rows


def over_vocabulary(
  axis: str | None,
  body: Callable[[Any, Any], Any],
  rows: tuple[Sharded | Replicated, ...],
  shared: Any,
) -> Any:
  """body(arrays of `rows`, `shared`), where each device of `axis` holds its part of the rows.

  The body must return the same on all devices of the axis: it reduces over it. Without a mesh in
  context, with one device on the axis, or inside of a `shard_map` over it, it is simply called.
  Rows that no device count divides are filled up.

  Raises:
    ValueError: the mesh in context has no such axis, or an explicit one; an array is spread over
      an explicit axis.
  """
  arrays = tuple(part.rows for part in rows)
  kinds = axis_types()
  _check_automatic((arrays, shared))
  if axis is None or not kinds or inside(axis):
    return body(arrays, shared)
  if axis not in kinds:
    raise ValueError(f"vocab_axis {axis!r} is no axis of the mesh, which has {', '.join(kinds)}")
  if kinds[axis] != AxisType.Auto:
    raise ValueError(f"vocab_axis {axis!r} is an explicit axis; make the mesh with AxisType.Auto")
  count = axis_size(axis)
  if count == 1:
    return body(arrays, shared)
  filled = tuple(_filled(part, count) for part in rows)
  specs = tuple(P(axis) if isinstance(part, Sharded) else P() for part in rows)

  def as_given(filled, shared):
    # Marked before it is narrowed: where it is marked, its gradient is summed.
    narrowed = lambda x, like: x if x.dtype == like.dtype else varying(x, axis).astype(like.dtype)
    return body(jax.tree.map(narrowed, filled, arrays), shared)

  spread = jax.shard_map(as_given, in_specs=(specs, P()), out_specs=P(), axis_names={axis})
  # Outside of jit a shard_map that leaves axes automatic is an error.
  return jax.jit(spread)(filled, shared)


def _check_automatic(tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    spec = getattr(jax.typeof(leaf).sharding, "spec", ())
    if any(part is not None for part in spec):
      raise ValueError(
        f"an array is spread over explicit axes of the mesh ({spec}); make the mesh with"
        " axis_types=(AxisType.Auto, ...), as vqjax.sharding.make_mesh does"
      )


def bias_of_padding(bias: Array | None, rows: int, axis: str | None) -> Array | None:
  """A bias where there must be one: -inf is what removes the rows that fill up a device's part."""
  kinds = axis_types()
  ragged = axis in kinds and inside(axis) is None and rows % axis_size(axis)
  return jnp.zeros((rows,), jnp.float32) if bias is None and ragged else bias


def summed_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """In which many numbers of a dtype are added up: floats narrower than float32 in float32."""
  floating = jnp.issubdtype(dtype, jnp.floating)
  return jnp.promote_types(dtype, jnp.float32) if floating else jnp.dtype(dtype)


def _filled(part: Sharded | Replicated, count: int) -> Any:
  if isinstance(part, Replicated):
    # XLA aborts where a sum over devices is narrower, and it would lose what is small.
    return jax.tree.map(lambda x: x.astype(summed_dtype(x.dtype)), part.rows)

  def fill_up(rows):
    missing = -rows.shape[0] % count
    if not missing:
      return rows
    filling = jnp.full((missing, *rows.shape[1:]), part.pad_value, rows.dtype)
    # Not `jnp.pad`: XLA's partitioner takes two pads of an array for one, whatever they fill in.
    return jnp.concatenate([rows, filling])

  return jax.tree.map(fill_up, part.rows)


class TokenShards(NamedTuple):
  """How many parts tokens are laid out in, one for each device of the automatic axes."""

  axes: tuple[str, ...]
  count: int

  def split(self, array: Array) -> Array:
    """[N, ...] -> [P, N / P, ...], filled up with zeros, part p on device p."""
    n = array.shape[0]
    size = max(1, -(-n // self.count))
    if size * self.count != n:
      array = jnp.pad(array, [(0, size * self.count - n)] + [(0, 0)] * (array.ndim - 1))
    return self.keep(array.reshape(self.count, size, *array.shape[1:]))

  def join(self, array: Array, n: int) -> Array:
    """[P, N / P, ...] -> [N, ...]: undoes `split`."""
    return array.reshape(-1, *array.shape[2:])[:n]

  def keep(self, array: Array, axis: int = 0) -> Array:
    """The array, its axis of parts laid over the devices."""
    if self.count == 1:
      return array
    return lax.with_sharding_constraint(array, P(*[None] * axis, self.axes))

  def whole(self, array: Array) -> Array:
    """The array, on every device of the automatic axes: fetched where it is used."""
    if self.count == 1:
      return array
    # Without the barrier the partitioner fetches what the array was sliced from, whole.
    return lax.with_sharding_constraint(lax.optimization_barrier(array), P())


def token_shards(vocab_axis: str | None) -> TokenShards:
  """The parts of the mesh in context; the axis of the vocabulary is not one for tokens."""
  axes = tuple(a for a, kind in axis_types().items() if kind == AxisType.Auto and a != vocab_axis)
  return TokenShards(axes, math.prod(axis_size(axis) for axis in axes))


def varying(tree: Any, *axes: str) -> Any:
  """The arrays, all marked as different on the devices of every axis on which one of them is.

  Inside of a `shard_map` a loop's carry must be marked so from the start, and the gradient of an
  operand that was the same on all devices is then their sum.
  """
  leaves = jax.tree.leaves(tree)
  found = frozenset(axes).union(*(varies_over(jax.typeof(leaf)) for leaf in leaves))

  def mark(leaf):
    missing = tuple(sorted(found - varies_over(jax.typeof(leaf))))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(mark, tree)


def varies_over(kind: Any) -> frozenset[str]:
  """The axes on whose devices a value of this type may differ (of `jax.typeof` or `eval_shape`)."""
  # jax 0.10 keeps the axes one level deeper than the versions before it.
  marked = getattr(kind, "manual_axis_type", None)
  return frozenset((getattr(kind, "vma", None) or ()) if marked is None else marked.varying)


def gather(table: Array, index: Array) -> Array:
  """table[index] along the first axis, with a gradient that stays on the devices of its tokens.

  Each part of the tokens adds up its own rows, and the sums travel. Left to the partitioner, the
  cotangents of all tokens may be sent to all devices. On one device it is plain indexing, unless
  the table is narrower than float32: a row that many tokens read would stop growing in its dtype,
  so its gradient is summed in float32 and rounded once (and there is no forward mode).
  """
  if token_shards(None).count == 1 and summed_dtype(table.dtype) == table.dtype:
    return table[index]
  return _gather((table.shape, jnp.dtype(table.dtype)), *varying((table, index)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(kind, table, index):
  del kind
  return table[index]


def _gather_forward(kind, table, index):
  del kind
  return table[index], index


def _gather_backward(kind, index, cotangent):
  shape, dtype = kind
  spread = token_shards(None)
  exact = summed_dtype(dtype)
  flat = cotangent.reshape(-1, *shape[1:]).astype(exact)
  index_PN, cotangent_PN = spread.split(index.reshape(-1)), spread.split(flat)
  zeros = varying((jnp.zeros(shape, exact), index, cotangent))[0]
  sums = jax.vmap(lambda i, c: zeros.at[i].add(c))(index_PN, cotangent_PN)
  return spread.keep(sums).sum(axis=0).astype(dtype), None


_gather.defvjp(_gather_forward, _gather_backward)


def sharded_lookup(
  table: Array, index: Array, axis: str | None, dtype: jnp.dtype | None = None
) -> Array:
  """table[index] for a table whose first axis is spread; each device gives what it holds."""
  axis = inside(axis)
  dtype = dtype or table.dtype
  if axis is None:
    return gather(table, index).astype(dtype)
  here = index - first_row(axis, table.shape[0])
  mine = (here >= 0) & (here < table.shape[0])
  found = gather(table, jnp.where(mine, here, 0)).astype(dtype)
  mine = mine.reshape(*mine.shape, *[1] * (found.ndim - mine.ndim))
  return lax.psum(jnp.where(mine, found, jnp.zeros_like(found)), axis)


def own_part(array: Array, rows: int, axis: str | None) -> Array:
  """This device's `rows` of an array that all devices have whole."""
  axis = inside(axis)
  if axis is None:
    return array
  return lax.dynamic_slice_in_dim(varying(array, axis), first_row(axis, rows), rows)


def gathered(array: Array, axis: str) -> Array:
  """[...] on each device -> [devices of the axis, ...], the same on all of them."""
  everywhere = jnp.zeros((axis_size(axis), *array.shape), array.dtype)
  return lax.psum(everywhere.at[lax.axis_index(axis)].set(array), axis)
