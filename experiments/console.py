"""How do the commands speak to a person: one line for a warning, none from the libraries?"""

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
