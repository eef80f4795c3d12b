"""Benchmarks of the grouped head: loss, training steps, group sizes, images."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import losses, measure
from experiments.bench.losses import LossShape
from experiments.bench.measure import compare, log, settled_seconds
from experiments.bench.training_step import TrainingStep
from experiments.studies.grouped.convnet import ConvNet
from experiments.studies.grouped.drawings import Drawn
from experiments.studies.grouped.shapes import NUM_CLASSES, SIDE, draw
from experiments.studies.grouped.sizes import ABLATED
from vqjax import (
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  GroupedHead,
  Head,
  UnsharedGroupedHead,
  assign,
)
from vqjax.heads.workload import loss_and_gradient
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Windows
from vqjax.lab.report.units import MISSING
from vqjax.lab.training.provenance import device
from vqjax.lm.models import Transformer
from vqjax.ops import groups as group_ops
from vqjax.ops import softmax

CODES = 1024
ROUNDS = 3
BUDGET_SECONDS = 900.0
"""Training steps of widths that would take longer than this in all are compiled but not timed."""
NEAR = 1.02
"""Ratio to the smallest memory below which a group size counts as equally small."""
MATERIALISED, TILED, GROUPED, UNSHARED = "materialised", "tiled", "grouped", "unshared"


def loss(quick: bool) -> Iterator[dict[str, Any]]:
  """Time loss and gradient of the grouped heads against dense losses, in float32."""
  shape, codes, rounds = LossShape(4096, 256, 50_257), CODES, 5
  if quick:
    shape, codes, rounds = LossShape(32, 16, 509), 16, 1
  heads = {
    TILED: DenseHead(shape.vocab, shape.dim),
    GROUPED: GroupedHead(shape.vocab, shape.dim),
    UNSHARED: UnsharedGroupedHead(shape.vocab, shape.dim),
    "codebook": CodebookHead(shape.vocab, shape.dim, codes),
  }
  programs = {MATERIALISED: (losses.gradient(losses.materialised_loss), losses.arrays(shape))}
  programs |= {name: loss_and_gradient(head, shape.tokens) for name, head in heads.items()}
  log(f"timing loss and gradient, {shape}")
  timed = compare(programs, rounds)
  full = timed[MATERIALISED]
  rows = {
    name: {
      "seconds": one.seconds,
      "faster_than_materialised": full.seconds / one.seconds,
      "faster_than_tiled": timed[TILED].seconds / one.seconds,
      "temp_bytes": one.temp_bytes,
      "temp_smaller": full.temp_bytes / max(one.temp_bytes, 1),
    }
    for name, one in timed.items()
  }
  measure.show_rows(
    f"loss and gradient, {shape} float32, {device()}",
    ("", "ms", "faster than materialised", "faster than tiled", "temp MiB", "temp smaller"),
    [
      [
        name,
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['faster_than_materialised']:.3g}",
        f"{row['faster_than_tiled']:.3g}",
        measure.mib(row["temp_bytes"]),
        f"{row['temp_smaller']:.3g}",
      ]
      for name, row in rows.items()
    ],
  )
  slower = rows[UNSHARED]["seconds"] / rows[GROUPED]["seconds"]
  measure.say(f"the unshared head takes {slower:.3g}x the time of the shared one")
  yield {"shape": shape._asdict(), "codes": codes, "rows": rows, "unshared_slower": slower}


class Decoder(NamedTuple):
  """A decoder and its batch; the defaults are those of the paper's Tables 2 and 3."""

  dim: int
  layers: int = 8
  heads: int = 8
  vocab: int = 50_257
  batch: int = 32
  context: int = 512


class MaterialisedHead(DenseHead):
  """A dense head whose loss holds all logits in memory."""

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    logits = self._logits(arrays, hidden) / temperature
    return -optax.softmax_cross_entropy_with_integer_labels(logits, token)


class Contender(NamedTuple):
  """A row of Tables 2 and 3.

  Attributes:
    head: (vocab, dim, embedding) -> head; a tied head shares the embedding.
    window: positions that every second block attends to; None for all.
  """

  head: Callable[[int, int, DenseEmbedding], Head]
  window: int | None = None


def _materialised(vocab: int, dim: int, embedding: DenseEmbedding) -> Head:
  return MaterialisedHead(vocab, dim, embedding=embedding)


DENSE = "gpt-2"
CONTENDERS = {
  DENSE: Contender(_materialised),
  "gpt-neo": Contender(_materialised, window=256),
  "tiled": Contender(lambda vocab, dim, embedding: DenseHead(vocab, dim, embedding=embedding)),
  "grouped": Contender(lambda vocab, dim, _: GroupedHead(vocab, dim)),
  "codebook": Contender(lambda vocab, dim, _: CodebookHead(vocab, dim, min(CODES, vocab // 2))),
}
"""Dense heads are tied and there are 512 positions: these give the paper's parameter counts, 8.1 M
and 506.8 M (printed as 659 M)."""


TINY = Decoder(8, layers=1, heads=2, vocab=509, batch=2, context=8)


def experiment(decoder: Decoder, contender: Contender, remat: bool = True) -> Experiment:
  """The experiment whose step is measured: AdamW in float32, without a text."""
  embedding = DenseEmbedding(decoder.vocab, decoder.dim)
  model = Transformer(
    embedding=embedding,
    head=contender.head(decoder.vocab, decoder.dim, embedding),
    dim=decoder.dim,
    layers=decoder.layers,
    heads=decoder.heads,
    context=decoder.context,
    window=contender.window,
    remat=remat,
  )
  return Experiment("step", model, None, None, Windows(), Train(batch=decoder.batch))


def macs(decoder: Decoder, head: Head) -> dict[str, int]:
  """Multiply-accumulates of a row's forward pass: weights, and inside attention.

  Attention multiplies queries with keys and attention weights with values, for every pair of
  positions. The paper counts these products for GPT-Neo only: 4.64 G at a width of 128, against
  4.10 G for GPT-2.
  """
  blocks = 12 * decoder.layers * decoder.dim**2
  of_weights = decoder.context * (blocks + head.size().flops_per_token // 2)
  of_attention = 2 * decoder.layers * decoder.context**2 * decoder.dim
  return {"weights": of_weights, "attention": of_attention}


def steps(quick: bool) -> Iterator[dict[str, Any]]:
  """Tables 2 and 3: memory, tokens a second and multiply-accumulates."""
  decoders = tuple(Decoder(dim) for dim in (128, 256, 1024, 2048))
  for rows_by_width in tables_2_and_3((TINY,) if quick else decoders, BUDGET_SECONDS):
    dim, rows = list(rows_by_width.items())[-1]
    decoder = TINY if quick else Decoder(int(dim))
    measure.show_rows(
      f"training step, {decoder}, blocks recomputed, {device()}",
      ("", "params", "peak GB", f"of {DENSE}", "without remat", "tokens/s", "GMAC a row"),
      [_step_cells(name, row, rows[DENSE]) for name, row in rows.items()],
    )
    yield rows_by_width


def _step_cells(name: str, row: dict[str, Any], dense: dict[str, Any]) -> list[str]:
  work = row["macs"]
  macs = f"{work['weights'] / 1e9:.2f} + {work['attention'] / 1e9:.2f}"
  if "peak_bytes" not in row:
    return [name, MISSING, "failed", MISSING, MISSING, MISSING, macs]
  of_dense = f"{row['peak_bytes'] / dense['peak_bytes']:.3f}" if "peak_bytes" in dense else MISSING
  plain = row.get("without_remat")
  return [
    name,
    f"{row['params'] / 1e6:.1f} M",
    f"{row['peak_bytes'] / 1e9:.2f}",
    of_dense,
    f"{plain['peak_bytes'] / 1e9:.2f}" if plain else "failed" if "error" in row else MISSING,
    f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else MISSING,
    macs,
  ]


def tables_2_and_3(
  decoders: Sequence[Decoder], budget_seconds: float
) -> Iterator[dict[str, dict[str, Any]]]:
  """The rows by width and contender, after each width.

  All are compiled with blocks recomputed in the backward pass, the first width also without. Steps
  are timed where they fit the device and where those of a width are likely to end within the rest
  of the budget.
  """
  rows_by_width, left, seconds_per_mac = {}, budget_seconds, 0.0
  for decoder in decoders:
    rows, steps = _compiled(decoder, plain_too=not rows_by_width)
    rows_by_width[str(decoder.dim)] = rows
    work = sum(sum(rows[name]["macs"].values()) for name in steps)
    if steps and seconds_per_mac * work <= left:
      start = time.perf_counter()
      _time(decoder, rows, steps)
      spent = time.perf_counter() - start
      left, seconds_per_mac = left - spent, spent / work
    yield rows_by_width


def _compiled(decoder: Decoder, plain_too: bool) -> tuple[dict, dict[str, TrainingStep]]:
  """The rows with the compiler's memory, and the steps that fit the device."""
  rows, steps = {}, {}
  for name, contender in CONTENDERS.items():
    log(f"compiling {name}, width {decoder.dim}")
    run = experiment(decoder, contender)
    rows[name] = {"macs": macs(decoder, run.model.head)}
    try:
      step = TrainingStep(run)
      rows[name] |= {"params": step.params} | step_memory(step)
      if step.peak_bytes <= device_bytes():
        steps[name] = step
      if plain_too:
        rows[name]["without_remat"] = step_memory(
          TrainingStep(experiment(decoder, contender, remat=False))
        )
    except jax.errors.JaxRuntimeError as error:  # a GPU's compiler refuses what cannot fit
      rows[name]["error"] = str(error).splitlines()[0][:300]
  return rows, steps


def _time(decoder: Decoder, rows: dict, steps: dict[str, TrainingStep]) -> None:
  """Add times to the rows: contenders in turn, one model at a time in memory."""
  times = {name: [] for name in steps}
  for turn in range(ROUNDS):
    log(f"timing steps of width {decoder.dim}, round {turn + 1} of {ROUNDS}")
    for name, step in steps.items():
      times[name].append(settled_seconds(step))
      step.end()
  for name, seconds in times.items():
    rows[name]["step_seconds"] = statistics.median(seconds)
    rows[name]["tokens_per_s"] = decoder.batch * decoder.context / rows[name]["step_seconds"]


def step_memory(step: TrainingStep) -> dict[str, int]:
  """Peak and temporary bytes of a step, by the compiler's account."""
  return {"peak_bytes": step.peak_bytes, "temp_bytes": step.temp_bytes}


def device_bytes() -> int:
  """Memory of the first device; of this machine for a CPU."""
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sizes(quick: bool) -> Iterator[dict[str, Any]]:
  """Figure 3: memory by the size of a group."""
  decoder = TINY if quick else Decoder(64, layers=4, heads=2, vocab=50_258)
  rows = []
  for size in (7,) if quick else ABLATED:
    rows.append(memory_at(decoder, size))
    smallest = least(decoder.vocab, rows)
    yield {"sizes": rows, "least": smallest}
  keys = "size", "groups", "peak_bytes", "head_temp_bytes", "untiled_temp_bytes"
  measure.show_rows(
    f"memory by group size, {decoder}, blocks recomputed",
    ("tokens a group", "groups", "step, peak MiB", "head alone, temp MiB", "untiled"),
    [
      [*(str(row[key]) for key in keys[:2]), *(measure.mib(row[key]) for key in keys[2:])]
      for row in rows
    ],
  )
  for kind in ("step", "head", "untiled"):
    first, last = smallest[kind]["near"]
    measure.say(f"{kind}: least at {smallest[kind]['size']}, within 2 % of it at {first} to {last}")
  measure.say(f"sqrt V = {smallest['sqrt']}; sqrt(V / c) = {smallest['corrected']}")


def equal(vocab: int, size: int) -> tuple[int, ...]:
  """Sizes of groups of `size` tokens, with the remainder in the last group."""
  whole, left = divmod(vocab, size)
  return (size,) * whole + ((left,) if left else ())


class UntiledHead(GroupedHead):
  """The grouped head of the paper's Figure 5, with all scores in memory."""

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    del temperature
    group, slot = group_ops.group_and_slot(token, self.starts)
    shared = softmax.linear_scores(hidden, arrays["slot_weight"])
    scores = group_ops.scaled(shared, arrays["scale"][group], arrays["shift"][group])
    size = jnp.asarray(np.diff(self.starts), jnp.int32)[group]
    log_group = self._log_group(arrays, hidden)
    of_group = jnp.take_along_axis(log_group, group[..., None], axis=-1)[..., 0]
    return of_group + group_ops.log_prob_in_group(scores, size, slot)


def memory_at(decoder: Decoder, size: int) -> dict[str, int]:
  """Bytes of a training step, and of its head's loss, tiled and untiled.

  The arrays of the decoder hide smaller ones of the head. Blocks are recomputed in the backward
  pass.
  """
  groups = equal(decoder.vocab, size)
  log(f"compiling {len(groups)} groups of {size}")
  head = GroupedHead(decoder.vocab, decoder.dim, sizes=groups)
  untiled = UntiledHead(decoder.vocab, decoder.dim, sizes=groups)
  step = TrainingStep(experiment(decoder, Contender(lambda *_: head)))
  tokens = decoder.batch * decoder.context
  row = {"size": size, "groups": len(groups)} | step_memory(step)
  for name, one in (("head", head), ("untiled", untiled)):
    function, arguments = loss_and_gradient(one, tokens)
    compiled = jax.jit(function).lower(*arguments).compile()
    row[f"{name}_temp_bytes"] = measure.temp_bytes(compiled)
  return row


def least(vocab: int, rows: Sequence[dict[str, int]]) -> dict[str, Any]:
  """The group sizes of least memory, those within `NEAR`, and the formulas' sizes."""
  kinds = {"step": "peak_bytes", "head": "head_temp_bytes", "untiled": "untiled_temp_bytes"}
  result = {
    "sqrt": math.isqrt(vocab),
    "corrected": round(vocab / assign.memory_groups(vocab)),
  }
  for name, kind in kinds.items():
    best = min(rows, key=lambda row: row[kind])
    near = [row["size"] for row in rows if row[kind] <= NEAR * best[kind]]
    result[name] = {"size": best["size"], "bytes": best[kind], "near": [min(near), max(near)]}
  return result


class Images(NamedTuple):
  """The paper's ConvNet and its batch."""

  classes: int = NUM_CLASSES
  dim: int = 512
  channels: tuple[int, ...] = (32, 64, 128)
  batch: int = 64


class _Predrawn(Drawn):
  """A loader of images that are drawn already."""

  def shapes(self, batch, context):
    image = jax.ShapeDtypeStruct((batch, SIDE, SIDE, 3), jnp.float32)
    return super().shapes(batch, context) | {"inputs": image}


def images(quick: bool) -> Iterator[dict[str, Any]]:
  """Section 3.2: seconds to draw a batch, and of steps with and without drawing."""
  sizes = Images(classes=509, dim=8, channels=(2,), batch=2) if quick else Images()
  net = lambda **more: ConvNet(
    head=GroupedHead(sizes.classes, sizes.dim, use_bias=True),
    dim=sizes.dim,
    channels=sizes.channels,
    **more,
  )
  step = lambda model, loader: TrainingStep(
    Experiment("step", model, None, None, loader, Train(batch=sizes.batch))
  )
  log("compiling the network for images")
  inputs = jax.random.randint(jax.random.key(0), (sizes.batch, 2), 0, sizes.classes)
  drawing = jax.jit(draw).lower(inputs).compile()

  def draw_seconds():
    start = time.perf_counter()
    jax.block_until_ready(drawing(inputs))
    return time.perf_counter() - start

  calls = {
    "draw": draw_seconds,
    "step": step(net(), _Predrawn()),
    "step that draws": step(net(images=draw), Drawn()),
  }
  times = {name: [] for name in calls}
  for turn in range(ROUNDS):
    log(f"timing images, round {turn + 1} of {ROUNDS}")
    for name, call in calls.items():
      times[name].append(settled_seconds(call))
  seconds = {name: statistics.median(values) for name, values in times.items()}
  measure.show_rows(
    f"a batch of {sizes.batch} images of {sizes.classes:,} classes, {device()}",
    ("", "ms"),
    [[name, f"{1e3 * value:.1f}"] for name, value in seconds.items()],
  )
  draw_of_step = seconds["draw"] / seconds["step"]
  measure.say(f"drawing takes {draw_of_step:.3f} of the step")
  yield {
    "batch": sizes.batch,
    "classes": sizes.classes,
    "params": calls["step"].params,
    "seconds": seconds,
    "draw_of_step": draw_of_step,
  }
