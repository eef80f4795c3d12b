"""`vqjax table` from a checkout: `python -m experiments.table`."""

import sys

from vqjax.lab.commands.table import main

if __name__ == "__main__":
  sys.exit(main())
