"""How fast is a codebook against other heads: logits as in VQ-Logits' Table 3, training, decoding?

python -m experiments.bench.codebook --json docs/results/vq/speed.json
python -m experiments.bench.codebook --tokens 512

All in one process, relative to a full softmax whose logits are materialised. At the size of Table 3
they would take 17.5 GB and more for their softmax, so it takes a slice of the tokens at a time, as
the paper's gather does.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np

from experiments.bench import benching, vq_programs
from experiments.bench.losses import Shape
from experiments.bench.timing import Timed, budgeted
from experiments.bench.vq_programs import FULL, GATHER, TILED, Sizes
from vqjax.lab.training.provenance import device, provenance

PAPER = Sizes(
  shape=Shape(16384, 768, 267_735),
  codes=(1024, 2048, 4096),
  cutoffs=(20_000, 80_000),
  rank=512,
  product=(256, 96),
  batches=(1, 64),
  best=(1, 50),
)
"""Those of Table 3: 32 sequences of 512 tokens of WikiText-103."""
QUICK = Sizes(Shape(32, 16, 512), (16, 32), (40, 160), 8, (16, 4), (2,), (3,))
SECONDS_A_TOKEN = 15 / 16384
"""What the calls of a program may take beyond its first, for each token of the batch."""
DECODING_SECONDS = 3.0
"""The same of a decoding step."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  parser = benching.parser("experiments.bench.codebook", __doc__.splitlines()[0])
  parser.add_argument(
    "--tokens", type=_positive, metavar="N", help="tokens of a batch in every row (default: 16384)"
  )
  options = parser.parse_args(arguments)
  sizes = QUICK if options.quick else PAPER
  if options.tokens:
    sizes = sizes._replace(shape=sizes.shape._replace(tokens=options.tokens))
  of_batch = 0.0 if options.quick else SECONDS_A_TOKEN * sizes.shape.tokens
  of_step = 0.0 if options.quick else DECODING_SECONDS
  figures = {
    "sizes": sizes._asdict() | {"shape": sizes.shape._asdict()},
    **batches(sizes, of_batch),
    "decoding": decoding(sizes, of_step),
  }
  benching.write(options.json, figures | {"provenance": provenance()})
  return 0


def _positive(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f"{text} is no number of tokens; give at least 1")
  return int(text)


def batches(sizes: Sizes, seconds: float) -> dict[str, dict]:
  """Prints what log-probabilities of a batch of tokens cost, and their loss with its gradient."""
  rows = vq_programs.contenders(sizes)
  variables = vq_programs.variables_of([one.head for one in rows.values()])
  data = vq_programs.batch(sizes.shape)
  of_slice = vq_programs.slice_of(sizes.shape.tokens, sizes.shape.vocab)
  benching.say(f"slices of {of_slice} tokens; tokens by Zipf's law; random codes; 16-bit weights")

  def table(title: str, program: Callable) -> dict[str, Timed]:
    programs = {name: program(one, variables[one.head], *data) for name, one in rows.items()}
    timed = budgeted(programs, seconds, said=benching.say)
    benching.show(
      f"{title}, {sizes.shape} float32, {device()}",
      ("", "ms", "faster", "temp MiB", "weights MB", "codes MB"),
      [_cells(name, t, timed[FULL], rows[name].head) for name, t in timed.items()],
    )
    return timed

  found = table("log-probabilities (Table 3)", vq_programs.forward)
  differences = _differences(found, sizes)
  trained = table("loss and gradient", vq_programs.training)
  return {
    "slice": of_slice,
    "forward": _figures(found, rows),
    "differences": differences,
    "training": _figures(trained, rows),
  }


def _cells(name, timed, full, head):
  return [
    name,
    f"{timed.seconds * 1e3:.1f}",
    f"{full.seconds / timed.seconds:.3g}x",
    benching.mib(timed.temp_bytes),
    f"{vq_programs.weight_bytes(head) / 1e6:.2f}",
    f"{vq_programs.table_bytes(head) / 1e6:.2f}",
  ]


def _figures(timed, rows):
  return {
    name: _measured(t, timed[FULL])
    | {
      "weight_bytes_16_bit": vq_programs.weight_bytes(rows[name].head),
      "table_bytes": vq_programs.table_bytes(rows[name].head),
    }
    for name, t in timed.items()
  }


def _measured(timed: Timed, full: Timed) -> dict[str, float]:
  return {
    "seconds": timed.seconds,
    "calls": timed.calls,
    "times_faster": full.seconds / timed.seconds,
    "temp_bytes": timed.temp_bytes,
  }


def _differences(timed: dict[str, Timed], sizes: Sizes) -> dict[str, float]:
  """Prints by how many nats two ways to compute the same log-probabilities differ at most."""
  found = {}
  exact = vq_programs.codebook_name(sizes.codes[0])
  for first, second in ((FULL, TILED), (GATHER, exact)):
    off = np.abs(np.asarray(timed[first].output) - np.asarray(timed[second].output)).max()
    found[second] = float(off)
    benching.say(f"{second} is at most {off:.1e} nats off {first}")
  return found


def decoding(sizes: Sizes, seconds: float) -> dict[str, dict]:
  """Prints what one step of decoding costs, each head relative to the dense one."""
  heads = vq_programs.decoders(sizes)
  variables = vq_programs.variables_of(list(heads.values()))
  return {
    f"batch {rows}": _decoding_of(rows, heads, variables, sizes, seconds) for rows in sizes.batches
  }


def _decoding_of(rows, heads, variables, sizes, seconds):
  programs = {
    (name, step): program
    for name, head in heads.items()
    for step, program in vq_programs.decoding(head, variables[head], rows, sizes.best).items()
  }
  benching.say(f"batch {rows}: {len(programs)} programs of at most {seconds:.0f} s each")
  timed = budgeted(programs, seconds, said=lambda _: None)
  steps = list(dict.fromkeys(step for _, step in timed))
  dense = next(iter(heads))
  found = {
    name: {step: _measured(timed[name, step], timed[dense, step]) for step in steps}
    for name in heads
  }
  cell = lambda one: f"{one['seconds'] * 1e3:.4g} ({one['times_faster']:.3g}x)"
  benching.show(
    f"ms of a decoding step and times faster, batch {rows}, D={sizes.shape.dim}"
    f" V={sizes.shape.vocab} float32, {device()}",
    ("", *steps),
    [[name, *(cell(one[step]) for step in steps)] for name, one in found.items()],
  )
  return found


if __name__ == "__main__":
  sys.exit(main())
