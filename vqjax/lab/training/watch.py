"""Heartbeats between the processes of a run: when one dies, all end."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from jax.errors import JaxRuntimeError

STOP, ALIVE, OVER = "vqjax/stop", "vqjax/alive", "vqjax/over"
"""Keys in the coordinator's store: the reason to stop, heartbeats, processes that are done."""

GRACE = 2.0
"""Seconds in which a process may report an error itself before another's reason counts."""

DAY = 24 * 3600.0
"""Seconds to wait for a living process; its death ends the wait earlier."""

BEATS = 6
"""Heartbeats within the time after which a silent process counts as dead."""


class Watch:
  """Threads for heartbeats, the reason to stop, and the coordinator.

  They use only the coordinator's key-value store. Process 0 reads all heartbeats: when a process
  has sent none for `silence` seconds, it writes the reason to stop, and every process ends, even
  while its main thread waits for a device. The death of process 0 closes the connections to it.
  """

  def __init__(self, client, index: int, count: int, silence: float):
    """Start the threads; `client` is the connected client of `jax.distributed`."""
    self.client, self.index, self.count, self.silence = client, index, count, silence
    self.over = threading.Event()
    self.last_answer = time.monotonic()
    self.dead: set[str] = set()
    self._send_beat(0)
    # Kept as an attribute: C holds only the address of the callback.
    self.on_abort = _on_abort(lambda: self._exit(self._lost("no connection")))
    runs = self._beat, self._wait_for_stop, self._check_coordinator
    # Daemons, because an exception in the main thread must end the process without waiting.
    self.threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in self.threads:
      thread.start()

  def _send_beat(self, beat: int) -> None:
    self.client.key_value_set(f"{ALIVE}/{self.index}", str(beat), allow_overwrite=True)

  def _beat(self) -> None:
    last: dict[str, tuple[str, float]] = {}
    beat = 0
    try:
      while not self.over.wait(self.silence / BEATS):
        beat += 1
        self._send_beat(beat)
        self.last_answer = time.monotonic()
        if self.index == 0:
          self._check_beats(last)
    except JaxRuntimeError:
      pass  # the coordinator has died, which `_check_coordinator` notices too

  def _check_beats(self, last: dict[str, tuple[str, float]]) -> None:
    """Update {process: (heartbeat, time)}; stop all where a heartbeat is too old."""
    now, done = time.monotonic(), self._processes(OVER)
    for index, beat in self._processes(ALIVE).items():
      # Clocks of machines differ: only this process's clock times the changes of a heartbeat.
      last_beat, since = last.get(index, ("", 0.0))
      if last_beat != beat:
        last[index] = beat, now
      elif index not in done and now - since > self.silence:
        self.dead.add(index)
        who = f"process {index} of {self.count} has died"
        self._stop_all(_died(who, f"silent for {self.silence:g} s"))

  def _processes(self, key: str) -> dict[str, str]:
    entries = self.client.key_value_dir_get(key)
    return {name.rsplit("/", 1)[1]: value for name, value in entries}

  def _stop_all(self, reason: str) -> str | None:
    """Write the reason to stop; return an earlier one of another process, or None."""
    try:
      # Without `allow_overwrite` the first reason stays, and a second one raises.
      self.client.key_value_set(STOP, reason)
    except JaxRuntimeError:
      try:
        return self.client.key_value_try_get(STOP)
      except JaxRuntimeError:
        pass  # the coordinator has died, and its store with it
    return None

  def _wait_for_stop(self) -> None:
    reason = None
    while reason is None and not self.over.is_set():
      try:
        reason = self.client.blocking_key_value_get(STOP, int(1000 * self.silence))
      except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          return self._exit(self._lost("no connection"))
    if reason:
      # The process that has failed reports its own error in this time.
      self.over.wait(GRACE)
      self._exit(reason, in_order=True)

  def _check_coordinator(self) -> None:
    """Exit when the coordinator no longer answers but its connection is still open."""
    before = time.monotonic()
    while not self.over.wait(self.silence / BEATS):
      now = time.monotonic()
      if now - before > self.silence / 2:
        self.last_answer = now  # this process was suspended itself
      elif now - self.last_answer > self.silence:
        self._exit(self._lost(f"silent for {self.silence:g} s"))
      before = now

  def _lost(self, why: str) -> str:
    peer = "its coordinator, process 0" if self.index else "the others"
    return _died(f"process {self.index} of {self.count} has lost {peer}", why)

  def _exit(self, reason: str, in_order: bool = False) -> None:
    if not self.over.is_set():
      # The line is the last one: what jax's threads still print goes nowhere. Not `print`: the main
      # thread may hold the lock of standard error.
      own = 2
      with contextlib.suppress(OSError):  # no more files may be opened
        own = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
      os.write(own, f"error: {reason}\n".encode())
      if in_order:
        self._leave()
      # `sys.exit` would end this thread only, and the main thread may wait for a device forever.
      os._exit(1)

  def _leave(self) -> None:
    """Mark this process as finished; process 0 waits for the others."""
    try:
      # `close` may have marked this process already, and a second mark must not raise.
      self.client.key_value_set(f"{OVER}/{self.index}", "", allow_overwrite=True)
      deadline = time.monotonic() + 2 * GRACE
      while self.index == 0 and time.monotonic() < deadline:
        if len(self._processes(OVER).keys() | self.dead) == self.count:
          return
        time.sleep(0.05)
    except JaxRuntimeError:
      pass  # the coordinator has died

  def close(self) -> None:
    """Wait until all processes are done, so that no end counts as a death."""
    self.client.key_value_set(f"{OVER}/{self.index}", "")
    self.client.wait_at_barrier(OVER, int(1000 * DAY))
    self.over.set()  # only now: until all are done, a death must be noticed
    self._stop_all("")  # wakes `_wait_for_stop`: Python cannot end while a thread waits in C++
    for thread in self.threads:
      thread.join(GRACE)
    _on_abort(None)

  def verdict(self) -> None:
    """Wait long enough for the threads to end this process if another one has died."""
    time.sleep(self.silence * (1 + 2 / BEATS) + GRACE)

  def abandon(self, reason: str) -> bool:
    """Stop the others with this reason; False if the same reason came before.

    Process 0 returns when the others have ended, or after some seconds: its store ends with it.
    """
    earlier = self._stop_all(f"process {self.index} of {self.count} stopped: {reason}")
    self.over.set()
    self._leave()
    return earlier is None or not earlier.endswith(reason)


def _on_abort(explain: Callable[[], None] | None) -> Callable | None:
  """Call `explain` when C++ aborts the process; the handler must stay alive.

  jax aborts, with its stack on standard error, as soon as the coordinator is lost, in the thread
  that would wake `_wait_for_stop`. Python's own handlers run later in the main thread, and so
  never; a callback from C runs in the aborting thread.
  """
  handler = explain and ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: explain())
  ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)  # None: the default action
  return handler


def _died(what: str, why: str) -> str:
  return f"{what} ({why}). Read what it printed, then run the same command on all again to resume."
