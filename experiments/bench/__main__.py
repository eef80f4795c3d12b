"""Entry point of the benchmarks.

python -m experiments.bench --list
python -m experiments.bench softmax heads --json bench.json
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from experiments.bench.measure import Unavailable
from experiments.bench.registry import BENCHMARKS
from vqjax.lab import exits
from vqjax.outputs import write_text


def main(arguments: Sequence[str] | None = None) -> int:
  """Run the named benchmarks; return 2 for a wrong call or a missing device."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.bench",
    description="Benchmarks of speed, memory and exactness. Run them alone on the machine.",
  )
  parser.add_argument(
    "names", nargs="*", metavar="NAME", help="see --list (default: the quick ones)"
  )
  parser.add_argument("--list", action="store_true", help="print the benchmarks")
  parser.add_argument("--quick", action="store_true", help="tiny sizes: a check that it works")
  parser.add_argument(
    "--json",
    type=pathlib.Path,
    metavar="FILE",
    help="write {name: figures} to FILE, beside the benchmarks that it already holds",
  )
  options = parser.parse_args(arguments)
  if options.list:
    for name, benchmark in BENCHMARKS.items():
      print(f"{name:16}{'* ' if benchmark.is_default else '  '}{benchmark.description}")
    print("* run when no name is given")
    return 0
  unknown = [name for name in options.names if name not in BENCHMARKS]
  if unknown:
    parser.error(f"NAME must be one of {', '.join(BENCHMARKS)}; got {unknown[0]}")
  try:
    kept = _read(options.json)
  except ValueError as error:
    parser.error(str(error))
  for name in options.names or [n for n, b in BENCHMARKS.items() if b.is_default]:
    try:
      # After each part: an interrupted benchmark keeps what it has measured.
      for figures in BENCHMARKS[name].run(options.quick):
        _write(options.json, kept | {name: figures | {"provenance": _provenance(options.quick)}})
      kept[name] = figures | {"provenance": _provenance(options.quick)}
    except Unavailable as error:
      print(f"{name}: {error}", file=sys.stderr)
      return 2
  return 0


def _provenance(quick: bool) -> dict[str, Any]:
  """Commit, device and versions; only JAX's version where the lab is not installed."""
  try:
    from vqjax.lab.training.provenance import provenance
  except ModuleNotFoundError:
    import jax

    return {"device": jax.devices()[0].device_kind, "versions": {"jax": jax.__version__}}
  return provenance() | {"quick": quick}


def _read(file: pathlib.Path | None) -> dict[str, Any]:
  if file is None or not file.exists():
    return {}
  try:
    kept = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(kept, dict) and all("provenance" in figures for figures in kept.values()):
      return kept
  except (ValueError, TypeError):
    pass
  raise ValueError(f"--json must name a file of benchmarks or a new one; got {file}. Name another")


def _write(file: pathlib.Path | None, figures: dict[str, Any]) -> None:
  """Write a benchmark a line, in one step; null for numbers that are not finite."""
  if file is None:
    return
  lines = (f"{json.dumps(n)}: {json.dumps(_plain(f), allow_nan=False)}" for n, f in figures.items())
  write_text(file, "{\n" + ",\n".join(lines) + "\n}\n", "--json")


def _plain(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
  exits.run_main(main)
