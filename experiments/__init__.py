"""Studies, benchmarks and plans."""

import sys

# While Python looks for the module of `python -m`: before the command imports JAX.
if sys.argv[0] == "-m":
  from vqjax.lab import signals

  signals.take_over()
