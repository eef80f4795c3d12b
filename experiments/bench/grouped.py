"""What does the grouped head cost: its loss, whole training steps, group sizes, drawn images?

make bench-grouped
python -m experiments.bench.grouped --json docs/results/grouped/cost.json --only loss,steps

Each part is written as soon as it is there, and measured again alone where asked for; a part that
is in the file already stays, with its own provenance. Nothing of a step that is only compiled is
ever allocated.
"""

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.bench import benching, grouped_loss
from experiments.bench import group_sizes as grouped_sizes
from experiments.bench import images as grouped_images
from experiments.bench.images import Pictures
from experiments.bench.losses import Shape
from experiments.bench.training_step import DENSE, Decoder, tables_2_and_3
from experiments.studies.grouped.rows import ABLATED
from vqjax.lab.training.provenance import device, provenance


class Scale(NamedTuple):
  """The sizes of every part.

  Attributes:
    loss: of one loss and its gradient.
    codes: of its codebook.
    decoders: those of Tables 2 and 3.
    ablation: that of Figure 3.
    sizes: its group sizes.
    pictures: the network for pictures.
    rounds: timings that a median is of.
  """

  loss: Shape
  codes: int
  decoders: tuple[Decoder, ...]
  ablation: Decoder
  sizes: tuple[int, ...]
  pictures: Pictures
  rounds: int


FULL = Scale(
  loss=Shape(4096, 256, 50_257),
  codes=1024,
  decoders=tuple(Decoder(dim) for dim in (128, 256, 1024, 2048)),
  ablation=Decoder(64, layers=4, heads=2, vocab=50_258),
  sizes=ABLATED,
  pictures=Pictures(),
  rounds=5,
)
TINY = Decoder(8, layers=1, heads=2, vocab=509, batch=2, context=8)
QUICK = Scale(
  loss=Shape(32, 16, 509),
  codes=16,
  decoders=(TINY,),
  ablation=TINY,
  sizes=(7, 23, 300),
  pictures=Pictures(classes=509, dim=8, channels=(2,), batch=2),
  rounds=1,
)
BUDGET_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  parser = benching.parser("experiments.bench.grouped", __doc__.splitlines()[0])
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
  try:
    figures = _before(options.json)
  except ValueError as error:
    parser.error(str(error))
  for name in options.only:
    for found in PARTS[name](scale, options.budget_seconds):
      figures |= found
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
  """What is in the file; ValueError where that is something else than figures."""
  if file is None or not file.exists():
    return {}
  with contextlib.suppress(ValueError):
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found, dict) and "provenance" in found:
      return found
  raise ValueError(f"--json {file} holds no figures of this bench; name another file")


def loss(scale: Scale, _: float) -> Iterator[dict[str, Any]]:
  """Loss and gradient alone."""
  found = grouped_loss.costs(scale.loss, scale.codes, scale.rounds)
  benching.show(
    f"loss and gradient, {scale.loss} float32, {device()}",
    ("", "ms", "faster than materialised", "faster than tiled", "temp MiB", "temp smaller"),
    [_loss_cells(name, row) for name, row in found["rows"].items()],
  )
  benching.show(
    "asked of the grouped head, in times",
    ("", "asked", "measured"),
    [[name, one["asked"], f"{one['measured']:.3g}"] for name, one in found["claims"].items()],
  )
  yield {"loss": found}


def _loss_cells(name: str, row: dict[str, float]) -> list[str]:
  return [
    name,
    f"{row['seconds'] * 1e3:.1f}",
    f"{row['faster_than_materialised']:.3g}",
    f"{row['faster_than_tiled']:.3g}",
    benching.mib(row["temp_bytes"]),
    f"{row['temp_smaller']:.3g}",
  ]


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
    yield {"steps": found}


def _sizes(decoder: Decoder) -> str:
  sizes = f"D={decoder.dim} L={decoder.layers} V={decoder.vocab}"
  return f"{sizes} B={decoder.batch} T={decoder.context}"


def _step_cells(name: str, row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
  work = row["macs"]
  macs = f"{work['weights'] / 1e9:.2f} + {work['attention'] / 1e9:.2f}"
  if "peak_bytes" not in row:
    return [name, "—", "failed", "—", "—", "—", macs]
  of_dense = f"{row['peak_bytes'] / dense['peak_bytes']:.3f}" if "peak_bytes" in dense else "—"
  plain = row.get("without_remat")
  return [
    name,
    f"{row['params'] / 1e6:.1f} M",
    f"{row['peak_bytes'] / 1e9:.2f}",
    of_dense,
    f"{plain['peak_bytes'] / 1e9:.2f}" if plain else "failed" if "error" in row else "—",
    f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "—",
    macs,
  ]


def sizes(scale: Scale, _: float) -> Iterator[dict[str, Any]]:
  """Figure 3: memory by the size of a group."""
  decoder, rows = scale.ablation, []
  for size in scale.sizes:
    rows.append(grouped_sizes.memory_at(decoder, size))
    found = grouped_sizes.least(decoder.vocab, rows)
    yield {"sizes": rows, "least": found}
  benching.show(
    f"memory by group size, {_sizes(decoder)}, blocks recomputed",
    ("tokens a group", "groups", "step, peak MiB", "head alone, temp MiB", "untiled"),
    [_size_cells(row) for row in rows],
  )
  for of in ("step", "head", "untiled"):
    first, last = found[of]["near"]
    benching.say(f"{of}: least at {found[of]['size']}, within 2 % of it at {first} to {last}")
  benching.say(f"sqrt V = {found['sqrt']}; sqrt(V / c) = {found['corrected']}")


def _size_cells(row: dict[str, int]) -> list[str]:
  memory = row["peak_bytes"], row["head_temp_bytes"], row["untiled_temp_bytes"]
  return [str(row["size"]), str(row["groups"]), *map(benching.mib, memory)]


def images(scale: Scale, _: float) -> Iterator[dict[str, Any]]:
  """Section 3.2: what drawing costs beside learning."""
  found = grouped_images.costs(scale.pictures)
  benching.show(
    f"a batch of {found['batch']} pictures of {found['classes']:,} classes, {device()}",
    ("", "ms"),
    [[name, f"{1e3 * seconds:.1f}"] for name, seconds in found["seconds"].items()],
  )
  benching.say(f"drawing takes {found['draw_of_step']:.3f} of the step; at most 0.2 was asked")
  yield {"images": found}


Part = Callable[[Scale, float], Iterator[dict[str, Any]]]
PARTS: dict[str, Part] = {"loss": loss, "steps": steps, "sizes": sizes, "images": images}


if __name__ == "__main__":
  sys.exit(main())
