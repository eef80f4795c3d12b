"""`vqjax corpus` from a checkout: `python -m experiments.corpus`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.corpus", sys.argv[1:])
