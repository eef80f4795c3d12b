"""`vqjax table` from a checkout: `python -m experiments.table`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.table", sys.argv[1:])
