"""How does a run that is asked to stop finish its step first?"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from vqjax.lab.training.distributed import is_joined

STDERR = 2
"""Its file descriptor."""


class Interrupted(Exception):
  """A run stopped because it was asked to; everything up to `step` is saved.

  Attributes:
    signum: the signal that asked.
    step: the last finished step.
  """

  def __init__(self, signum: int, step: int):
    """Names the signal and the step."""
    super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}, which is saved")
    self.signum, self.step = signum, step


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], int | None]]:
  """Inside, SIGINT and SIGTERM only take note; yields a function that tells which came, or None.

  A second one does what the first would have done. Outside the main thread, where signals cannot
  be caught, nothing changes. Of several processes jax itself notes a SIGTERM: see `agreed_signal`.
  """
  if threading.current_thread() is not threading.main_thread():
    yield lambda: None
    return
  seen: list[int] = []
  before = {}

  def note(signum, frame):
    del frame
    signal.signal(signum, before[signum])
    _say("finishing the step and saving; once more to stop at once")
    if is_joined():
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      seen.append(signum)

  for signum in (signal.SIGINT,) if is_joined() else (signal.SIGINT, signal.SIGTERM):
    before[signum] = signal.signal(signum, note)
  try:
    yield lambda: seen[0] if seen else None
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)


def _say(text: str) -> None:
  """Writes a line to standard error, whose file a signal may have come in the middle of a write to.

  Python's files cannot be entered twice: `print` raises RuntimeError there, and ends the run.
  """
  os.write(STDERR, f"\n{text}\n".encode())


def agreed_signal(step: int) -> int | None:
  """SIGTERM where one of several processes got it and `step` is the one after which all stop.

  Every process asks at every step: jax takes the first step that none has passed.
  """
  return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
