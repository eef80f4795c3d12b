"""What does the grouped head cost: its loss, whole training steps, group sizes, drawn images?

make bench-grouped
python -m experiments.bench_grouped --json docs/results/grouped/cost.json --only loss,steps

Each part is written as soon as it is there, and measured again alone where asked for; a part that
is in the file already stays, with its own provenance. Nothing of a step that is only compiled is
ever allocated.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments import benching, losses
from experiments.grouped_cost import DENSE, Decoder, say, tables_2_and_3
from experiments.losses import Shape
from experiments.timing import Timed, compare
from vqjax import CodebookHead, DenseHead, GroupedHead
from vqjax.heads.workload import loss_and_gradient
from vqjax.training.provenance import device, provenance


class Scale(NamedTuple):
  """The sizes of every part.

  Attributes:
    loss: of one loss and its gradient.
    codes: of its codebook.
    decoders: those of Tables 2 and 3.
    rounds: timings that a median is of.
  """

  loss: Shape
  codes: int
  decoders: tuple[Decoder, ...]
  rounds: int


FULL = Scale(
  loss=Shape(4096, 256, 50_257),
  codes=1024,
  decoders=tuple(Decoder(dim) for dim in (128, 256, 1024, 2048)),
  rounds=5,
)
QUICK = Scale(
  loss=Shape(32, 16, 509),
  codes=16,
  decoders=(Decoder(8, layers=1, heads=2, vocab=509, batch=2, context=8),),
  rounds=1,
)
BUDGET_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  parser = benching.parser("experiments.bench_grouped", __doc__.splitlines()[0])
  parser.add_argument("--only", type=_parts, default=tuple(PARTS), metavar="PART,PART")
  parser.add_argument(
    "--budget-seconds",
    type=float,
    default=BUDGET_SECONDS,
    metavar="S",
    help="widths whose steps would take longer are compiled alone (default: %(default)s)",
  )
  options = parser.parse_args(arguments)
  scale = QUICK if options.quick else FULL
  figures = _before(options.json)
  for name in options.only:
    for found in PARTS[name](scale, options.budget_seconds):
      figures[name] = found
      origin = provenance() | {"quick": options.quick}
      figures["provenance"] = figures.get("provenance", {}) | {name: origin}
      benching.write(options.json, figures)
  return 0


def _parts(text: str) -> tuple[str, ...]:
  names = tuple(text.split(","))
  if unknown := [name for name in names if name not in PARTS]:
    raise argparse.ArgumentTypeError(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
  return names


def _before(file: pathlib.Path | None) -> dict[str, Any]:
  return json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}


MATERIALISED, TILED, GROUPED = "materialised", "tiled", "grouped"


def loss(scale: Scale, _: float) -> Iterator[dict[str, Any]]:
  """Loss and gradient in the hidden vectors and all of a head's parameters, float32."""
  shape = scale.loss
  heads = {
    TILED: DenseHead(shape.vocab, shape.dim),
    GROUPED: GroupedHead(shape.vocab, shape.dim),
    "codebook": CodebookHead(shape.vocab, shape.dim, scale.codes),
  }
  programs = {MATERIALISED: (losses.gradient(losses.materialised_loss), losses.arrays(shape))}
  programs |= {name: loss_and_gradient(head, shape.tokens) for name, head in heads.items()}
  say(f"timing loss and gradient, {shape}")
  timed = compare(programs, scale.rounds)
  rows = {name: _beside(one, timed) for name, one in timed.items()}
  benching.show(
    f"loss and gradient, {shape} float32, {device()}",
    ("", "ms", "faster than materialised", "faster than tiled", "temp MiB", "temp smaller"),
    [_loss_cells(name, row) for name, row in rows.items()],
  )
  claims = _claims(rows)
  benching.show(
    "what was asked of the grouped head",
    ("", "asked", "measured"),
    [[name, one["asked"], f"{one['measured']:.3g}"] for name, one in claims.items()],
  )
  yield {"shape": shape._asdict(), "codes": scale.codes, "rows": rows, "claims": claims}


def _beside(one: Timed, timed: dict[str, Timed]) -> dict[str, float]:
  full = timed[MATERIALISED]
  return {
    "seconds": one.seconds,
    "faster_than_materialised": full.seconds / one.seconds,
    "faster_than_tiled": timed[TILED].seconds / one.seconds,
    "temp_bytes": one.temp_bytes,
    "temp_smaller": full.temp_bytes / max(one.temp_bytes, 1),
  }


def _loss_cells(name: str, row: dict[str, float]) -> list[str]:
  speeds = row["faster_than_materialised"], row["faster_than_tiled"]
  return [
    name,
    f"{row['seconds'] * 1e3:.1f}",
    *(f"{speed:.3g}x" for speed in speeds),
    benching.mib(row["temp_bytes"]),
    f"{row['temp_smaller']:.3g}x",
  ]


def _claims(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
  own = rows[GROUPED]
  return {
    "faster than materialised": _claim("at least 30", own["faster_than_materialised"]),
    "faster than tiled": _claim("at least 15", own["faster_than_tiled"]),
    "temporaries smaller than materialised": _claim("at least 40", own["temp_smaller"]),
  }


def _claim(asked: str, measured: float) -> dict[str, Any]:
  return {"asked": asked, "measured": measured}


def steps(scale: Scale, budget_seconds: float) -> Iterator[dict[str, Any]]:
  """Tables 2 and 3: memory, tokens a second and multiply-accumulates of whole training steps."""
  for found in tables_2_and_3(scale.decoders, budget_seconds):
    dim, rows = list(found.items())[-1]
    decoder = next(one for one in scale.decoders if str(one.dim) == dim)
    benching.show(
      f"training step, {_sizes(decoder)}, blocks recomputed, {device()}",
      ("", "params", "peak GB", f"of {DENSE}", "without remat", "tokens/s", "GMAC a row"),
      [_step_cells(name, row, rows[DENSE]) for name, row in rows.items()],
    )
    yield found


def _sizes(decoder: Decoder) -> str:
  sizes = f"D={decoder.dim} L={decoder.layers} V={decoder.vocab}"
  return f"{sizes} B={decoder.batch} T={decoder.context}"


def _step_cells(name: str, row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
  work = row["macs"]
  macs = f"{work['weights'] / 1e9:.2f} + {work['attention'] / 1e9:.2f}"
  if "error" in row:
    return [name, "—", "failed", "—", "—", "—", macs]
  of_dense = f"{row['peak_bytes'] / dense['peak_bytes']:.3f}" if "peak_bytes" in dense else "—"
  plain = row.get("without_remat")
  return [
    name,
    f"{row['params'] / 1e6:.1f} M",
    f"{row['peak_bytes'] / 1e9:.2f}",
    of_dense,
    f"{plain['peak_bytes'] / 1e9:.2f}" if plain else "—",
    f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "—",
    macs,
  ]


Part = Callable[[Scale, float], Iterator[Any]]
PARTS: dict[str, Part] = {"loss": loss, "steps": steps}


if __name__ == "__main__":
  sys.exit(main())
