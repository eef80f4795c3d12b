"""`vqjax floor` from a checkout: `python -m experiments.floor`."""

import sys

from vqjax.lab.commands.floor import main

if __name__ == "__main__":
  sys.exit(main())
