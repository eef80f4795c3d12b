"""Device meshes, and rules that map logical axes of arrays to mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = [
  "RULES",
  "MeshShape",
  "batch_sharding",
  "constrain",
  "global_batch",
  "local_rows",
  "make_mesh",
  "replicated",
  "shardings",
  "spec",
]

AXES = ("data", "fsdp", "model")
"""Axes of every mesh: `data` and `fsdp` split the batch, `fsdp` and `model` the parameters."""

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
  ("batch", ("data", "fsdp")),
  ("vocab", ("model",)),
  ("ngrams", ("fsdp", "model")),
  ("ngrams", ("model",)),
  ("codes", ("model",)),
  ("groups", ("model",)),
  ("heads", ("model",)),
  ("mlp", ("model",)),
  ("embed", ("fsdp",)),
  ("table_embed", ("fsdp", "model")),
  ("table_embed", ("fsdp",)),
  ("table_embed", ("model",)),
)
"""Pairs (logical axis, mesh axes), in order of preference.

`table_embed` is the width of a table with a row for each token, code or group: if its rows cannot
be sharded over `model`, its width is, so that no device holds the whole table. The rows of a table
of `ngrams` are over all axes of parameters: a step reads few of them, and gathers none.
"""


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """The number of devices along each axis of a mesh.

  Attributes:
    data: number of groups of devices; each group holds all parameters and a part of every batch.
      None: as many as there are devices for.
    fsdp: number of devices over which a group shards parameters and its part of every batch.
    model: number of devices over which parameters and the computation of each token are sharded.

  Raises:
    ValueError: a number is below 1.
  """

  data: int | None = None
  fsdp: int = 1
  model: int = 1

  def __post_init__(self):
    for name, count in dataclasses.asdict(self).items():
      if count is not None and count < 1:
        raise ValueError(
          f"`train.mesh.{name}` must be at least 1; got {count}. 1 leaves the axis unused."
        )


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes `AXES`, all of type Auto.

  Args:
    shape: the number of devices along each axis.
    devices: the devices to use, of which a single process may leave out the last ones; None: all.

  Raises:
    ValueError: there are too few devices, their number is not divisible, or devices of several
      processes would be left out.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = _sizes(shape, len(devices))
  needed = math.prod(sizes)
  if needed > len(devices):
    raise ValueError(
      f"`train.mesh` {_text(sizes)} must have at most {len(devices)} devices; got {needed}. Lower"
      " one of its axes."
    )
  if needed < len(devices) and len({device.process_index for device in devices}) > 1:
    raise ValueError(
      f"`train.mesh` {_text(sizes)} must use all {len(devices)} devices of several processes; got"
      f" {needed}. Leave out train.mesh.data to use them all."
    )
  # In this order neighbours on the mesh are neighbours on the network. A mesh axis may be a part of
  # an axis of a TPU's torus, such as 8 devices of 4 x 4 x 4.
  order = create_device_mesh(sizes, devices[:needed], allow_split_physical_axes=True)
  return Mesh(order, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _sizes(shape: MeshShape, devices: int) -> tuple[int, int, int]:
  share = shape.fsdp * shape.model
  data = shape.data
  if data is None and devices % share:
    raise ValueError(
      f"`train.mesh` must have fsdp x model that divides {devices} devices; got fsdp={shape.fsdp}"
      f" and model={shape.model}. Change them, or give train.mesh.data too."
    )
  return devices // share if data is None else data, shape.fsdp, shape.model


def _text(sizes: Sequence[int]) -> str:
  return f"({', '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))})"


def spec(
  logical: Sequence[str | None],
  shape: Sequence[int],
  mesh: Mesh | AbstractMesh,
  rules: Sequence[tuple[str, tuple[str, ...]]] = RULES,
) -> P:
  """The PartitionSpec of an array whose dimensions have these logical names.

  A rule applies to a dimension if none of its mesh axes is used by another dimension and their
  number of devices divides its length. Arrays cannot be sharded unevenly, so that for a prime
  vocabulary `model` is left to the width.
  """
  mesh_axes: dict[int, tuple[str, ...]] = {}
  for name, axes in rules:
    used = {axis for some in mesh_axes.values() for axis in some}
    size = math.prod(mesh.shape[axis] for axis in axes)
    for at, (logical_axis, length) in enumerate(zip(logical, shape, strict=True)):
      free = at not in mesh_axes and not used & set(axes)
      if logical_axis == name and free and length % size == 0:
        mesh_axes[at] = axes
        used |= set(axes)
  return P(*(mesh_axes.get(at) for at in range(len(shape))))


def constrain(array: jax.Array, logical: Sequence[str | None]) -> jax.Array:
  """The array, sharded by `RULES` if the mesh in context has the axes `AXES`."""
  mesh = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types)) if not mesh.empty else {}
  if any(kinds.get(axis) != AxisType.Auto for axis in AXES):
    return array
  return lax.with_sharding_constraint(array, spec(logical, array.shape, mesh))


def shardings(logical: Any, arrays: Any, mesh: Mesh) -> Any:
  """A NamedSharding for each array of a tree, from tuples of logical axes."""
  sharding = lambda names, array: NamedSharding(mesh, spec(names, array.shape, mesh))
  return jax.tree.map(sharding, logical, arrays, is_leaf=lambda x: isinstance(x, tuple))


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of an array that is replicated on every device."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of the rows of a batch over `data` and `fsdp`."""
  return NamedSharding(mesh, P(("data", "fsdp")))


def check_batch(rows: int, mesh: Mesh) -> None:
  """Raise ValueError unless `data` and `fsdp` divide the rows of a batch."""
  data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
  if rows % (data * fsdp):
    raise ValueError(
      f"`train.batch` / train.accumulate must be divisible by data={data} x fsdp={fsdp} devices;"
      f" got {rows} rows. Change it, or set train.mesh.data."
    )


def local_rows(rows: int, mesh: Mesh) -> np.ndarray:
  """Sorted indices of the batch rows that this process's devices hold, int64."""
  held = batch_sharding(mesh).addressable_devices_indices_map((rows,))
  every = np.arange(rows)
  return np.unique(np.concatenate([every[index] for index in held.values()]))


def global_batch(
  local: Mapping[str, Any], rows: np.ndarray, batch: int, mesh: Mesh
) -> dict[str, Any]:
  """Arrays of `batch` rows on the mesh, from the rows read by this process."""
  sharding = batch_sharding(mesh)
  position = np.full(batch, -1)
  position[rows] = np.arange(len(rows))

  def put(array: np.ndarray) -> jax.Array:
    if sharding.is_fully_addressable:
      return jax.device_put(array, sharding)
    shape = batch, *array.shape[1:]
    return jax.make_array_from_callback(shape, sharding, lambda index: array[position[index[0]]])

  return jax.tree.map(lambda array: put(np.asarray(array)), dict(local))
