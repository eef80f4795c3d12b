"""How do the commands speak to a person, and which exit codes do they have?"""

import argparse
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console

from vqjax.lab.config import Experiment, help_text, load, override
from vqjax.lab.training import Interrupted, NotFiniteError


def speak_plainly() -> None:
  """Shows our warnings as one line; keeps libraries' logs of errors that we explain ourselves."""
  for name in ("absl", "asyncio", "orbax"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

  def show(message, category, filename, lineno, file=None, line=None):
    del category, filename, lineno, file, line
    print(f"warning: {message}", file=sys.stderr)

  warnings.simplefilter("ignore")
  warnings.filterwarnings("default", module=r"vqjax(\.|$)")
  warnings.showwarning = show


def add_config(parser: argparse.ArgumentParser) -> None:
  """What every command takes that reads a config: its file, overrides, --traceback and --help."""
  parser.add_argument("config", nargs="?", help="a file configs/NAME.py")
  parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help="fields to change")
  parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
  parser.add_argument("-h", "--help", action="store_true", help="this, or a config's fields")


WRONG_CALL = ValueError, TypeError, AttributeError, ImportError, OSError
"""What a wrong config, wrong data or a wrong folder raises, with the remedy in its message."""


def with_config(
  parser: argparse.ArgumentParser,
  arguments: Sequence[str] | None,
  act: Callable[[Experiment, argparse.Namespace], None],
) -> int:
  """Calls `act` with the experiment that the arguments of `add_config` name; returns the exit code.

  2 for a wrong call. --help with a config prints the config's fields.
  """
  options = parser.parse_intermixed_args(arguments)
  speak_plainly()
  if options.config is None:
    parser.print_help()
    return 0 if options.help else 2
  try:
    experiment = override(load(options.config), options.overrides)
    if options.help:
      Console().print(help_text(experiment))
    else:
      act(experiment, options)
  except WRONG_CALL as error:
    return _failed(2, error, options.traceback)
  return 0


def exit_code(work: Callable[[], None], *, show_traceback: bool = False) -> int:
  """Calls `work`, which trains; returns the exit code of the command.

  2 for a wrong call, 1 where the loss was not finite, 128 + n where signal n stopped it.
  """
  try:
    work()
  except KeyboardInterrupt:
    print("stopped at once; run the same command again to resume.", file=sys.stderr)
    return 128 + signal.SIGINT
  except Interrupted as stop:
    print(f"{stop}. Run the same command again to resume.", file=sys.stderr)
    return 128 + stop.signum
  except NotFiniteError as error:
    return _failed(1, error, show_traceback)
  except WRONG_CALL as error:
    return _failed(2, error, show_traceback)
  return 0


def _failed(code: int, error: Exception, show_traceback: bool) -> int:
  if show_traceback:
    traceback.print_exception(error)
  print(f"error: {error}", file=sys.stderr)
  return code
