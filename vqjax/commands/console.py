"""Shared parts of the commands: messages and exit codes."""

import logging
import signal
import traceback
import warnings
from collections.abc import Callable

from vqjax.lab import exits, signals

__all__ = ["configure_warnings"]


def configure_warnings() -> None:
  """Show warnings of vqjax as one line and hide those of other libraries."""
  for name in ("absl", "asyncio", "orbax"):
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [_Kept(logging.ERROR)], False

  def show(message, category, filename, lineno, file=None, line=None):
    del category, filename, lineno, file, line
    exits.say(f"warning: {message}")

  warnings.simplefilter("ignore")
  for category in (UserWarning, FutureWarning):
    warnings.filterwarnings("default", category=category, module=r"vqjax(\.|$)")
  warnings.showwarning = show


class _Kept(logging.Handler):
  """Keeps messages of other libraries for the log that the last line of an error names."""

  def emit(self, record: logging.LogRecord) -> None:
    exits.keep_text(f"{self.format(record)}\n")


def exit_code(
  work: Callable[[], int | None],
  *,
  show_traceback: bool = False,
  out_of_memory: str = exits.MORE_MEMORY,
  await_cause: Callable[[Exception], None] = lambda error: None,
  fail: Callable[[int, str], int] = lambda code, message: _fail(code, message),
) -> int:
  """Call `work` and return its exit code, 0 for None, or that of the exception that it raises.

  2 for a wrong call, a wrong folder or a full disk, 1 for a loss that is not finite and for
  unexpected errors, 128 + n for signal n. The last line on standard error says why; what else there
  is to know, such as tracebacks, is in a file that the line names.

  Args:
    work: the command.
    show_traceback: print the traceback of an error.
    out_of_memory: what to do about exhausted memory.
    await_cause: is called with an error before it is explained.
    fail: prints the message of an error and returns its code.
  """
  try:
    with signals.interruptible():
      return work() or 0
  except KeyboardInterrupt as stop:
    signum = getattr(stop, "signum", signal.SIGINT)
    return fail(128 + signum, f"stopped by {signal.Signals(signum).name}. {signals.RESUME}")
  except Exception as error:
    await_cause(error)
    if show_traceback:
      traceback.print_exception(error)
    code, message = exits.explained(error, out_of_memory)
    return fail(code, message + exits.kept_noise())


def _fail(code: int, message: str) -> int:
  exits.say(f"error: {message}")
  return code
