"""Several processes of one run: connection, agreement, and a common end."""

import collections
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
from jax._src import clusters  # no public name detects a cluster
from jax._src.distributed import global_state  # no public name gives the key-value store
from jax.errors import JaxRuntimeError

from vqjax.lab import exits
from vqjax.lab.training.watch import Watch

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds in which all processes must arrive at the same point."""

SILENCE = 30.0
"""Seconds without a heartbeat after which a process counts as dead."""

_calls: collections.Counter[str] = collections.Counter()
_watch: list[Watch] = []


class Process(NamedTuple):
  """The position of this process among the processes of its run.

  Attributes:
    coordinator: host:port of process 0.
    count: number of processes.
    index: number of this process, from 0.
    devices: local ids of its accelerators; None for all.
  """

  coordinator: str
  count: int
  index: int
  devices: list[int] | None = None


def find_process(
  coordinator: str | None, count: int | None, index: int | None, patience: float
) -> Process | None:
  """Complete the arguments from a detected cluster; None for a single process.

  Under Slurm and Open MPI jax gives each process of a machine one of its accelerators;
  JAX_LOCAL_DEVICE_IDS=0,1,2,3 gives it several. `patience` is the number of seconds that a cluster
  may take to name its coordinator.

  Raises:
    ValueError: an argument is missing or wrong.
  """
  if count == 1:
    return None
  ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
  devices = [int(number) for number in ids.split(",")] if ids else None
  address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
  process = Process(address, count, index, None)
  if None in (address, count, index):
    process = process._replace(devices=devices)
    try:
      process = Process(
        *clusters.ClusterEnv.auto_detect_unset_distributed_params(*process, None, int(patience))
      )
    except Exception as error:  # the libraries of clusters raise anything
      problem = f"a cluster was detected that does not tell this process's number ({error})"
      remedy = "give --coordinator, --num-processes and --process-id"
      if (address, count, index) != (None, None, None):
        raise ValueError(f"{problem}. Instead, {remedy}.") from error
      warnings.warn(
        f"{problem}; the process runs alone. If there are others, {remedy}", stacklevel=2
      )
  if process.count == 1 or (coordinator, process.count, process.index) == (None, None, None):
    return None
  options = {
    "--coordinator": process.coordinator,
    "--num-processes": process.count,
    "--process-id": process.index,
  }
  missing = [name for name, value in options.items() if value is None]
  if missing:
    raise ValueError(
      f"{' and '.join(missing)} must be given where JAX detects no cluster; got none."
    )
  host, _, port = process.coordinator.rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 2**16:
    raise ValueError(
      f"--coordinator must be HOST:PORT; got {process.coordinator!r}. Give, say, 10.0.0.1:1234."
    )
  if process.count < 1:
    raise ValueError(
      f"--num-processes must be at least 1; got {process.count}. Leave it out for one process."
    )
  if not 0 <= process.index < process.count:
    raise ValueError(
      f"--process-id must be in [0, {process.count}); got {process.index}. Give every process a"
      " number of its own."
    )
  return process


def start(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  patience: float = PATIENCE,
  silence: float = SILENCE,
) -> None:
  """Connect this process to the others of its run.

  Arguments that are None are detected by jax under Slurm, Open MPI, Kubernetes and on TPU pods.
  Call it before any other use of devices. When a process dies later, all others end within about
  `silence` seconds with a message.

  Args:
    coordinator: host:port of process 0.
    num_processes: number of processes; 1 runs alone, even where a cluster is detected.
    process_id: number of this process, from 0.
    patience: seconds to wait for the others.
    silence: seconds without a heartbeat after which a process counts as dead.

  Raises:
    ValueError: an argument is missing or wrong, or differs between the processes, as may the
      version of jax.
    TimeoutError: the coordinator or another process did not come in time.
    OSError: the coordinator cannot listen at its port.
  """
  process = find_process(coordinator, num_processes, process_id, patience)
  if process is None:
    return
  for name, seconds in (("--patience", patience), ("--silence", silence)):
    if seconds < 1:
      raise ValueError(f"{name} must be at least 1 second; got {seconds:g}. Leave it out.")
  _connect(process, patience, silence)
  _watch.append(Watch(global_state.client, process.index, process.count, silence))
  agree("number of processes", str(process.count), patience)
  agree("version of jax", jax.__version__, patience)


def _connect(process: Process, patience: float, silence: float) -> None:
  """Call `jax.distributed.initialize`, which aborts if the others do not come."""
  deadline = time.monotonic() + patience
  if process.index > 0:
    _wait_for_port(process, patience, deadline)
  outcome: list[Exception | None] = []

  def initialize():
    try:
      jax.distributed.initialize(
        process.coordinator,
        process.count,
        process.index,
        process.devices,
        cluster_detection_method="deactivate",  # `find_process` has done it
        # Both times are longer than ours: when they are over, jax aborts without a remedy.
        initialization_timeout=int(patience) + 60,
        heartbeat_timeout_seconds=int(2 * silence) + 10,
      )
      outcome.append(None)
    except Exception as error:
      outcome.append(error)

  # In a thread, so that this function can give up before jax aborts.
  thread = threading.Thread(target=initialize, daemon=True)
  thread.start()
  thread.join(max(deadline - time.monotonic(), 1.0))
  if not outcome:
    raise TimeoutError(
      f"not all of the {process.count} processes came to {process.coordinator} within {patience:g}"
      " s. Start the command on each with its own --process-id, and a --coordinator on the machine"
      " of process 0."
    )
  (error,) = outcome
  if isinstance(error, JaxRuntimeError):
    raise OSError(
      f"cannot listen at {process.coordinator} ({error}). Choose another port with --coordinator."
    ) from error
  if error is not None:
    raise error


def _wait_for_port(process: Process, patience: float, deadline: float) -> None:
  host, _, port = process.coordinator.rpartition(":")
  while True:
    try:
      socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
      return
    except OSError as error:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f"the coordinator {process.coordinator} does not answer within {patience:g} s ({error})."
          " Start process 0 there, or correct --coordinator."
        ) from error
      time.sleep(0.2)


def is_joined() -> bool:
  """Whether this process is one of several."""
  return global_state.client is not None


def is_main() -> bool:
  """Whether this process is the one that prints and writes."""
  return global_state.process_id == 0


def agree(name: str, value: str, patience: float = PATIENCE) -> None:
  """Return when all processes have called it with the same value.

  Raises:
    ValueError: on every process, where the values differ.
    TimeoutError: a process did not call it within `patience` seconds.
  """
  if not is_joined():
    return
  client, key = global_state.client, _next_key("agree", name)
  client.key_value_set(f"{key}/{global_state.process_id}", value)
  try:
    client.wait_at_barrier(key, int(1000 * patience))
  except JaxRuntimeError as error:
    raise TimeoutError(
      f"not all processes came to compare their {name} within {patience:g} s. Read what the others"
      " print."
    ) from error
  # Every process has set its value before it came to the barrier, so that none is missing here.
  processes = collections.defaultdict(list)
  for path, theirs in client.key_value_dir_get(key):
    processes[theirs].append(int(path.rsplit("/", 1)[1]))
  if len(processes) > 1:
    groups = []
    for theirs, indices in processes.items():
      shown = ", ".join(str(index) for index in sorted(indices)[:8])
      others = f" and {len(indices) - 8} others" if len(indices) > 8 else ""
      groups.append(f"{theirs} on process {shown}{others}")
    raise ValueError(
      f"the processes differ in the {name}: {'; '.join(groups)}. Start all with the same command,"
      " code and data."
    )


def main_first(name: str, make: Callable[[], T]) -> T:
  """Return `make()`, called by process 0 first so that it fills the cache."""
  made = make() if is_main() else None
  from_main(name, lambda: "made")  # the others wait here until the cache is complete
  return made if is_main() else make()


def from_main(name: str, make: Callable[[], str]) -> str:
  """Return on every process the value of `make()`, which process 0 calls."""
  if not is_joined():
    return make()
  key = _next_key("main", name)
  if is_main():
    global_state.client.key_value_set(key, make())
  while True:  # process 0 may need long; the watch ends this process if it dies
    try:
      return global_state.client.blocking_key_value_get(key, 10_000)
    except JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise


def _next_key(kind: str, name: str) -> str:
  """Return a new key for each call; all processes make their calls in one order."""
  _calls[name] += 1
  return f"vqjax/{kind}/{name.replace(' ', '_')}/{_calls[name]}"


def finish() -> None:
  """Disconnect from the other processes, once all are done."""
  if _watch:
    _watch[0].close()
    _watch.clear()
    jax.distributed.shutdown()


def await_verdict(error: Exception) -> None:
  """End this process with a message if another's death caused the error."""
  # XLA raises some of its errors as ValueError, which begin with the code of their status too.
  of_xla = isinstance(error, JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error))
  if _watch and of_xla and "RESOURCE_EXHAUSTED" not in str(error):
    _watch[0].verdict()


def fail(code: int, message: str) -> int:
  """End a failed command in all its processes, with one line on standard error.

  A single process gets `code` back. Several processes all stop within seconds; those without an
  error of their own name the process that had one, and its message.
  """
  if not _watch:
    exits.say(f"error: {message}")
    if global_state.client is None and global_state.service is None:
      return code
  elif _watch.pop().abandon(message) or is_main():
    exits.say(f"error: {message}")
  sys.stdout.flush()  # `os._exit` drops what the buffers hold
  sys.stderr.flush()
  os._exit(code)  # a normal exit would make jax wait for the others
