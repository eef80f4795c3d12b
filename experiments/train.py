"""`vqjax train` from a checkout: `python -m experiments.train`."""

import sys

from vqjax.lab import exits

if __name__ == "__main__":
  exits.run("vqjax.lab.commands.train", sys.argv[1:])
