"""How much faster and smaller are the compressed heads than a dense softmax?

python -m experiments.bench.heads
python -m experiments.bench.heads --json heads.json
"""

import sys
from collections.abc import Sequence

from experiments.bench import benching, losses
from experiments.bench.losses import Shape
from experiments.bench.timing import compare
from vqjax import CodebookHead, DenseHead, GroupedHead
from vqjax.heads.workload import loss_and_gradient
from vqjax.lab.training.provenance import device, provenance

NAIVE = "dense, materialised"


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  options = benching.parser("experiments.bench.heads", __doc__.splitlines()[0]).parse_args(
    arguments
  )
  if options.quick:
    shapes, larger, codes, rounds = (Shape(32, 16, 512),), 4099, 16, 1
  else:
    shapes = Shape(4096, 256, 32000), Shape(4096, 256, 50257)
    larger, codes, rounds = 267_735, 1024, 5
  figures = {
    "heads": [against_dense(shape, codes, rounds) for shape in shapes],
    "growth": growth(shapes[0], larger, codes, 5 * rounds),
  }
  benching.write(options.json, figures | {"provenance": provenance()})
  return 0


def against_dense(shape: Shape, codes: int, rounds: int) -> dict:
  """Prints every head's cost at one vocabulary, relative to the materialised dense loss."""
  vocab, dim = shape.vocab, shape.dim
  heads = {
    "dense, tiled": DenseHead(vocab, dim),
    f"codebook K={codes}": CodebookHead(vocab, dim, codes),
    f"codebook K={codes} + bias": CodebookHead(vocab, dim, codes, token_bias=True),
    "grouped": GroupedHead(vocab, dim),
  }
  programs = {NAIVE: (losses.gradient(losses.materialised_loss), losses.arrays(shape))}
  programs |= {name: loss_and_gradient(head, shape.tokens) for name, head in heads.items()}
  timed = compare(programs, rounds)
  first = timed[NAIVE]
  rows = {
    name: {
      "seconds": t.seconds,
      "times_faster": first.seconds / t.seconds,
      "temp_bytes": t.temp_bytes,
      "times_smaller": first.temp_bytes / max(t.temp_bytes, 1),
    }
    for name, t in timed.items()
  }
  benching.show(
    f"loss and gradient, {shape} float32, {device()}",
    ("", "ms", "times faster", "temp MiB", "times smaller"),
    [_cells(name, row) for name, row in rows.items()],
  )
  return {"shape": shape._asdict(), "rows": rows}


def _cells(name: str, row: dict) -> list[str]:
  return [
    name,
    f"{row['seconds'] * 1e3:.1f}",
    f"{row['times_faster']:.1f}",
    benching.mib(row["temp_bytes"]),
    f"{row['times_smaller']:.1f}",
  ]


def growth(shape: Shape, larger: int, codes: int, rounds: int) -> dict[str, float]:
  """Prints what a larger vocabulary costs a codebook."""
  vocabs, biased = (shape.vocab, larger), {"": False, " + bias": True}
  programs = {
    f"{vocab}{suffix}": loss_and_gradient(
      CodebookHead(vocab, shape.dim, codes, token_bias=bias), shape.tokens
    )
    for suffix, bias in biased.items()
    for vocab in vocabs
  }
  timed = compare(programs, rounds)
  ratios = {}
  for suffix in biased:
    name = f"codebook K={codes}{suffix}"
    ratios[name] = timed[f"{larger}{suffix}"].seconds / timed[f"{shape.vocab}{suffix}"].seconds
    benching.say(f"{name}: V={larger} takes {ratios[name]:.2f}x the time of V={shape.vocab}")
  return ratios


if __name__ == "__main__":
  sys.exit(main())
