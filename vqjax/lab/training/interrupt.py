"""Signals that stop a run after the current step."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from vqjax.lab.signals import STOPS
from vqjax.lab.training.distributed import is_joined

__all__ = ["Interrupted"]


class Interrupted(Exception):
  """A signal stopped the run; everything up to `step` is saved.

  Attributes:
    signum: the signal.
    step: the last finished step.
  """

  def __init__(self, signum: int, step: int):
    """Store the signal and the step."""
    super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}, which is saved")
    self.signum, self.step = signum, step


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], int | None]]:
  """Defer the signals that stop a run; yield a function that returns a received one.

  They are SIGINT, SIGTERM, SIGHUP and SIGQUIT; one that this process ignores, as under nohup, stays
  ignored. A second signal has its usual effect. Outside the main thread, where Python cannot handle
  signals, nothing changes. In a run of several processes jax handles SIGTERM: see `agreed_signal`.
  """
  if threading.current_thread() is not threading.main_thread():
    yield lambda: None
    return
  received: list[int] = []
  before = {}

  def handle(signum, frame):
    del frame
    # Restored at once, so that a second signal stops a step that hangs.
    signal.signal(signum, before[signum])
    # `print` raises RuntimeError where the signal came in the middle of a write to the same file.
    os.write(2, b"\nfinishing the step and saving; once more to stop at once\n")
    if is_joined():
      # jax's handler of SIGTERM makes the processes agree on a step after which all stop.
      os.kill(os.getpid(), signal.SIGTERM)
    else:
      received.append(signum)

  for signum in STOPS:
    is_ignored = signal.getsignal(signum) is signal.SIG_IGN
    if not is_ignored and not (signum == signal.SIGTERM and is_joined()):
      before[signum] = signal.signal(signum, handle)
  try:
    yield lambda: received[0] if received else None
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)


def agreed_signal(step: int) -> int | None:
  """Return SIGTERM at the step at which all processes stop for one's signal.

  Every process calls it at every step; jax chooses the first step that no process has passed.
  """
  return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None
