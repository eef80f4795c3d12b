"""Which part of which array does each device of a mesh hold?"""

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

AXES = ("data", "fsdp", "model")
"""Axes of every mesh: `data` and `fsdp` split the batch, `fsdp` and `model` the parameters."""

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
  ("batch", ("data", "fsdp")),
  ("vocab", ("model",)),
  ("codes", ("model",)),
  ("groups", ("model",)),
  ("heads", ("model",)),
  ("mlp", ("model",)),
  ("embed", ("fsdp",)),
  ("table_embed", ("fsdp", "model")),
  ("table_embed", ("fsdp",)),
  ("table_embed", ("model",)),
)
"""Logical axis -> mesh axes, in order of preference.

The width of a table with a row for each token, code or group is `table_embed`: where its rows
cannot be spread over `model`, its width is, so that no device holds all of it.
"""


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """How many devices a run uses along each axis of its mesh.

  Attributes:
    data: groups of devices that each hold all parameters and take a part of every batch; None: as
      many as there are devices for.
    fsdp: devices of a group that share the parameters and take a part of every batch.
    model: devices that share the parameters and compute each token together.

  Raises:
    ValueError: a number below 1; the message names it.
  """

  data: int | None = None
  fsdp: int = 1
  model: int = 1

  def __post_init__(self):
    for name, count in dataclasses.asdict(self).items():
      if count is not None and count < 1:
        raise ValueError(f"train.mesh.{name} {count} is below 1; give a positive int")


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes `AXES`, all automatic, on these devices; None: on all that there are.

  In a single process a smaller mesh takes the first devices.

  Raises:
    ValueError: the devices are too few, are not shared evenly, or would be left without work in
      several processes; the message names the numbers and the remedy.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = _sizes(shape, len(devices))
  needed = math.prod(sizes)
  if needed > len(devices):
    raise ValueError(
      f"train.mesh {_text(sizes)} needs {needed} devices and there are {len(devices)}; lower one of"
      " its axes"
    )
  if needed < len(devices) and len({device.process_index for device in devices}) > 1:
    raise ValueError(
      f"train.mesh {_text(sizes)} takes {needed} of {len(devices)} devices, which several processes"
      " hold; leave out train.mesh.data to use them all"
    )
  # The order in which neighbours on the mesh are neighbours on the network; an axis of the mesh may
  # be a part of one of a TPU's torus, such as 8 of 4 x 4 x 4.
  order = create_device_mesh(sizes, devices[:needed], allow_split_physical_axes=True)
  return Mesh(order, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _sizes(shape: MeshShape, devices: int) -> tuple[int, int, int]:
  share = shape.fsdp * shape.model
  data = shape.data
  if data is None and devices % share:
    raise ValueError(
      f"{devices} devices cannot be shared by train.mesh with fsdp={shape.fsdp} and"
      f" model={shape.model}; give two numbers whose product divides {devices}, or give"
      " train.mesh.data too"
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
  """Mesh axes for each dimension of an array whose dimensions have these logical names.

  A rule applies where none of its mesh axes is taken by another dimension and their devices divide
  this one: arrays cannot be spread unevenly, so a prime vocabulary leaves `model` to the width.
  """
  taken: dict[int, tuple[str, ...]] = {}
  for name, axes in rules:
    used = {axis for some in taken.values() for axis in some}
    size = math.prod(mesh.shape[axis] for axis in axes)
    for at, (logical_axis, length) in enumerate(zip(logical, shape, strict=True)):
      free = at not in taken and not used & set(axes)
      if logical_axis == name and free and length % size == 0:
        taken[at] = axes
        used |= set(axes)
  return P(*(taken.get(at) for at in range(len(shape))))


def constrain(array: jax.Array, logical: Sequence[str | None]) -> jax.Array:
  """The same array, laid out by the rules where a mesh of automatic axes `AXES` is in context."""
  mesh = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types)) if not mesh.empty else {}
  if any(kinds.get(axis) != AxisType.Auto for axis in AXES):
    return array
  return lax.with_sharding_constraint(array, spec(logical, array.shape, mesh))


def shardings(logical: Any, arrays: Any, mesh: Mesh) -> Any:
  """A NamedSharding for each array of a tree, from a tree of the same form with tuples of names."""
  place = lambda names, array: NamedSharding(mesh, spec(names, array.shape, mesh))
  return jax.tree.map(place, logical, arrays, is_leaf=lambda x: isinstance(x, tuple))


def replicated(mesh: Mesh) -> NamedSharding:
  """All of an array on every device."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows of a batch over `data` and `fsdp`."""
  return NamedSharding(mesh, P(("data", "fsdp")))


def check_batch(rows: int, mesh: Mesh) -> None:
  """Nothing, where every device gets the same number of rows.

  Raises:
    ValueError: the devices along `data` and `fsdp` do not divide the rows.
  """
  data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
  if rows % (data * fsdp):
    raise ValueError(
      f"a (micro-)batch of {rows} rows cannot be split over data={data} x fsdp={fsdp} devices; give"
      f" a train.batch / train.accumulate that {data * fsdp} divides, or set train.mesh.data"
    )


def local_rows(rows: int, mesh: Mesh) -> np.ndarray:
  """Which rows of a batch the devices of this process hold, in order, each once: int64."""
  held = batch_sharding(mesh).addressable_devices_indices_map((rows,))
  every = np.arange(rows)
  return np.unique(np.concatenate([every[index] for index in held.values()]))


def global_batch(
  local: Mapping[str, Any], rows: np.ndarray, batch: int, mesh: Mesh
) -> dict[str, Any]:
  """Arrays of `batch` rows on the mesh, from the rows `rows` that this process has read."""
  return jax.tree.map(lambda array: _global(np.asarray(array), rows, batch, mesh), dict(local))


def _global(array: np.ndarray, rows: np.ndarray, batch: int, mesh: Mesh) -> jax.Array:
  sharding = batch_sharding(mesh)
  if sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  place = np.full(batch, -1)
  place[rows] = np.arange(len(rows))
  shape = batch, *array.shape[1:]
  return jax.make_array_from_callback(shape, sharding, lambda index: array[place[index[0]]])
