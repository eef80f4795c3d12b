"""`vqjax plan` from a checkout: `python -m experiments.plan`."""

import sys

from vqjax.lab.commands.plan import main

if __name__ == "__main__":
  sys.exit(main())
