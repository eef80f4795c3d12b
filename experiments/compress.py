"""`vqjax compress` from a checkout: `python -m experiments.compress`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.compress", sys.argv[1:])
