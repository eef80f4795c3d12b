"""How does a process notice that another of its run died, and say so before it goes too?"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from jax.errors import JaxRuntimeError

STOP, ALIVE, OVER = "vqjax/stop", "vqjax/alive", "vqjax/over"
"""Keys in the coordinator's store: why the run stops, who was heard of, who is done."""

GRACE = 2.0
"""Seconds in which a process may explain a common error itself before another's reason counts."""

DAY = 24 * 3600.0
"""Seconds to wait for a process that lives: that it died is told anyway."""

BEATS = 6
"""Signs of life in the time after which a silent process counts as dead."""


class Watch:
  """A process's threads: they tell that it lives, listen for why to stop, doubt the coordinator.

  They use the coordinator's key-value store alone. Process 0 keeps the book: whoever was not heard
  of for `silence` seconds is dead; every process is told so and goes, whatever its main thread
  waits for. That the coordinator itself died shows at once, by its closed connection.
  """

  def __init__(self, client, index: int, count: int, silence: float):
    """Starts to watch; `client` is jax's, and connected."""
    self.client, self.index, self.count, self.silence = client, index, count, silence
    self.over = threading.Event()
    self.heard = time.monotonic()
    self.dead: set[str] = set()
    self._tell(0)
    self.on_abort = _on_abort(lambda: self._go(self._lost("no connection")))
    runs = self._beat, self._listen, self._doubt
    self.threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in self.threads:
      thread.start()

  def _tell(self, beat: int) -> None:
    self.client.key_value_set(f"{ALIVE}/{self.index}", str(beat), allow_overwrite=True)

  def _beat(self) -> None:
    last: dict[str, tuple[str, float]] = {}
    beat = 0
    try:
      while not self.over.wait(self.silence / BEATS):
        beat += 1
        self._tell(beat)
        self.heard = time.monotonic()
        if self.index == 0:
          self._look(last)
    except JaxRuntimeError:
      pass  # the coordinator is gone, which the other thread finds out as well

  def _look(self, last: dict[str, tuple[str, float]]) -> None:
    """Notes who was heard of, and tells all to stop where one was not for too long."""
    now, done = time.monotonic(), self._processes(OVER)
    for index, beat in self._processes(ALIVE).items():
      if last.get(index, ("", 0.0))[0] != beat:
        last[index] = beat, now
      elif index not in done and now - last[index][1] > self.silence:
        self.dead.add(index)
        who = f"process {index} of {self.count} has died"
        self._tell_all(_died(who, f"silent for {self.silence:g} s"))

  def _processes(self, key: str) -> dict[str, str]:
    found = self.client.key_value_dir_get(key)
    return {name.rsplit("/", 1)[1]: value for name, value in found}

  def _tell_all(self, reason: str) -> str | None:
    """Makes every process stop for `reason`; returns the reason of another that was first."""
    try:
      self.client.key_value_set(STOP, reason)
    except JaxRuntimeError:
      try:
        return self.client.key_value_try_get(STOP)
      except JaxRuntimeError:
        pass  # the coordinator is gone: nobody can be told
    return None

  def _listen(self) -> None:
    reason = None
    while reason is None and not self.over.is_set():
      try:
        reason = self.client.blocking_key_value_get(STOP, int(1000 * self.silence))
      except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          return self._go(self._lost("no connection"))
    if reason:
      self.over.wait(GRACE)
      self._go(reason, in_order=True)

  def _doubt(self) -> None:
    """Goes where the coordinator stopped to answer without closing its connection."""
    before = time.monotonic()
    while not self.over.wait(self.silence / BEATS):
      now = time.monotonic()
      if now - before > self.silence / 2:
        self.heard = now  # this process itself was held up
      elif now - self.heard > self.silence:
        self._go(self._lost(f"silent for {self.silence:g} s"))
      before = now

  def _lost(self, why: str) -> str:
    whom = "its coordinator, process 0" if self.index else "the others"
    return _died(f"process {self.index} of {self.count} has lost {whom}", why)

  def _go(self, reason: str, in_order: bool = False) -> None:
    if not self.over.is_set():
      os.write(2, f"error: {reason}\n".encode())
      if in_order:
        self._leave()
      os._exit(1)

  def _leave(self) -> None:
    """Tells the coordinator that the end of this process is no death; it waits for the others."""
    try:
      self.client.key_value_set(f"{OVER}/{self.index}", "", allow_overwrite=True)
      deadline = time.monotonic() + 2 * GRACE
      while self.index == 0 and time.monotonic() < deadline:
        if len(self._processes(OVER).keys() | self.dead) == self.count:
          return
        time.sleep(0.05)
    except JaxRuntimeError:
      pass  # it is gone

  def close(self) -> None:
    """Returns when all processes are done, so that none takes the end of another for a death."""
    self.client.key_value_set(f"{OVER}/{self.index}", "")
    self.client.wait_at_barrier(OVER, int(1000 * DAY))
    self.over.set()
    self._tell_all("")  # wakes those who listen: Python cannot end while they wait in a C++ call
    for thread in self.threads:
      thread.join(GRACE)
    _on_abort(None)

  def verdict(self) -> None:
    """Gives the watch time to find that an error here was the death of another, which it tells."""
    time.sleep(self.silence * (1 + 2 / BEATS) + GRACE)

  def abandon(self, reason: str) -> bool:
    """Tells the others why this process goes; returns False where one said the same before.

    Process 0 returns when the others are gone, or after some seconds: its store ends with it.
    """
    theirs = self._tell_all(f"process {self.index} of {self.count} stopped: {reason}")
    self.over.set()
    self._leave()
    return theirs is None or not theirs.endswith(reason)


def _on_abort(explain: Callable[[], None] | None) -> Callable | None:
  """Calls `explain` where C++ aborts the process; returns what must stay alive for it.

  jax aborts, with its stack on standard error, as soon as the coordinator is lost, and the thread
  that would tell `_listen` so is the one that aborts. Python's own handlers wait for an interpreter
  that never comes back; a callback from C runs in the aborting thread.
  """
  handler = explain and ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: explain())
  ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)  # None: as it was
  return handler


def _died(what: str, why: str) -> str:
  return (
    f"{what} ({why}); look at what it printed, then run the same command on all again to resume"
  )
