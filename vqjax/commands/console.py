"""Shared parts of the commands: options, messages and exit codes."""

import argparse
import logging
import pathlib
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from vqjax.lab import exits, signals
from vqjax.outputs import check_file

__all__ = ["configure_warnings"]


class OutputFile(type(pathlib.Path())):
  """The path of a file that a command writes, which `run` checks before the work."""


METAVARS = {int: "N", float: "X", pathlib.Path: "FILE", OutputFile: "FILE"}
"""Names of values in the help of options, by their type."""


def new_parser(
  command: str, description: str, epilog: str | None = None
) -> argparse.ArgumentParser:
  """The parser of a command, for `run`."""
  return argparse.ArgumentParser(prog=f"vqjax {command}", description=description, epilog=epilog)


def option(to: Any, name: str, text: str, kind: Any = None, default: Any = None, **more) -> None:
  """Add an option to a parser or a group of options; its help names the default, if it has one."""
  if default not in (None, []):
    text += " (default: %(default)s)"
  if "choices" not in more:
    more = {"metavar": METAVARS.get(kind)} | more
  to.add_argument(name, type=READERS.get(kind, kind), default=default, help=text, **more)


def _integer(text: str) -> int:
  """An integer of the 32 bits that JAX has, as `argparse` reads it."""
  number = int(text)
  if not -(2**31) <= number < 2**31:
    raise argparse.ArgumentTypeError(
      f"an integer must have 32 bits; got {text}. Give a smaller one"
    )
  return number


def _finite(text: str) -> float:
  """A number that float32 has, as `argparse` reads it."""
  number = float(text)
  if not abs(number) <= MOST:
    raise argparse.ArgumentTypeError(f"it must be finite; got {text}. Give one such as 0.5")
  return number


def _path(text: str) -> pathlib.Path:
  """A path, as `argparse` reads it; "" would be the current folder."""
  if not text:
    raise argparse.ArgumentTypeError("it must name a file or a folder; got an empty path. Give one")
  return pathlib.Path(text)


MOST = 3e38
"""The largest number of float32."""

READERS = {int: _integer, float: _finite, pathlib.Path: _path}
"""Types of options -> what reads them; `argparse` quotes their names."""
_integer.__name__, _finite.__name__ = "int", "float"


def flag(to: Any, name: str, text: str) -> None:
  """Add an option without a value."""
  to.add_argument(name, action="store_true", help=text)


def run(
  parser: argparse.ArgumentParser,
  arguments: Sequence[str] | None,
  work: Callable[[argparse.Namespace], int | None],
  check: Callable[[argparse.Namespace], str | None] = lambda options: None,
  ending: Callable[..., int] | None = None,
) -> int:
  """Run a command of `new_parser` and return its exit code.

  Args:
    parser: its options.
    arguments: its arguments; None: those of the process.
    work: is called with the options.
    check: says what is wrong with options that are given together, before the work.
    ending: makes an exit code of the work; None: `exit_code`.
  """
  flag(parser, "--traceback", "show the traceback of an error")
  # `parse_args` would refuse positional arguments that follow an option.
  options = parser.parse_intermixed_args(arguments)
  if problem := _not_utf8(options) or check(options):
    parser.error(problem)
  configure_warnings()

  def checked():
    check_outputs(options)
    return work(options)

  return (ending or exit_code)(checked, show_traceback=options.traceback)


def check_outputs(options: argparse.Namespace) -> None:
  """Raise OSError for a file that cannot be written, before the work is done."""
  for name, value in vars(options).items():
    if isinstance(value, OutputFile):
      check_file(value, f"--{name}")


def _not_utf8(options: argparse.Namespace) -> str | None:
  """What is wrong with the texts of a call; a file's name may be any bytes."""
  for name, value in vars(options).items():
    for text in value if isinstance(value, list) else [value]:
      if isinstance(text, str) and name not in ("model", "draft", "config", "tokenizer"):  # paths
        try:
          text.encode("utf-8")
        except UnicodeEncodeError as error:
          return (
            f"`--{name}` must be UTF-8; got the byte 0x{ord(text[error.start]) - 0xDC00:02x} at"
            f" character {error.start}. Set the terminal to UTF-8, or convert the text"
          )
  return None


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
