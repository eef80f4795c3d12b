"""Benchmark of compressed heads against a dense softmax."""

from collections.abc import Iterator
from typing import Any

from experiments.bench import losses, measure
from experiments.bench.losses import LossShape
from experiments.bench.measure import compare
from vqjax import CodebookHead, DenseHead, GroupedHead
from vqjax.heads.workload import loss_and_gradient
from vqjax.lab.training.provenance import device

MATERIALISED = "dense, materialised"


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Compare heads at two vocabularies, and a codebook at a much larger one."""
  shapes = LossShape(4096, 256, 32000), LossShape(4096, 256, 50257)
  larger, codes, rounds = 267_735, 1024, 5
  if quick:
    shapes, larger, codes, rounds = (LossShape(32, 16, 512),), 4099, 16, 1
  figures = {"heads": []}
  for shape in shapes:
    figures["heads"].append(against_dense(shape, codes, rounds))
    yield figures
  yield figures | {"growth": growth(shapes[0], larger, codes, 5 * rounds)}


def against_dense(shape: LossShape, codes: int, rounds: int) -> dict[str, Any]:
  """Print and return each head's cost relative to the materialised dense loss."""
  vocab, dim = shape.vocab, shape.dim
  heads = {
    "dense, tiled": DenseHead(vocab, dim),
    f"codebook K={codes}": CodebookHead(vocab, dim, codes),
    f"codebook K={codes} + bias": CodebookHead(vocab, dim, codes, token_bias=True),
    "grouped": GroupedHead(vocab, dim),
  }
  programs = {MATERIALISED: (losses.gradient(losses.materialised_loss), losses.arrays(shape))}
  programs |= {name: loss_and_gradient(head, shape.tokens) for name, head in heads.items()}
  timed = compare(programs, rounds)
  dense = timed[MATERIALISED]
  rows = {
    name: {
      "seconds": one.seconds,
      "times_faster": dense.seconds / one.seconds,
      "temp_bytes": one.temp_bytes,
      "times_smaller": dense.temp_bytes / max(one.temp_bytes, 1),
    }
    for name, one in timed.items()
  }
  measure.show_rows(
    f"loss and gradient, {shape} float32, {device()}",
    ("", "ms", "times faster", "temp MiB", "times smaller"),
    [
      [
        name,
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['times_faster']:.1f}",
        measure.mib(row["temp_bytes"]),
        f"{row['times_smaller']:.1f}",
      ]
      for name, row in rows.items()
    ],
  )
  return {"shape": shape._asdict(), "rows": rows}


def growth(shape: LossShape, larger: int, codes: int, rounds: int) -> dict[str, float]:
  """Print and return a codebook's relative time at a larger vocabulary."""
  biased = {"": False, " + bias": True}
  programs = {
    f"{vocab}{suffix}": loss_and_gradient(
      CodebookHead(vocab, shape.dim, codes, token_bias=bias), shape.tokens
    )
    for suffix, bias in biased.items()
    for vocab in (shape.vocab, larger)
  }
  timed = compare(programs, rounds)
  ratios = {}
  for suffix in biased:
    name = f"codebook K={codes}{suffix}"
    ratios[name] = timed[f"{larger}{suffix}"].seconds / timed[f"{shape.vocab}{suffix}"].seconds
    measure.say(f"{name}: V={larger} takes {ratios[name]:.2f}x the time of V={shape.vocab}")
  return ratios
