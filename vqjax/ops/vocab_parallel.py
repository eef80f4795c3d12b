"""Sharding of a vocabulary over one or several mesh axes, and of tokens over all others.

The mesh is the one in context (`jax.set_mesh`); without a mesh all functions leave arrays as they
are. Rows are sharded over named axes by `jax.shard_map`, and every other axis stays automatic:
`on_any_axes` makes explicit axes automatic for a computation and types its results. Tokens are laid
out in as many shards as the automatic axes have devices, so that a loop over tiles of tokens slices
inside each device's shard and never across devices.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from vqjax.ops.host_memory import is_on_host, read_rows
from vqjax.ops.vocabulary import values_of
from vqjax.types import MeshAxes

__all__ = []

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Sharded(NamedTuple):
  """Arrays with an axis of the vocabulary, the value that pads it, and the axis."""

  rows: Any
  pad_value: float | int
  axis: int = 0


class Replicated(NamedTuple):
  """Arrays that every device of the axis has whole.

  Their gradients are summed over the devices in float32 or a wider dtype.
  """

  rows: Any


def axis_types() -> dict[str, AxisType]:
  """Names and types of the axes of the mesh in context; empty without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types))


class Devices(NamedTuple):
  """The devices that a program is for: their platform, kind and number."""

  platform: str
  kind: str
  count: int


def devices() -> Devices:
  """The devices of the mesh in context; without a mesh, one of the default backend."""
  mesh = jax.sharding.get_abstract_mesh()
  # A program for a mesh of devices that are not here is traced by their names.
  device = getattr(mesh, "abstract_device", None)
  return Devices(
    platform=getattr(device, "platform", None) or jax.default_backend(),
    kind=getattr(device, "device_kind", None) or jax.devices()[0].device_kind,
    count=1 if mesh.empty else mesh.size,
  )


def platform() -> str:
  """The platform of the mesh in context, or the default backend."""
  return devices().platform


def names_of(axis: MeshAxes | None) -> tuple[str, ...]:
  """The names of mesh axes; none for None."""
  return (axis,) if isinstance(axis, str) else axis or ()


def axis_size(axis: MeshAxes) -> int:
  """Number of devices along axes of the mesh in context."""
  return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names_of(axis))


def inside(axis: MeshAxes | None) -> MeshAxes | None:
  """The axes if this code runs in a `shard_map` over all of them; None if arrays are whole."""
  return axis if _kinds_of(axis) == {AxisType.Manual} else None


def in_mesh(axis: MeshAxes | None) -> bool:
  """Whether the mesh in context has the axes."""
  return bool(names_of(axis)) and None not in _kinds_of(axis)


def _kinds_of(axis):
  """The types of the axes in the mesh in context, None for an axis that it lacks."""
  kinds = axis_types()
  return {kinds.get(name) for name in names_of(axis)}


def check_axes(axis: MeshAxes) -> None:
  """Raise ValueError unless rows can be sharded over the axes in the mesh in context."""
  names, kinds = names_of(axis), axis_types()
  if not in_mesh(axis) or len({*names}) < len(names):
    raise ValueError(
      f"`vocab_axis` must be an axis of the mesh in context, {', '.join(kinds)}, or a tuple of"
      f" different ones; got {axis!r}. Use None for whole rows on every device."
    )
  if AxisType.Manual in _kinds_of(axis) and not inside(axis):
    raise ValueError(
      f"`vocab_axis` {axis!r} must be whole inside or outside of a `jax.shard_map`; got one over a"
      " part of it. Give the shard_map all of these axes, or leave them out of it."
    )


def rows_in_all(axis: MeshAxes | None, rows: int) -> int:
  """Number of rows on all devices of an axis of which this device has `rows`."""
  return rows if inside(axis) is None else rows * axis_size(axis)


def first_row(axis: MeshAxes | None, rows: int) -> Array | int:
  """Index in the whole vocabulary of the first of this device's `rows`."""
  return 0 if inside(axis) is None else lax.axis_index(axis) * rows


def over_vocabulary(
  axis: MeshAxes | None,
  body: Callable[..., Any],
  rows: Any,
  *shared: Any,
) -> Any:
  """`body(arrays of rows, *shared)` in a `shard_map`, each device with its own rows.

  The body must reduce over the axis, so that it returns equal values on all of its devices. Without
  a mesh in context, with one device on the axis, or inside of a `shard_map` over it, the body is
  called as it is. Rows that the number of devices does not divide are padded.

  Args:
    axis: mesh axis over which the rows are sharded, or a tuple of several, or None.
    body: called with the arrays of `rows`, in the same tree, and all of `shared`.
    rows: a tree whose leaves are `Sharded` or `Replicated`.
    *shared: trees of arrays that every device has whole, such as hidden vectors.

  Raises:
    ValueError: the mesh in context has no such axis, an axis is given twice, or a `shard_map` is
      over some of them alone.
  """
  each = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, Sharded | Replicated))
  arrays = each(lambda part: part.rows, rows)
  kinds = axis_types()
  if axis is not None and not kinds and jax.device_count() > 1:
    warnings.warn(
      f"`vocab_axis` {axis!r} has no mesh in context: each device holds the whole vocabulary. Enter"
      " a mesh that has the axis, `with jax.set_mesh(mesh):`, or give vocab_axis=None.",
      stacklevel=2,
    )
  if not names_of(axis) or not kinds or inside(axis):
    return body(arrays, *shared)
  check_axes(axis)
  count = axis_size(axis)
  if count == 1:
    return body(arrays, *shared)
  padded = each(lambda part: _padded(part, count), rows)
  spec = lambda part: P(*[None] * part.axis, axis) if isinstance(part, Sharded) else P()

  widened = jax.tree.map(summable, shared)
  differ = lambda a, b: any(x.dtype != y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b))))
  is_narrow = differ(padded, arrays) or differ(widened, shared)

  def local(padded, *widened):
    # `varying` before `astype`: its transpose, the psum of the gradient, then adds float32 numbers.
    narrow = lambda x, like: x if x.dtype == like.dtype else varying(x, axis).astype(like.dtype)
    found = body(*jax.tree.map(narrow, (padded, *widened), (arrays, *shared)))
    # What is made of such arrays alone is equal on all devices, and only JAX does not know it.
    return jax.tree.map(functools.partial(_of_first, axis=axis), found) if is_narrow else found

  in_specs = each(spec, rows), *[P()] * len(shared)
  mapped = jax.shard_map(local, in_specs=in_specs, out_specs=P(), axis_names={*names_of(axis)})
  # Outside of jit a shard_map that leaves axes automatic is an error.
  return jax.jit(mapped)(padded, *widened)


def summable(x: Any) -> Any:
  """An array in a dtype in which its gradient may be summed over devices."""
  is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(summed_dtype(x.dtype)) if is_float else x


def _of_first(x, axis):
  """The value of the first device, known to be that of all; `x` if it is known to be already."""
  # Over several axes a value that is equal along one of them may yet vary along another.
  among = tuple(name for name in names_of(axis) if name in varies_over(jax.typeof(x)))
  if not among:
    return x
  summed = summable(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32)
  first = jnp.where(lax.axis_index(among) == 0, summed, jnp.zeros_like(summed))
  return lax.psum(first, among).astype(x.dtype)


def on_any_axes(
  compute: Callable[[Any], Any],
  arrays: Any,
  batch: Array | None = None,
  vocab: int | None = None,
  vocab_axis: MeshAxes | None = None,
) -> Any:
  """`compute(arrays)`, with the explicit axes of the mesh in context made automatic.

  Tokens of a result are sharded as those of `batch`, its axis of `vocab` elements over
  `vocab_axis`, if that is explicit and divides them, and its other axes are not sharded.

  Args:
    compute: the computation on automatic axes.
    arrays: a tree of its arguments, of JAX's or NumPy's arrays.
    batch: the argument whose leading axes are those of the tokens: integers have no other axes,
      floating-point vectors have one more. None: no result has tokens.
    vocab: size of the vocabulary, or None.
    vocab_axis: mesh axis over which the vocabulary is sharded, or a tuple of several, or None.
  """
  compute = own_promotion(compute)
  if AxisType.Explicit not in axis_types().values():
    return compute(arrays)

  # An array that was made without a mesh gets a type here, or its cotangent would have automatic
  # axes, which some operations that it passes outside of `compute` refuse. NumPy's have none.
  def typed(x):
    x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
    is_untyped = isinstance(x, jax.Array) and jax.typeof(x).sharding.mesh.empty
    return reshard(x, P()) if is_untyped else x

  arrays, batch = jax.tree.map(typed, (arrays, batch))
  mesh = jax.sharding.get_abstract_mesh()
  kinds = [AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types]
  before = _OUTSIDE.set(mesh)
  try:
    with use_abstract_mesh(mesh.update(axis_types=tuple(kinds))):
      found = compute(automatic(arrays))
  finally:
    _OUTSIDE.reset(before)
  spec = functools.partial(_spec, batch=batch, vocab=vocab, vocab_axis=vocab_axis)
  place = lambda x: reshard(x, spec(x.shape)) if isinstance(x, jax.Array) else x
  return jax.tree.map(place, found)


def own_promotion(function: Callable[_P, _T]) -> Callable[_P, _T]:
  """The function with NumPy's rules for operands of other ranks and dtypes, while it is traced.

  A block of scores [W, *B] meets numbers [*B] and float32 sums meet narrow operands on purpose. The
  modes `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion` are for the code of callers.
  """

  @functools.wraps(function)
  def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
      with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return function(*args, **kwargs)
    except TypeError as error:
      if "forward-mode" in str(error) and _OF_FORWARD_MODE not in getattr(error, "__notes__", ()):
        error.add_note(_OF_FORWARD_MODE)
      raise

  return wrapped


_OF_FORWARD_MODE = (
  "The losses have rules for reverse mode; `vqjax.ops.forward_mode.linear_log_prob_jvp` computes"
  " the derivative of a log-probability in a direction."
)


def automatic(tree: Any) -> Any:
  """The arrays, with types for the mesh in context, none of whose axes is explicit.

  Arrays that were made where axes are explicit, such as the variables of a layer, cannot be used
  before.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return tree

  def cast(x):
    there = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    is_explicit = there is not None and AxisType.Explicit in there.axis_types
    return reshard(x, P()) if is_explicit else x

  return jax.tree.map(lambda x: cast(x) if isinstance(x, jax.Array) else x, tree)


def for_any_axes(batch: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
  """A decorator of functions of arrays; the argument `batch` has their tokens.

  The function gets the arrays that variables, such as an `nnx.Param`, hold.
  """

  def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
    signature = inspect.signature(function)
    compute = own_promotion(function)

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
      values, named = values_of((args, kwargs))
      if AxisType.Explicit not in axis_types().values():
        return compute(*values, **named)
      given = signature.bind(*values, **named).arguments
      return on_any_axes(lambda given: compute(**given), given, given[batch])

    return wrapped

  return decorate


_OUTSIDE = contextvars.ContextVar("the mesh around `on_any_axes`", default=None)


def outside(tree: Any) -> Any:
  """The arrays, replicated and with types for the mesh around `on_any_axes`.

  For what leaves a computation by another way than as its result.
  """
  mesh = _OUTSIDE.get()
  if mesh is None:
    return tree
  with use_abstract_mesh(mesh):
    return jax.tree.map(lambda x: reshard(x, P()) if isinstance(x, jax.Array) else x, tree)


def _spec(shape, batch, vocab, vocab_axis):
  """The PartitionSpec of a result."""
  tokens, spec = (), ()
  if batch is not None:
    # Vectors have one axis more than their tokens.
    count = batch.ndim - jnp.issubdtype(batch.dtype, jnp.floating)
    tokens = batch.shape[:count]
    spec = (*jax.typeof(batch).sharding.spec, *[None] * count)[:count]
  # A result without the tokens' axes, such as a table or a scalar, is sharded by its V alone.
  if shape[: len(tokens)] != tokens:
    tokens, spec = (), ()
  rest = [None] * (len(shape) - len(tokens))
  used = [name for part in spec for name in (part if isinstance(part, tuple) else (part,))]
  is_free = _kinds_of(vocab_axis) == {AxisType.Explicit} and not {*names_of(vocab_axis)} & {*used}
  if is_free and vocab in shape[len(tokens) :] and vocab % axis_size(vocab_axis) == 0:
    rest[shape[len(tokens) :].index(vocab)] = vocab_axis
  return P(*spec, *rest)


def bias_of_padding(bias: Array | None, rows: int, axis: MeshAxes | None) -> Array | None:
  """The bias, or zeros if rows are padded: only a bias of -inf removes padding."""
  ragged = in_mesh(axis) and inside(axis) is None and rows % axis_size(axis)
  return jnp.zeros((rows,), jnp.float32) if bias is None and ragged else bias


def summed_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """The dtype to sum many numbers of `dtype` in: float32 for narrower floats."""
  dtype = jnp.dtype(dtype)
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if is_narrow else dtype


def _padded(part, count):
  if isinstance(part, Replicated):
    # The gradient is summed over devices in this dtype: XLA aborts on a bfloat16 sum of a manual
    # axis, and small terms would be lost.
    return jax.tree.map(lambda x: x.astype(summed_dtype(x.dtype)), part.rows)

  def pad(rows):
    missing = -rows.shape[part.axis] % count
    if not missing:
      return rows
    shape = [missing if i == part.axis else size for i, size in enumerate(rows.shape)]
    padding = jnp.full(shape, part.pad_value, rows.dtype)
    # Not `jnp.pad`: XLA's partitioner merges two pads of one array that differ only in their value.
    return jnp.concatenate([rows, padding], axis=part.axis)

  return jax.tree.map(pad, part.rows)


class TokenShards(NamedTuple):
  """Layout of tokens in shards, one for each device of the automatic axes."""

  axes: tuple[str, ...]
  count: int

  def split(self, array: Array) -> Array:
    """An array [N, ...] as [P, ceil(N / P), ...], zero-padded, shard p on device p."""
    n = array.shape[0]
    size = max(1, -(-n // self.count))
    if size * self.count != n:
      array = jnp.pad(array, [(0, size * self.count - n)] + [(0, 0)] * (array.ndim - 1))
    return self.keep(array.reshape(self.count, size, *array.shape[1:]))

  def join(self, array: Array, n: int) -> Array:
    """The array [N, ...] of its shards [P, ceil(N / P), ...], the inverse of `split`."""
    return array.reshape(-1, *array.shape[2:])[:n]

  def keep(self, array: Array, axis: int = 0) -> Array:
    """The array with its axis of shards placed on the devices."""
    if self.count == 1:
      return array
    return lax.with_sharding_constraint(array, P(*[None] * axis, self.axes))

  def whole(self, array: Array) -> Array:
    """The array replicated over the automatic axes, gathered at this point."""
    if self.count == 1:
      return array
    # Without the barrier the partitioner gathers the whole array that this one is a slice of.
    return lax.with_sharding_constraint(lax.optimization_barrier(array), P())


def token_shards(vocab_axis: MeshAxes | None) -> TokenShards:
  """Token shards of the mesh in context: all automatic axes but `vocab_axis`."""
  kinds, own = axis_types(), names_of(vocab_axis)
  axes = tuple(a for a, kind in kinds.items() if kind == AxisType.Auto and a not in own)
  return TokenShards(axes, axis_size(axes))


def varying(tree: Any, *axes: MeshAxes | None) -> Any:
  """The arrays, cast to vary over `axes` and all axes over which any of them does.

  Inside of a `shard_map` the carry of a loop must have its type from the start, so it has to vary
  before it meets arrays that do. The transpose of the cast is a psum: the gradient of an operand
  that was equal on all devices becomes the sum over them, which is taken in float32 or wider.
  """
  if AxisType.Manual not in axis_types().values():
    return tree
  leaves = jax.tree.leaves(tree)
  union = frozenset().union(*map(names_of, axes), *(varies_over(jax.typeof(x)) for x in leaves))

  def mark(leaf):
    missing = tuple(sorted(union - varies_over(jax.typeof(leaf))))
    if not missing:
      return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return lax.pcast(leaf, missing, to="varying")
    # XLA aborts on a bfloat16 sum over a manual axis of a CPU, and small terms would be lost.
    wide = leaf.astype(summed_dtype(leaf.dtype))
    return lax.pcast(wide, missing, to="varying").astype(leaf.dtype)

  return jax.tree.map(mark, tree)


def varies_over(kind: Any) -> frozenset[str]:
  """The manual axes over which a value of this type (`jax.typeof`) may vary."""
  # jax 0.10 keeps the axes one level deeper than the versions before it.
  marked = getattr(kind, "manual_axis_type", None)
  return frozenset((getattr(kind, "vma", None) or ()) if marked is None else marked.varying)


def gather(table: Array, index: Array) -> Array:
  """`table[index]`, with a gradient that is summed on the devices of its tokens.

  Each shard of the tokens adds up the cotangents of its rows, and the sums are all-reduced. The
  partitioner by itself may send the cotangents of all tokens to all devices. On one device this is
  plain indexing, unless the table is narrower than float32: the gradient of a row that many tokens
  read would stop growing in its dtype, so it is summed in float32 and rounded once. That case has
  no forward mode. A table in the memory of the host is read there, and has no gradient.
  """
  if is_on_host(table):
    return read_rows(table, index)
  if token_shards(None).count == 1 and summed_dtype(table.dtype) == table.dtype:
    return table[index]
  return _gather((table.shape, jnp.dtype(table.dtype)), *varying((table, index)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(kind, table, index):
  del kind
  return table[index]


def _gather_forward(kind, table, index):
  del kind
  # Columns that other axes shard are gathered, as its gradient below has whole rows on each device:
  # XLA of jax 0.12 aborts where the tokens and the columns are sharded over one axis.
  whole = lax.with_sharding_constraint(table, P()) if token_shards(None).count > 1 else table
  return whole[index], index


def _gather_backward(kind, index, cotangent):
  shape, dtype = kind
  shards = token_shards(None)
  wide = summed_dtype(dtype)
  flat = cotangent.reshape(-1, *shape[1:]).astype(wide)
  index_PN, cotangent_PN = shards.split(index.reshape(-1)), shards.split(flat)
  zeros = varying((jnp.zeros(shape, wide), index, cotangent))[0]
  # The padding of a shard adds cotangents of zero to row 0.
  sums = jax.vmap(lambda i, c: zeros.at[i].add(c))(index_PN, cotangent_PN)
  return shards.keep(sums).sum(axis=0).astype(dtype), None


_gather.defvjp(*map(own_promotion, (_gather_forward, _gather_backward)))


def sharded_lookup(
  table: Array, index: Array, axis: MeshAxes | None, dtype: jnp.dtype | None = None
) -> Array:
  """`table[index]` of a table that is sharded over `axis`, on all devices."""
  axis = inside(axis)
  dtype = dtype or table.dtype
  if axis is None:
    return gather(table, index).astype(dtype)
  local = index - first_row(axis, table.shape[0])
  is_local = (local >= 0) & (local < table.shape[0])
  rows = gather(table, jnp.where(is_local, local, 0)).astype(summed_dtype(dtype))
  is_local = is_local.reshape(*is_local.shape, *[1] * (rows.ndim - is_local.ndim))
  # Exactly one device holds each row, so the sum is that row.
  return lax.psum(jnp.where(is_local, rows, jnp.zeros_like(rows)), axis).astype(dtype)


def common_shift(x: Array, axis: MeshAxes) -> Array:
  """The largest of all devices' values, as a constant of differentiation.

  For the number that exponentials are relative to, on which their normalised sums do not depend:
  `pmax` has no derivative, and second derivatives pass through this value.
  """
  return lax.pmax(lax.stop_gradient(x), axis)


def from_owner(x: Array, row: Array, rows: int, axis: MeshAxes) -> Array:
  """A token's value on the device that has its `row`, which is below 0 or above on the others."""
  # Exactly one device has each row, so the sum is its value; unlike `pmax` it has a derivative.
  return lax.psum(jnp.where((row >= 0) & (row < rows), x, jnp.zeros_like(x)), axis)


def own_part(array: Array, rows: int, axis: MeshAxes | None) -> Array:
  """This device's `rows` rows of an array that is whole on all devices of `axis`."""
  axis = inside(axis)
  if axis is None:
    return array
  return lax.dynamic_slice_in_dim(varying(array, axis), first_row(axis, rows), rows)


def gathered(array: Array, axis: MeshAxes) -> Array:
  """The arrays [...] of all devices, stacked on each as [devices of the axis, ...]."""
  # A psum of disjoint parts: JAX knows its result to be equal on all devices, unlike `all_gather`.
  wide = array.astype(summed_dtype(array.dtype))
  everywhere = jnp.zeros((axis_size(axis), *array.shape), wide.dtype)
  own = everywhere.at[lax.axis_index(axis)].set(wide)
  return lax.psum(own, axis).astype(array.dtype)
