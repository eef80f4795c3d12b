"""Which process of how many is this one, and where is the first?"""

import os
import warnings
from typing import NamedTuple

from jax._src import clusters  # no public name tells whether there is a cluster


class Place(NamedTuple):
  """Where a process stands in its run.

  Attributes:
    coordinator: host:port of process 0.
    count: number of processes.
    index: number of this process, from 0.
    devices: the accelerators that it may use; None for all.
  """

  coordinator: str
  count: int
  index: int
  devices: list[int] | None = None


def find_place(
  coordinator: str | None, count: int | None, index: int | None, patience: float
) -> Place | None:
  """What was given and what jax detects of a cluster; None for a process that is alone.

  Args:
    coordinator: host:port of process 0, or None.
    count: number of processes, or None.
    index: number of this process, or None.
    patience: seconds that a cluster may take to name its coordinator.

  Raises:
    ValueError: they make no place; the message names the argument that is missing or wrong.
  """
  if count == 1:
    return None
  found = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), count, index, None
  if None in found[:3]:
    found = _detect(*found[:3], patience)
  if found[1] == 1 or (coordinator, *found[1:3]) == (None, None, None):
    return None
  named = dict(zip(("--coordinator", "--num-processes", "--process-id"), found, strict=False))
  missing = [name for name, value in named.items() if value is None]
  if missing:
    raise ValueError(f"no cluster is detected that would tell {' and '.join(missing)}; give it")
  return _checked(Place(*found))


def _detect(coordinator: str | None, count: int | None, index: int | None, patience: float):
  """The arguments, and the devices of this process, filled in by jax where it finds a cluster.

  Under Slurm and Open MPI jax gives each process of a machine one of its accelerators;
  JAX_LOCAL_DEVICE_IDS=0,1,2,3 gives it several.
  """
  chosen = os.environ.get("JAX_LOCAL_DEVICE_IDS")
  devices = [int(number) for number in chosen.split(",")] if chosen else None
  given = coordinator, count, index, devices
  try:
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(*given, None, int(patience))
  except Exception as error:  # whatever a library or service of the cluster raises
    problem = f"a cluster was detected but does not tell this process's place ({error})"
    remedy = "give --coordinator, --num-processes and --process-id"
    if given != (None, None, None, devices):
      raise ValueError(f"{problem}; {remedy}") from error
    warnings.warn(f"{problem}; it runs alone: where there are others, {remedy}", stacklevel=4)
    return given


def _checked(place: Place) -> Place:
  host, _, port = place.coordinator.rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 2**16:
    raise ValueError(f"--coordinator {place.coordinator!r} is not HOST:PORT; give 10.0.0.1:1234")
  if place.count < 1:
    raise ValueError(f"--num-processes {place.count} is below 1; give how many processes there are")
  if not 0 <= place.index < place.count:
    raise ValueError(
      f"--process-id {place.index} is not one of {place.count} processes; give a number from 0 to"
      f" {place.count - 1}, to each another"
    )
  return place
