"""How do the processes of a run find each other, agree, and end together?"""

import collections
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src.distributed import global_state  # no public name gives the key-value store
from jax.errors import JaxRuntimeError

from vqjax.lab.training.cluster import Place, find_place
from vqjax.lab.training.watch import Watch

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds in which all processes must have come to the same point."""

SILENCE = 30.0
"""Seconds after which a process that gives no sign of life is dead."""

_calls: collections.Counter[str] = collections.Counter()
_watch: list[Watch] = []


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  patience: float = PATIENCE,
  silence: float = SILENCE,
) -> None:
  """Joins this process to the others of its run; returns at once where it is alone.

  What is not given is what jax detects of Slurm, Open MPI, Kubernetes or a TPU pod. Comes before
  any other use of devices. From here on, a process that dies takes all down soon after `silence`
  seconds, and each says so.

  Args:
    coordinator: host:port of process 0, by which the others find it.
    num_processes: how many processes there are; 1 runs alone also where a cluster is detected.
    process_id: which of them this is, from 0.
    patience: seconds to wait for the others.
    silence: seconds without a sign of life after which a process counts as dead.

  Raises:
    ValueError: the arguments do not make a place, or the processes differ in them or in versions.
    TimeoutError: the coordinator, or one of the others, did not come in time.
    OSError: the coordinator cannot listen at its port.
  """
  place = find_place(coordinator, num_processes, process_id, patience)
  if place is None:
    return
  for name, seconds in (("--patience", patience), ("--silence", silence)):
    if seconds < 1:
      raise ValueError(f"{name} {seconds:g} is below 1; give a number of seconds")
  _connect(place, patience, silence)
  _watch.append(Watch(global_state.client, place.index, place.count, silence))
  agree("number of processes", str(place.count), patience)
  agree("version of jax", jax.__version__, patience)


def _connect(place: Place, patience: float, silence: float) -> None:
  """`jax.distributed.initialize`, which would abort the process where the others do not come."""
  deadline = time.monotonic() + patience
  if place.index > 0:
    _wait_for_port(place, patience, deadline)
  outcome: list[Exception | None] = []

  def initialize():
    try:
      jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.index,
        place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=int(patience) + 60,
        heartbeat_timeout_seconds=int(2 * silence) + 10,
      )
      outcome.append(None)
    except Exception as error:
      outcome.append(error)

  thread = threading.Thread(target=initialize, daemon=True)
  thread.start()
  thread.join(max(deadline - time.monotonic(), 1.0))
  if not outcome:
    raise TimeoutError(
      f"not all of the {place.count} processes came to {place.coordinator} within {patience:g} s;"
      f" start the command on each with its own --process-id, and a --coordinator on the machine of"
      " process 0"
    )
  if isinstance(outcome[0], JaxRuntimeError):
    raise OSError(
      f"cannot listen at {place.coordinator} ({outcome[0]}); choose another port with --coordinator"
    ) from outcome[0]
  if outcome[0] is not None:
    raise outcome[0]


def _wait_for_port(place: Place, patience: float, deadline: float) -> None:
  host, _, port = place.coordinator.rpartition(":")
  while True:
    try:
      socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
      return
    except OSError as error:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f"the coordinator {place.coordinator} does not answer within {patience:g} s ({error});"
          " start process 0 there, or correct --coordinator"
        ) from error
      time.sleep(0.2)


def is_joined() -> bool:
  """Whether this process is one of several."""
  return global_state.client is not None


def is_main() -> bool:
  """Whether this process prints and writes what only one may."""
  return global_state.process_id == 0


def agree(name: str, value: str, patience: float = PATIENCE) -> None:
  """Returns when all processes have come here with the same value.

  Raises:
    ValueError: on every process, where they differ; it says which process has which.
    TimeoutError: one of them did not come within `patience` seconds.
  """
  if not is_joined():
    return
  client, key = global_state.client, _key("agree", name)
  client.key_value_set(f"{key}/{global_state.process_id}", value)
  try:
    client.wait_at_barrier(key, int(1000 * patience))
  except JaxRuntimeError as error:
    raise TimeoutError(
      f"not all processes came to compare their {name} within {patience:g} s; look at what the"
      " others print"
    ) from error
  found = collections.defaultdict(list)
  for path, theirs in client.key_value_dir_get(key):
    found[theirs].append(int(path.rsplit("/", 1)[1]))
  if len(found) > 1:
    each = "; ".join(f"{theirs} on {_processes(found[theirs])}" for theirs in found)
    raise ValueError(
      f"the processes differ in the {name}: {each}. Start all with the same command, code and data"
    )


def _processes(indices: list[int]) -> str:
  shown = ", ".join(str(index) for index in sorted(indices)[:8])
  return f"process {shown}" + (f" and {len(indices) - 8} others" if len(indices) > 8 else "")


def main_first(name: str, make: Callable[[], T]) -> T:
  """`make()`, on process 0 before the others: what it leaves in a cache need not be made twice."""
  made = make() if is_main() else None
  from_main(name, lambda: "made")
  return made if is_main() else make()


def from_main(name: str, make: Callable[[], str]) -> str:
  """What `make()` returns on process 0, where alone it is called."""
  if not is_joined():
    return make()
  key = _key("main", name)
  if is_main():
    global_state.client.key_value_set(key, make())
  return _wait_for(key)


def _wait_for(key: str) -> str:
  """The value of a key; waits as long as process 0 needs: that it died is the watch's business."""
  while True:
    try:
      return global_state.client.blocking_key_value_get(key, 10_000)
    except JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise


def _key(kind: str, name: str) -> str:
  """A key of its own for every call: all processes make the same calls in the same order."""
  _calls[name] += 1
  return f"vqjax/{kind}/{name.replace(' ', '_')}/{_calls[name]}"


def finish() -> None:
  """Leaves the others in order, once all are done."""
  if _watch:
    _watch[0].close()
    _watch.clear()
    jax.distributed.shutdown()


def await_verdict(error: Exception) -> None:
  """Returns unless the error is that another process died: then this one ends here, saying so."""
  if _watch and isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
    _watch[0].verdict()


def fail(code: int, message: str) -> int:
  """Ends a command that failed, in all its processes, with one line on standard error.

  A process that is alone gets its code back. Of several, all stop within seconds: those that met no
  error of their own tell which process did, and why.
  """
  if not _watch:
    print(f"error: {message}", file=sys.stderr)
    if global_state.client is None and global_state.service is None:
      return code
  elif _watch.pop().abandon(message) or is_main():
    print(f"error: {message}", file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # jax would wait for the others, whom it takes for healthy
