"""How does a run that is asked to stop finish its step first?"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator


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
  be caught, nothing changes.
  """
  if threading.current_thread() is not threading.main_thread():
    yield lambda: None
    return
  seen: list[int] = []
  before = {}

  def note(signum, frame):
    del frame
    seen.append(signum)
    signal.signal(signum, before[signum])
    print("finishing the step and saving; once more to stop at once", file=sys.stderr)

  for signum in (signal.SIGINT, signal.SIGTERM):
    before[signum] = signal.signal(signum, note)
  try:
    yield lambda: seen[0] if seen else None
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)
