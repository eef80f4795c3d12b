"""Signals that stop a command, from its first moments on.

The module imports nothing that takes time: until a command calls `take_over`, its signals are
Python's, and Ctrl-C ends in a traceback.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["take_over"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that ask a command to stop."""

RESUME = "Run the same command again to resume."

PATIENCE = 10.0
"""Seconds in which a command that is interrupted must end by itself."""


class Stopped(KeyboardInterrupt):
  """A signal stopped a command before its training loop, or for the second time.

  Attributes:
    signum: the signal.
  """

  def __init__(self, signum: int):
    """Store the signal."""
    super().__init__(f"stopped by {signal.Signals(signum).name}")
    self.signum = signum


_raises = False


def take_over() -> None:
  """Let signals end this process with one line and the code 128 + n."""
  for signum in STOPS:
    # A signal that the caller ignores, as nohup and shells in the background do, stays ignored.
    if signal.getsignal(signum) is not signal.SIG_IGN:
      signal.signal(signum, _stop)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Let signals raise `Stopped`, so that files and other processes are left in order."""
  global _raises
  _raises = True
  try:
    yield
  finally:
    _raises = False


def _stop(signum: int, frame: FrameType | None) -> None:
  global _raises
  del frame
  if not _raises:
    # Not an exception: some modules swallow one that comes while they are imported.
    _die(signum)
  _raises = False  # a second signal does not wait
  import threading

  patience = threading.Timer(PATIENCE, _die, (signum,))
  patience.daemon = True
  patience.start()
  raise Stopped(signum)


def _die(signum: int) -> None:
  # Not `print`: the signal may have come in the middle of a write to the same file.
  os.write(2, f"stopped by {signal.Signals(signum).name}. {RESUME}\n".encode())
  os._exit(128 + signum)
