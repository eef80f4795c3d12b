"""`vqjax floor` from a checkout: `python -m experiments.floor`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.floor", sys.argv[1:])
