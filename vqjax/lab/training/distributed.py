"""Several processes of one run: connection, agreement, and a common end.

JAX finds the processes of a cluster, sends heartbeats, and aborts all processes when one is lost.
This module compares what must be equal in all, and gives each end of a run one clear last line.
"""

import collections
import contextlib
import ctypes
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.errors import JaxRuntimeError

from vqjax.lab import exits

__all__ = []

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds in which all processes must arrive at the same point."""

SILENCE = 30.0
"""Seconds without a heartbeat after which a process counts as dead."""

GRACE = 2.0
"""Seconds in which the other processes report their own errors before process 0 ends."""

DAY = 24 * 3600.0
"""Seconds to wait for a living process; its death ends the wait earlier."""


class Group(NamedTuple):
  """What this process knows of its run's processes.

  Attributes:
    index: number of this process, from 0.
    silence: seconds without a heartbeat after which a process counts as dead.
    on_abort: the callback of `_explain_abort`, of which C holds only the address.
  """

  index: int
  silence: float
  on_abort: Callable


_group: list[Group] = []
_calls: collections.Counter[str] = collections.Counter()


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
  Under Slurm and Open MPI it gives each process of a machine one of its accelerators;
  JAX_LOCAL_DEVICE_IDS=0,1,2,3 gives it several. Call it before any other use of devices. When a
  process dies later, all others end within about `silence` seconds with a message.

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
  is_detected = (coordinator, num_processes, process_id) == (None, None, None)
  place = (coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"), num_processes, process_id)
  counts = map(os.environ.get, ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
  if num_processes == 1 or (is_detected and "1" in counts):
    return
  if not is_detected:
    _check(*place)
  for name, seconds in (("--patience", patience), ("--silence", silence)):
    if seconds < 1:
      raise ValueError(f"{name} must be at least 1 second; got {seconds:g}. Leave it out.")
  try:
    _connect(place, patience, silence)
  except OSError:
    raise
  except Exception as error:  # the libraries of clusters raise anything
    remedy = "give --coordinator, --num-processes and --process-id"
    if not is_detected:
      raise ValueError(
        f"the place of this process among the others is not known ({error}). Instead, {remedy}."
      ) from error
    # The words of jax where there is no cluster, and where this process has used its devices.
    if not re.search("(must|should) be defined|must be called before", str(error)):
      warnings.warn(
        f"a cluster was detected that does not tell this process's number ({error}); the process"
        f" runs alone. If there are others, {remedy}",
        stacklevel=2,
      )
    return
  index = jax.process_index() if process_id is None else process_id
  _group.append(Group(index, silence, _explain_abort(index)))
  if num_processes is not None:
    agree("number of processes", str(num_processes), patience)
  agree("version of jax", jax.__version__, patience)


def _check(coordinator: str | None, count: int | None, index: int | None) -> None:
  """Check the options that say which of several processes this is."""
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
      raise ValueError(
        f"--coordinator must be HOST:PORT; got {coordinator!r}. Give, say, 10.0.0.1:1234."
      )
  if count is not None and count < 1:
    raise ValueError(
      f"--num-processes must be at least 1; got {count}. Leave it out for one process."
    )
  if index is not None and not 0 <= index < (count or index + 1):
    raise ValueError(
      f"--process-id must be in [0, {count or '--num-processes'}); got {index}. Give every process"
      " a number of its own."
    )


def _connect(
  place: tuple[str | None, int | None, int | None], patience: float, silence: float
) -> None:
  """Call `jax.distributed.initialize`, which aborts if the others do not come."""
  errors: list[Exception | None] = []

  def initialize() -> None:
    try:
      jax.distributed.initialize(
        *place,
        # Slurm would choose the accelerators of a process whose place is given.
        cluster_detection_method=None if None in place else "deactivate",
        initialization_timeout=int(patience) + 60,  # longer than ours: jax gives no remedy
        heartbeat_timeout_seconds=int(silence),
        shutdown_timeout_seconds=int(DAY),
      )
      errors.append(None)
    except Exception as error:
      errors.append(error)

  # In a thread, so that signals are handled here, and this function gives up before jax aborts.
  thread = threading.Thread(target=initialize, daemon=True)
  thread.start()
  thread.join(patience)
  coordinator, count, _ = place
  if not errors:
    who = "the processes" if count is None else f"the {count} processes"
    host, _, port = (coordinator or ":").rpartition(":")
    try:
      if coordinator:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
      raise TimeoutError(
        f"the coordinator {coordinator} does not answer within {patience:g} s ({error})."
        " Start process 0 there, or correct --coordinator."
      ) from error
    raise TimeoutError(
      f"not all of {who} came to {coordinator or 'their coordinator'} within {patience:g} s. Start"
      " the command on each with its own --process-id, and a --coordinator on the machine of"
      " process 0."
    )
  if isinstance(errors[0], JaxRuntimeError):
    raise OSError(
      f"cannot listen at {coordinator} ({errors[0]}). Choose another port with --coordinator."
    ) from errors[0]
  if errors[0] is not None:
    raise errors[0]


def _explain_abort(index: int) -> Callable:
  """Give an abort by jax a last line and the code 1; return a callback that must stay alive.

  jax aborts, with its stack on standard error, when a process is silent or its coordinator is lost.
  Python's own handlers of signals run later in the main thread, which may wait for a device
  forever; a callback from C runs in the aborting thread.
  """
  line = (
    f"error: process {index} has lost another process, see above. Read what that one printed, then"
    " run the same command on all again to resume.\n"
  )

  def explain(signum: int) -> None:
    del signum
    with contextlib.suppress(OSError):  # standard error may be closed
      os.write(2, line.encode())  # not `print`: the main thread may hold its lock
    os._exit(1)

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
  ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
  return handler


def is_joined() -> bool:
  """Whether this process is one of several."""
  return bool(_group)


def is_main() -> bool:
  """Whether this process is the one that prints and writes."""
  return not _group or _group[0].index == 0


def agree(name: str, value: str, patience: float = PATIENCE) -> None:
  """Return when all processes have called it with the same value.

  Raises:
    ValueError: on every process, where the values differ.
    TimeoutError: a process did not call it within `patience` seconds.
  """
  if not is_joined():
    return
  client, key = ocp.multihost.get_jax_distributed_client(), _next_key("agree", name)
  client.key_value_set(f"{key}/{_group[0].index}", value)
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
  client, key = ocp.multihost.get_jax_distributed_client(), _next_key("main", name)
  if is_main():
    client.key_value_set(key, make())
  while True:  # process 0 may need long, and signals are handled between the calls
    try:
      return client.blocking_key_value_get(key, 10_000)
    except JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise


def _next_key(kind: str, name: str) -> str:
  """Return a new key for each call; all processes make their calls in one order."""
  _calls[name] += 1
  return f"vqjax/{kind}/{name.replace(' ', '_')}/{_calls[name]}"


def finish() -> None:
  """Disconnect from the other processes, once all are done."""
  if _group:
    jax.distributed.shutdown()
    _group.clear()
    ctypes.CDLL(None).signal(int(signal.SIGABRT), None)  # the default action


def await_verdict(error: Exception) -> None:
  """Let jax end this process with a message if another's death caused the error."""
  # XLA raises some of its errors as ValueError, which begin with the code of their status too.
  of_xla = isinstance(error, JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error))
  if _group and of_xla and "RESOURCE_EXHAUSTED" not in str(error):
    time.sleep(1.5 * _group[0].silence + GRACE)


def fail(code: int, message: str) -> int:
  """Print the message of a failed command; return its code, with which the process must end.

  The end of one process ends all others within seconds of silence, that of process 0 at once.
  """
  exits.say(f"error: {message}")
  if _group and is_main():
    time.sleep(GRACE)
  return code
