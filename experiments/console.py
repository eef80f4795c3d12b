"""How do the commands speak to a person: one line for a warning, none from the libraries?"""

import argparse
import logging
import sys
import warnings


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
