"""Losses and decoding of large vocabularies on TPUs that are absent, by the compiler's account.

python -m experiments.bench.tpu                    compile what is missing, then render
python -m experiments.bench.tpu --chips v5e --dims 2048 4096 --vocabularies 32768 131072 262144
python -m experiments.bench.tpu --decoding --dims 640 2048 --vocabularies 262144
python -m experiments.bench.tpu --render           the tables alone
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import cycles, losses
from experiments.plan.isolated import isolated
from experiments.studies import study_page
from vqjax import (
  CertifiedHead,
  CodebookHead,
  DenseHead,
  GroupedHead,
  ProductHead,
  linear_cross_entropy,
)
from vqjax.lab import chips, exits
from vqjax.lab.plan import compiling
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.training import provenance

RESULTS = pathlib.Path("docs/results/tpu_losses.jsonl")
TABLE = RESULTS.with_suffix(".md")
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, CODES = 16384, 4096
ESTIMATE = "compiler's estimate, not a run"
PARTS = 6
"""Instructions of a program that a row keeps."""
SHOWN = 2048, 131_072
"""D and V of the losses on the page."""


@dataclasses.dataclass(frozen=True)
class LossOnChip:
  """A loss on one chip."""

  program: str
  chip: str
  dim: int
  vocab: int


class CostedProgram(NamedTuple):
  """A program, the shapes and dtypes of its arguments, and what it cannot avoid.

  Attributes:
    function: the program.
    arguments: shapes and dtypes of its arguments.
    flops: operations.
    bytes: bytes that it reads.
  """

  function: Callable
  arguments: tuple
  flops: float
  bytes: float = 0


def _weights(cell: LossOnChip) -> tuple:
  of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
  return (
    of((TOKENS, cell.dim), jnp.bfloat16),
    of((cell.vocab, cell.dim), jnp.bfloat16),
    of((TOKENS,), jnp.int32),
  )


def _dense(loss: Callable, gradient: bool = True) -> Callable[[LossOnChip], CostedProgram]:
  function = losses.gradient(loss) if gradient else loss
  flops = lambda cell: (6 if gradient else 2) * TOKENS * cell.dim * cell.vocab
  return lambda cell: CostedProgram(function, _weights(cell), flops(cell))


def _head(
  make: Callable[[LossOnChip], Any], rows: Callable[[Any], int]
) -> Callable[[LossOnChip], CostedProgram]:
  def job(cell: LossOnChip) -> CostedProgram:
    head = make(cell)
    hidden = jax.ShapeDtypeStruct((TOKENS, cell.dim), jnp.bfloat16)
    # The key is traced: it would be computed on the chip that is not here.
    variables = jax.eval_shape(lambda h: head.init(jax.random.key(0), h), hidden)
    tables = {name: tree for name, tree in variables.items() if name != "params"}

    def loss(params, hidden, tables, tokens):
      given = {"params": params, **tables}
      return -head.apply(given, hidden, tokens, method="log_prob").mean()

    arguments = variables["params"], hidden, tables, jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return CostedProgram(losses.gradient(loss), arguments, 6 * TOKENS * cell.dim * rows(head))

  return job


def _chunked_gradient(size: int) -> Callable[[LossOnChip], CostedProgram]:
  """Token chunks whose gradient is formed in the forward pass, as Liger's."""

  def function(hidden, weight, tokens):
    def step(carry, one):
      loss, d_weight = carry
      part, (d_hidden, d_part) = losses.gradient(losses.materialised_loss)(one[0], weight, one[1])
      return (loss + part, d_weight + d_part.astype(jnp.float32)), d_hidden

    parts = hidden.reshape(-1, size, hidden.shape[1]), tokens.reshape(-1, size)
    start = 0.0, jnp.zeros(weight.shape, jnp.float32)
    (loss, d_weight), d_hidden = lax.scan(step, start, parts)
    share = size / len(tokens)
    d_hidden = (share * d_hidden.reshape(hidden.shape)).astype(hidden.dtype)
    return share * loss, (d_hidden, (share * d_weight).astype(weight.dtype))

  return lambda cell: CostedProgram(function, _weights(cell), 6 * TOKENS * cell.dim * cell.vocab)


def _tokamax(cell: LossOnChip) -> CostedProgram:
  """tokamax's XLA implementation, all logits in bfloat16, with the weight as [D, V]."""
  from absl import flags
  from tokamax._src.ops.linear_softmax_cross_entropy_loss import api

  flags.FLAGS.mark_as_parsed()
  run = api.linear_softmax_cross_entropy_loss
  loss = lambda h, w, t: run(h, t, w, reduction="mean", implementation="xla")
  hidden, weight, tokens = _weights(cell)
  transposed = jax.ShapeDtypeStruct(weight.shape[::-1], weight.dtype)
  flops = 6 * TOKENS * cell.dim * cell.vocab
  return CostedProgram(losses.gradient(loss), (hidden, transposed, tokens), flops)


def _reduced(scratch: int) -> Callable:
  mean = {"reduction": "mean", "scratch": scratch}
  return lambda hidden, weight, tokens: linear_cross_entropy(hidden, weight, tokens, **mean)


OURS, REDUCED = "linear_log_prob", "linear_cross_entropy, mean, 512 MiB of scratch"
PROGRAMS: Mapping[str, Callable[[LossOnChip], CostedProgram]] = {
  OURS: _dense(losses.tiled_loss()),
  "linear_log_prob, forward alone": _dense(losses.tiled_loss(), gradient=False),
  REDUCED: _dense(_reduced(2**29)),
  "token chunks of 1024, recomputed": _dense(losses.chunked_loss(1024)),
  "token chunks of 2048, recomputed": _dense(losses.chunked_loss(2048)),
  "token chunks of 1024, gradient in the forward pass": _chunked_gradient(1024),
  "materialised logits (tokamax, XLA)": _tokamax,
  f"codebook K={CODES}": _head(
    lambda c: CodebookHead(c.vocab, c.dim, CODES, param_dtype=jnp.bfloat16), lambda head: CODES
  ),
  "grouped": _head(
    lambda c: GroupedHead(c.vocab, c.dim, param_dtype=jnp.bfloat16),
    lambda head: sum(head.groups_and_slots()),
  ),
  "product K=256, 8 numbers each": _head(
    lambda c: ProductHead(c.vocab, c.dim, 256, c.dim // 8, param_dtype=jnp.bfloat16),
    lambda head: head.vocab,
  ),
}
PEERS = tuple(name for name in PROGRAMS if name.startswith("token chunks"))


def _decoded(
  make: Callable, dtype: str, batch: int, certified: bool
) -> Callable[[LossOnChip], CostedProgram]:
  """The best token of each of `batch` vectors by a head over a weight of `dtype`."""

  def job(cell: LossOnChip) -> CostedProgram:
    # Of 160 states of Gemma 3 270M, the 99th percentile of the rows in doubt is 17.
    budget = {"budget": 64} if certified else {}
    head = make(cell.vocab, cell.dim, param_dtype=dtype, **budget)
    hidden = jax.ShapeDtypeStruct((batch, cell.dim), dtype)
    variables = jax.eval_shape(lambda h: head.init(jax.random.key(0), h), hidden)

    def greedy(variables, hidden):
      # A greedy draw has no use for its key.
      return head.apply(variables, hidden, jax.random.key(0), 0.0, method="sample")

    size = cell.vocab * cell.dim
    read = size if certified else size * jnp.dtype(dtype).itemsize
    return CostedProgram(greedy, (variables, hidden), 2 * batch * size, read)

  return job


BATCHES = (1, 16)
"""Vectors that are decoded at once."""

DENSE_BFLOAT16 = "dense, bfloat16"
HEADS = {
  "dense, float32": (DenseHead, "float32", False),
  DENSE_BFLOAT16: (DenseHead, "bfloat16", False),
  "certified over float32": (CertifiedHead, "float32", True),
  "certified over bfloat16": (CertifiedHead, "bfloat16", True),
}
SHOWN_HEADS = DENSE_BFLOAT16, "certified over float32"
"""The heads of the page; the others are near, or twice as slow."""

DECODING: Mapping[str, Callable[[LossOnChip], CostedProgram]] = {
  f"{name}, {batch}": _decoded(make, dtype, batch, certified)
  for name, (make, dtype, certified) in HEADS.items()
  for batch in BATCHES
}


def estimated(cell: LossOnChip) -> dict[str, Any]:
  """The row of a cell: time and memory by the compiler's account."""
  jax.config.update("jax_platforms", "cpu")
  device = compiling.tpu_devices(TOPOLOGIES[cell.chip])[0]
  mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
  place = NamedSharding(mesh, P())
  start = time.perf_counter()
  with jax.set_mesh(mesh):
    job = {**PROGRAMS, **DECODING}[cell.program](cell)
    arguments = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), job.arguments
    )
    compiled = jax.jit(job.function, out_shardings=place).lower(*arguments).compile()
  found = cycles.estimate(compiled.as_text())
  seconds = found.cycles / cycles.CLOCK[cell.chip]
  chip = chips.tpu(TOPOLOGIES[cell.chip])
  least = max(job.flops / chip.flops, job.bytes / chip.bandwidth)
  return dataclasses.asdict(cell) | {
    "source": ESTIMATE,
    "tokens": TOKENS,
    "seconds": seconds,
    "least_seconds": least,
    "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    "unknown_loops": found.unknown,
    "parts": [
      [part.name, part.result, part.times, part.cycles / cycles.CLOCK[cell.chip]]
      for part in found.parts[:PARTS]
    ],
    "compile_seconds": time.perf_counter() - start,
    "commit": provenance.commit(),
    "jax": jax.__version__,
  }


def read_loss_rows(path: pathlib.Path) -> dict[LossOnChip, dict[str, Any]]:
  """The newest row of each cell.

  Raises:
    ValueError: a line is no row; the message names it.
  """
  if not path.exists():
    return {}
  names, rows = [field.name for field in dataclasses.fields(LossOnChip)], {}
  for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
    try:
      row = json.loads(line)
      rows[LossOnChip(**{name: row[name] for name in names})] = row
    except (json.JSONDecodeError, KeyError) as error:
      raise ValueError(
        f"line {number} of {path} must be an estimate; got {error!r}. Restore or remove the line."
      ) from error
  return rows


def fill_losses(path: pathlib.Path, cells: Sequence[LossOnChip]) -> None:
  """Compile the cells without an estimate, each in a process of its own, and append their rows."""
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = read_loss_rows(path)
  missing = [cell for cell in cells if "seconds" not in rows.get(cell, {})]
  for at, cell in enumerate(missing, 1):
    try:
      row = isolated(estimated, cell)
      said = f"{1e3 * row['seconds']:.1f} ms, {units.size(row['temp_bytes'])} ({ESTIMATE})"
    except Exception as error:  # a compiler's failures have no type of their own
      said = (str(error).splitlines() or [type(error).__name__])[0][:200]
      row = dataclasses.asdict(cell) | {"failed": said}
    print(f"{at}/{len(missing)} {cell.chip} D={cell.dim} V={cell.vocab} {cell.program}: {said}")
    with path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row, allow_nan=False) + "\n")


def render_losses(rows: Mapping[LossOnChip, dict[str, Any]], path: pathlib.Path) -> None:
  """Rewrite the tables of the page, and its CSV files with all sizes and heads."""
  sizes = sorted({(c.dim, c.vocab) for c in rows})
  times = [_line(dim, vocab, name, rows) for dim, vocab in sizes for name in PROGRAMS]
  columns = ["D", "V", "program", *(f"{chip}, estimated ms" for chip in TOPOLOGIES)]
  losses = pd.DataFrame(filter(None, times), columns=[*columns, "temporaries, v5e"])
  decoding = _decoding(rows)
  study_page.save_table(path.with_suffix(".csv"), losses)
  study_page.save_table(path.with_name(f"{path.stem}-decoding.csv"), decoding)
  is_shown = (losses["D"] == f"{SHOWN[0]:,}") & (losses["V"] == f"{SHOWN[1]:,}")
  heads = decoding[decoding["head"].isin(SHOWN_HEADS)]
  blocks = {
    "times": markdown(losses[is_shown].drop(columns=["D", "V"])),
    "decoding": markdown(heads.replace(units.MISSING, None).drop(columns="V"), left=3),
  }
  study_page.update_page(path, blocks)


def _decoding(rows) -> pd.DataFrame:
  """Microseconds of greedy decoding, their share of the least, and the speed over bfloat16."""
  lines = []
  for dim, vocab in sorted({(c.dim, c.vocab) for c in rows if c.program in DECODING}):
    for batch in BATCHES:
      for name in HEADS:
        cells = [
          (rows.get(LossOnChip(f"{name}, {batch}", chip, dim, vocab), {}),
           rows.get(LossOnChip(f"{DENSE_BFLOAT16}, {batch}", chip, dim, vocab), {}))
          for chip in TOPOLOGIES
        ]  # fmt: skip
        times = [
          f"{1e6 * row['seconds']:.0f} ({row['least_seconds'] / row['seconds']:.0%}),"
          f" {peer['seconds'] / row['seconds']:.2f}×"
          if "seconds" in row and "seconds" in peer
          else units.MISSING
          for row, peer in cells
        ]
        lines.append([f"{dim:,}", f"{vocab:,}", batch, name, *times])
  columns = ["D", "V", "vectors", "head", *(f"{chip}, estimated µs" for chip in TOPOLOGIES)]
  return pd.DataFrame(lines, columns=columns)


def _line(dim, vocab, name, rows) -> list[str] | None:
  of_chip = {chip: rows.get(LossOnChip(name, chip, dim, vocab)) for chip in TOPOLOGIES}
  if not any(of_chip.values()):
    return None
  first = of_chip["v5e"] or {}
  memory = units.size(first["temp_bytes"]) if "temp_bytes" in first else units.MISSING
  times = [_time(row, name, dim, vocab, rows) for row in of_chip.values()]
  return [f"{dim:,}", f"{vocab:,}", name, *times, memory]


def _time(row, name, dim, vocab, rows) -> str:
  """Milliseconds, the share of the least possible time, and for ours the ratio to the best peer."""
  if not row:
    return units.MISSING
  if "seconds" not in row:
    return "failed"
  text = f"{1e3 * row['seconds']:.1f} ({row['least_seconds'] / row['seconds']:.0%})"
  peers = [rows.get(LossOnChip(peer, row["chip"], dim, vocab), {}) for peer in PEERS]
  best = min((peer["seconds"] for peer in peers if "seconds" in peer), default=None)
  return f"{text}, {row['seconds'] / best:.2f}×" if name in (OURS, REDUCED) and best else text


def main(arguments: Sequence[str] | None = None) -> int:
  """Compile missing cells and render; return the exit code."""
  options = _parser().parse_args(arguments)
  cells = [
    LossOnChip(name, chip, dim, vocab)
    for chip in options.chips
    for dim in options.dims
    for vocab in options.vocabularies
    for name in (DECODING if options.decoding else options.programs)
  ]
  try:
    if not options.render:
      fill_losses(RESULTS, cells)
    render_losses(read_loss_rows(RESULTS), TABLE)
  except (ValueError, ImportError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.bench.tpu",
    description="Time and memory of losses on TPUs by the compiler's account; nothing is run.",
    epilog=f"Rows are appended to {RESULTS}; what has one is not compiled again.",
  )
  parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
  parser.add_argument("--dims", nargs="+", type=int, default=[2048])
  parser.add_argument("--vocabularies", nargs="+", type=int, default=[131072])
  parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
  parser.add_argument("--decoding", action="store_true", help="greedy decoding instead of losses")
  parser.add_argument("--render", action="store_true", help="compile nothing, render what there is")
  return parser


if __name__ == "__main__":
  exits.run_main(main)
