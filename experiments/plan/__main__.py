"""`vqjax plan` from a checkout: `python -m experiments.plan`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.plan", sys.argv[1:])
