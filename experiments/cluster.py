"""`vqjax cluster` from a checkout: `python -m experiments.cluster`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.cluster", sys.argv[1:])
