"""`vqjax compress` from a checkout: `python -m experiments.compress`."""

import sys

from vqjax.lab.commands.compress import main

if __name__ == "__main__":
  sys.exit(main())
