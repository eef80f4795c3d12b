"""How a command ends: one last line, an exit code, and a log of the rest.

The module loads nothing but the standard library; `signals` has the part that comes first.
"""

import contextlib
import errno
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from vqjax.lab.signals import RESUME, take_over
from vqjax.lm.records import one_line, printable

__all__ = ["LESS_OF_A_STEP", "run_main"]

LEAST_ADDRESSES = 2_000_000_000
"""Bytes of addresses that the libraries of a small run map, though they use a tenth."""

MOST = 2**20
"""Characters of noise that are kept."""


class _Command:
  """What the functions of this module share: one command runs in a process."""

  noise: str = ""
  spare: int | None = None


_command = _Command()


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
  """Call `main(arguments)` of a module that is imported first, and end the process."""
  _prepare()
  _end(guarded(lambda: importlib.import_module(module).main(arguments)))


def run_main(main: Callable[[], int]) -> NoReturn:
  """Call the `main` of the module that runs as a program, and end the process."""
  _prepare()
  _end(guarded(main))


def _prepare() -> None:
  """Take over signals, and tracebacks that no line reports, for a command in this process."""
  take_over()
  addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
  if addresses != resource.RLIM_INFINITY and addresses < LEAST_ADDRESSES:
    # XLA would end the process in the middle of a step, without a word.
    say(
      f"error: the limit on addresses must be at least {LEAST_ADDRESSES:,} bytes; got"
      f" {addresses:,}. Raise it, as `ulimit -v unlimited` does."
    )
    _end(2)
  # A file number for the log, where no more files may be opened at the end.
  with contextlib.suppress(OSError):
    _command.spare = os.open(os.devnull, os.O_RDONLY)
  sys.excepthook = lambda kind, error, trace: _keep(error)
  sys.unraisablehook = lambda args: _keep(args.exc_value)
  threading.excepthook = lambda args: _keep(args.exc_value)


def _end(code: int) -> NoReturn:
  """End the process; after an error at once, because threads may hang and print."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
      stream.flush()
  if code:
    os._exit(code)
  sys.exit(0)


REMEDIES = {
  errno.ENOSPC: "Free some space, and run again.",
  errno.EDQUOT: "Free some space, or raise the quota, and run again.",
  errno.EFBIG: "Raise the limit on the size of files, as `ulimit -f` does, and run again.",
  errno.EMFILE: "Raise the limit on open files, as `ulimit -n 4096` does, and run again.",
  errno.EIO: "Check the disk, or use another one, and run again.",
  errno.EROFS: "Use a folder that can be written, and run again.",
  errno.EACCES: "Use a folder that you may read and write, and run again.",
}
"""What to do about errors of the system."""

MORE_MEMORY = (
  "Use a machine with more memory, or options that need less, such as --dtype bfloat16 or a shorter"
  " --window where the command has them; then run again."
)
"""What to do where memory is exhausted."""

LESS_OF_A_STEP = (
  "Lower train.batch, raise train.accumulate, or use a machine with more memory; then run again."
)
"""What to do where the memory of a training step is exhausted."""


def guarded(work: Callable[[], int]) -> int:
  """Return the exit code of `work`; an exception becomes the last line and a code.

  128 + n for signal n, 2 for a wrong call, a wrong folder or a full disk, 1 for other errors.
  """
  try:
    return work()
  except KeyboardInterrupt as stop:
    signum = getattr(stop, "signum", signal.SIGINT)
    say(f"stopped by {signal.Signals(signum).name}. {RESUME}")
    return 128 + signum
  except SystemExit as stop:  # of argparse
    return stop.code if isinstance(stop.code, int) else 2
  except BaseException as error:
    return _failed(error)


def _failed(error: BaseException) -> int:
  """Print the last line of a command that fails with this error; return its code."""
  code, message = explained(error)
  say(f"error: {message}{kept_noise()}")
  return code


def explained(error: BaseException, out_of_memory: str = MORE_MEMORY) -> tuple[int, str]:
  """Return the exit code and the message of an error; keep the traceback of an unexpected one.

  Args:
    error: the error.
    out_of_memory: what to do if memory is exhausted.
  """
  text = str(error)
  for argument in sys.argv[1:]:
    # A name with ends of lines would begin the last line anew, that of a file in its folder too.
    for name in (argument, os.path.basename(argument)):
      if len(name) > 1 and name in text:
        text = text.replace(name, one_line(name))
  if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "bad_alloc" in text:
    _keep(error)
    first = text.splitlines()[0][:200] if text else type(error).__name__
    return 1, f"out of memory ({first}). {out_of_memory}"
  if isinstance(error, BrokenPipeError):
    return 1, "the reader of the output is gone. Run again with another reader."
  if isinstance(error, OSError) and error.strerror == os.strerror(error.errno or 0):
    # As the system raised it: what this project raises has its own remedy.
    text += f". {REMEDIES.get(error.errno, 'Check the path, and run again.')}"
  if isinstance(error, RuntimeError) and text.startswith("Unable to initialize backend"):
    name = os.environ.get("JAX_PLATFORMS", "")
    return 2, (
      f"`JAX_PLATFORMS` must name platforms that JAX has here; got {name!r}. Unset it, or set it to"
      " cpu."
    )
  stores = r"\A[A-Z_]+: |\n(?s:.*)[Tt]ensor[Ss]tore"
  if isinstance(error, ValueError) and re.search(stores, text):
    # Of TensorStore, which begins with the code of its status, or of Orbax, which quotes a store.
    _keep(error)
    first = text.splitlines()[0][:300].rstrip(".:")
    return 2, f"{first}. Check the folder and its disk, and run again."
  # A TypeError of this project begins with the argument.
  is_own = isinstance(error, TypeError) and text.startswith("`")
  if is_own or isinstance(error, (ValueError, ImportError, OSError)):
    return 2, text
  if hasattr(error, "exit_code"):
    return error.exit_code, text
  _keep(error)
  first = text.splitlines()[0][:300] if text else "no message"
  return 1, f"{type(error).__name__}: {first}. Run again; if it comes again, report it."


def _keep(error: BaseException | None) -> None:
  """Keep the traceback of an error that no line reports."""
  if error is not None and len(_command.noise) < MOST:
    with contextlib.suppress(Exception):
      _command.noise += "".join(traceback.format_exception(error))


def keep_text(text: str) -> None:
  """Keep a message of another library."""
  if len(_command.noise) < MOST:
    _command.noise += text


def kept_noise() -> str:
  """Write what was kept to a file in the temporary folder; return a remark that names it."""
  noise, _command.noise = _command.noise, ""
  if not noise:
    return ""
  if _command.spare is not None:
    with contextlib.suppress(OSError):
      os.close(_command.spare)
    _command.spare = None
  try:
    number, path = tempfile.mkstemp(prefix="vqjax-", suffix=".log")
    with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
      file.write(noise)
  except OSError:  # the disk is full, which the last line says
    return ""
  return f" (more in {path})"


def say(line: str) -> None:
  """Print a line of this project on standard error, with control characters escaped."""
  with contextlib.suppress(OSError, ValueError):  # standard error may be closed
    print(printable(line), file=sys.stderr, flush=True)
