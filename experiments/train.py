"""`vqjax train` from a checkout: `python -m experiments.train`."""

import sys

from vqjax.lab.commands.train import main

if __name__ == "__main__":
  sys.exit(main())
