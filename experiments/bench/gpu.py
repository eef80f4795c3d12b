"""How fast and how large is the loss of a large vocabulary on this GPU, beside its peers'?

make bench-gpu
PYTHONPATH=. python3 -m experiments.bench.gpu --json docs/results/gpu.json
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench import benching, losses, torch_peers
from experiments.bench.losses import Shape
from experiments.bench.timing import Program, compare
from experiments.bench.torch_peers import Cost
from experiments.plan.apart import apart
from vqjax import CodebookHead, GroupedHead
from vqjax.heads.workload import loss_and_gradient

SHAPES = (Shape(16384, 4096, 128_256), Shape(16384, 768, 267_735))
TILES = ((1024, 8192), (2048, 8192), (4096, 4096), (4096, 16384), (8192, 8192), (16384, 4096))
CODES = (1024, 2048, 4096)
CALLS = 10
NOTE = (
  "bfloat16 hidden and weight; median of {calls} calls after the first ones, each waited for."
  " TFLOP/s is 6NDV over the time in every row: for a compressed head, of the dense work it stands"
  " for. Peaks are MiB of arguments, results and temporaries: as the compiler plans them, and the"
  " most that the device counted since the row's own process began, its tuning of kernels included."
)


class Row(NamedTuple):
  """A line of the table.

  Attributes:
    name: what is measured.
    measure: gives its cost; called in a process of its own.
  """

  name: str
  measure: Callable[[], Cost]


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  options = benching.parser("experiments.bench.gpu", __doc__.splitlines()[0]).parse_args(arguments)
  here = apart(machine)
  if here["platform"] != "gpu" and not options.quick:
    print(f"no GPU: jax sees {here['device']}; --quick tries tiny sizes on it", file=sys.stderr)
    return 2
  calls = 1 if options.quick else CALLS
  benching.say(NOTE.format(calls=calls))
  shapes = (Shape(64, 16, 1031),) if options.quick else SHAPES
  tables = []
  for shape in shapes:
    lines = rows(shape, TILES[:1], (16,), calls) if options.quick else rows(shape, TILES, CODES)
    tables.append(table(shape, here["device"], lines))
    # After each shape: what a long run has found is not lost with the rest of it.
    benching.write(options.json, here | {"note": NOTE.format(calls=calls), "tables": tables})
  return 0


def rows(shape: Shape, tiles: Sequence, codes: Sequence[int], calls: int = CALLS) -> list[Row]:
  """Everything that is measured at a shape."""
  jax_row = lambda name, program: Row(name, partial(jax_cost, program, calls))
  return [
    jax_row("materialised (XLA)", partial(materialised, shape)),
    jax_row("linear_log_prob", partial(tiled, shape, None)),
    *(jax_row(f"  tile {n} x {v}", partial(tiled, shape, (n, v))) for n, v in tiles),
    Row("CCE, all gradients", partial(torch_peers.cut_cross_entropy, shape, calls, None)),
    Row("CCE, large gradients", partial(torch_peers.cut_cross_entropy, shape, calls, "high")),
    Row("Liger", partial(torch_peers.liger, shape, calls)),
    *(jax_row(f"codebook K={count}", partial(codebook, shape, count)) for count in codes),
    jax_row("grouped", partial(grouped, shape)),
  ]


def table(shape: Shape, device: str, lines: Sequence[Row]) -> dict:
  """Measures and prints all rows of a shape; one that fails says so, and the next is measured."""
  found, work = {}, 6 * shape.tokens * shape.dim * shape.vocab
  for line in lines:
    print(f"measuring {line.name.strip()}, {shape}", file=sys.stderr)
    try:
      # A device's peak of memory is never reset in a running process.
      cost = apart(line.measure)
    except Exception as error:  # out of memory, a dead process, a peer that is not there
      text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
      found[line.name] = {"error": text}
    else:
      found[line.name] = cost._asdict() | {"tflops": work / cost.seconds / 1e12}
  benching.show(
    f"loss and gradient, {shape}, {device}",
    ("", "ms", "TFLOP/s", "peak (compiler)", "peak (device)"),
    [_cells(name, row) for name, row in found.items()],
  )
  for name, row in found.items():
    if "error" in row:
      benching.say(f"{name.strip()}: {row['error']}")
  return {"shape": shape._asdict(), "rows": found}


def _cells(name: str, row: dict) -> list[str]:
  if "error" in row:
    return [name, "failed", "—", "—", "—"]
  peaks = benching.mib(row["compiled_bytes"]), benching.mib(row["device_bytes"])
  return [name, f"{row['seconds'] * 1e3:.1f}", f"{row['tflops']:.3g}", *peaks]


def machine() -> dict:
  """The device and where the figures come from."""
  first = jax.devices()[0]
  try:
    from vqjax.lab.training.provenance import provenance
  except ModuleNotFoundError:  # jax and flax suffice for this bench
    origin = {"versions": {"jax": jax.__version__}}
  else:
    origin = provenance()
  origin["versions"] |= torch_peers.versions()
  return {"platform": first.platform, "device": first.device_kind, "provenance": origin}


def jax_cost(program: Callable[[], Program], calls: int) -> Cost:
  """What a program costs on the first device."""
  timed = compare({"": program()}, rounds=calls)[""]
  stats = jax.local_devices()[0].memory_stats() or {}
  return Cost(timed.seconds, timed.peak_bytes, stats.get("peak_bytes_in_use"))


def materialised(shape: Shape) -> Program:
  """All logits at once."""
  return losses.gradient(losses.materialised_loss), losses.arrays(shape, jnp.bfloat16)


def tiled(shape: Shape, tile: tuple[int, int] | None) -> Program:
  """This library's dense loss."""
  return losses.gradient(losses.tiled_loss(tile)), losses.arrays(shape, jnp.bfloat16)


def codebook(shape: Shape, codes: int) -> Program:
  """The loss of a codebook head."""
  head = CodebookHead(shape.vocab, shape.dim, codes, param_dtype=jnp.bfloat16)
  return loss_and_gradient(head, shape.tokens, jnp.bfloat16)


def grouped(shape: Shape) -> Program:
  """The loss of a grouped head."""
  head = GroupedHead(shape.vocab, shape.dim, param_dtype=jnp.bfloat16)
  return loss_and_gradient(head, shape.tokens, jnp.bfloat16)


if __name__ == "__main__":
  sys.exit(main())
