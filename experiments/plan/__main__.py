"""Entry point of `python -m experiments.plan`."""

import sys

from experiments.plan.plan import main

if __name__ == "__main__":
  sys.exit(main())
