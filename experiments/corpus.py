"""`vqjax corpus` from a checkout: `python -m experiments.corpus`."""

import sys

from vqjax.lab.commands.corpus import main

if __name__ == "__main__":
  sys.exit(main())
