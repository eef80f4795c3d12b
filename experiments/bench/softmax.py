"""Benchmarks of the tiled softmax: speed, error, options, memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import losses, measure
from experiments.bench.losses import LossShape, gradient
from experiments.bench.measure import compare
from vqjax import (
  linear_cross_entropy,
  linear_log_prob,
  linear_softmax,
  linear_sparse_target_loss,
)
from vqjax.lab.plan.compiling import simulated_devices
from vqjax.lab.training.provenance import device
from vqjax.ops import device as limits
from vqjax.ops.reduced_loss import tile_of_tokens
from vqjax.sharding import MeshShape, make_mesh

MATERIALISED, TILED, PLAIN = "materialised (optax)", "linear_log_prob", "plain loss"
REDUCED, SCRATCH = "linear_cross_entropy, mean", 64 * 2**20
TILES = ((256, 1280), (512, 640), (512, 2560), (1024, 1280), (2048, 640))
BUDGET_SHAPES = LossShape(2048, 256, 32000), LossShape(4096, 128, 8192), LossShape(1024, 512, 50304)
MAX_ERROR = 1e-4
"""Nats. float32 sums in any order are closer to float64 than this; a wrong sum is not."""
DEVICES = 8


def speed_and_error(quick: bool) -> Iterator[dict[str, Any]]:
  """Time loss and gradient against materialised logits, and measure the error."""
  sizes, tiles, rounds = (LossShape(2048, 256, 32000), LossShape(2048, 256, 50257)), TILES, 5
  if quick:
    sizes, tiles, rounds = (LossShape(32, 16, 512), LossShape(32, 16, 509)), TILES[:1], 1
  figures = {"speed": []}
  for shape, shape_tiles in zip(sizes, (tiles, ()), strict=True):
    figures["speed"].append(speed(shape, shape_tiles, rounds))
    yield figures
  yield figures | {"error": error(sizes[1]._replace(tokens=sizes[1].tokens // 2))}


def speed(shape: LossShape, tiles: Sequence[tuple[int, int]], rounds: int) -> dict[str, Any]:
  """Print and return time, temporaries and loss of each program."""
  data = losses.arrays(shape)
  programs = {
    MATERIALISED: (gradient(losses.materialised_loss), data),
    TILED: (gradient(losses.tiled_loss()), data),
  }
  programs[REDUCED] = gradient(_mean_loss), data
  programs |= {f"  tile {n} x {v}": (gradient(losses.tiled_loss((n, v))), data) for n, v in tiles}
  peers, refused = losses.tokamax_programs(data)
  timed = compare(programs | peers, rounds)
  exact = -float(losses.exact_log_prob(*data).mean())
  rows = {}
  for name, one in timed.items():
    loss = float(one.output[0])
    rows[name] = {
      "seconds": one.seconds,
      "time_ratio": one.seconds / timed[MATERIALISED].seconds,
      "temp_bytes": one.temp_bytes,
      "loss": loss,
      "error": abs(loss - exact),
    }
  measure.show_rows(
    f"loss and gradient, {shape} float32, {device()}",
    ("", "ms", "ratio", "temp MiB", "loss", "error"),
    [loss_cells(name, row) for name, row in rows.items()],
  )
  for name, why in refused.items():
    measure.say(f"{name} does not run here: {why}")
  kept = tile_of_tokens(*shape, jnp.float32, SCRATCH, limits.current())
  choice = f"tiles of {kept} tokens, 6NDV" if kept else "scores computed twice, 8NDV"
  measure.say(f"{REDUCED}, {measure.mib(SCRATCH)} MiB of scratch: {choice}")
  return {
    "tokens_kept": kept,
    "shape": shape._asdict(),
    "loss_float64": exact,
    "rows": rows,
    "refused": refused,
  }


def budgets(quick: bool) -> Iterator[dict[str, Any]]:
  """Time losses under two budgets of memory, with all tokens and with half of them masked.

  Seconds are those of the clock; CPU seconds count all cores.
  """
  shapes = BUDGET_SHAPES if not quick else (LossShape(32, 16, 509),)
  figures = []
  for shape in shapes:
    programs = {MATERIALISED: gradient(losses.materialised_loss)}
    for mib in (64, 100):
      programs |= _budget_programs(shape, mib)
    data = losses.arrays(shape)
    timed = compare({name: (f, data) for name, f in programs.items()}, 1 if quick else 7)
    stored = timed[MATERIALISED]
    rows = {
      name: {
        "time_ratio": one.seconds / stored.seconds,
        "cpu_ratio": one.cpu_seconds / stored.cpu_seconds,
        "seconds": one.seconds,
        "temp_bytes": one.temp_bytes,
      }
      for name, one in timed.items()
    }
    measure.show_rows(
      f"loss and gradient, {shape} float32, {device()}",
      ("", "ms", "ratio", "CPU ratio", "temp MiB"),
      [
        [
          name,
          f"{row['seconds'] * 1e3:.1f}",
          f"{row['time_ratio']:.2f}",
          f"{row['cpu_ratio']:.2f}",
          measure.mib(row["temp_bytes"]),
        ]
        for name, row in rows.items()
      ],
    )
    figures.append({"shape": shape._asdict(), "rows": rows})
    yield {"shapes": figures}


def _budget_programs(shape: LossShape, mib: int) -> dict[str, Callable]:
  scratch, half = mib * 2**20, np.arange(shape.tokens) % 2 == 0
  mean = lambda **given: gradient(
    lambda h, w, t: linear_cross_entropy(h, w, t, reduction="mean", scratch=scratch, **given)
  )
  log_prob = lambda **given: gradient(
    lambda h, w, t: -linear_log_prob(h, w, t, scratch=scratch, **given).mean()
  )
  return {
    f"mean, {mib} MiB": mean(),
    f"mean, {mib} MiB, half masked": mean(mask=half),
    f"log_prob, {mib} MiB": log_prob(),
    f"log_prob, {mib} MiB, half masked": log_prob(mask=half),
  }


def _mean_loss(hidden, weight, tokens):
  return linear_cross_entropy(hidden, weight, tokens, reduction="mean", scratch=SCRATCH)


def loss_cells(name: str, row: dict[str, float]) -> list[str]:
  """The cells of a row of `speed`; an error above `MAX_ERROR` is marked."""
  return [
    name,
    f"{row['seconds'] * 1e3:.1f}",
    f"{row['time_ratio']:.2f}",
    measure.mib(row["temp_bytes"]),
    f"{row['loss']:.6f}",
    f"{row['error']:.0e}" + (" WRONG" if row["error"] > MAX_ERROR else ""),
  ]


def error(shape: LossShape) -> list[dict[str, Any]]:
  """Print and return the largest error of a token's log-probability, in nats."""
  rows = []
  for dtype in (jnp.float32, jnp.bfloat16):
    data = losses.arrays(shape, dtype)
    exact = losses.exact_log_prob(*data)
    tiled = np.asarray(jax.jit(linear_log_prob)(*data), np.float64)
    row = {
      "dtype": jnp.dtype(dtype).name,
      "token": float(np.abs(tiled - exact).max()),
      "mean": float(abs(tiled.mean() - exact.mean())),
    }
    measure.say(
      f"{shape} {row['dtype']}: error to float64 on equal values at most {row['token']:.1e} nats a"
      f" token, {row['mean']:.1e} in the mean loss"
    )
    rows.append(row)
  return rows


def options(quick: bool) -> Iterator[dict[str, Any]]:
  """Time each option of the tiled softmax against the plain loss."""
  shape = LossShape(32, 16, 509) if quick else LossShape(2048, 256, 32000)
  data = losses.arrays(shape)
  timed = compare({n: (f, data) for n, f in option_programs().items()}, 1 if quick else 5)
  rows = {
    name: {
      "seconds": one.seconds,
      "time_ratio": one.seconds / timed[PLAIN].seconds,
      "temp_bytes": one.temp_bytes,
    }
    for name, one in timed.items()
  }
  measure.show_rows(
    f"linear_softmax, loss and gradient, {shape} float32, {device()}",
    ("", "ms", "time ratio", "temp MiB"),
    [
      [n, f"{r['seconds'] * 1e3:.1f}", f"{r['time_ratio']:.2f}", measure.mib(r["temp_bytes"])]
      for n, r in rows.items()
    ],
  )
  yield {"shape": shape._asdict(), "rows": rows}


def option_programs() -> dict[str, Callable]:
  """Loss and gradient with each option; metrics are results without a gradient."""
  plain = lambda h, w, t: -linear_softmax(h, w, t).log_prob.mean()

  def entropy_loss(h, w, t):
    result = linear_softmax(h, w, t, entropy=True)
    return (-result.log_prob + 1e-4 * result.log_z**2 - 0.01 * result.entropy).mean()

  def with_metrics(**requested):
    def loss(h, w, t):
      result = linear_softmax(h, w, t, **requested)
      return -result.log_prob.mean(), result

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

  def four_targets(h, w, t):
    tokens = jnp.stack([jnp.roll(t, -k) for k in range(4)], axis=-1)
    share = jnp.broadcast_to(jnp.array([1.0, 0.5, 0.25, 0.125]), tokens.shape)
    return linear_sparse_target_loss(h, w, tokens, share).cross_entropy.mean()

  option = lambda **given: gradient(lambda h, w, t: linear_cross_entropy(h, w, t, **given).mean())
  return {
    PLAIN: gradient(plain),
    "log Z and entropy as metrics": with_metrics(entropy=True),
    "log Z and entropy in the loss": gradient(entropy_loss),
    "best token as a metric": with_metrics(top_k=1),
    "8 best tokens as a metric": with_metrics(top_k=8),
    "label smoothing": option(label_smoothing=0.1),
    "softcap": option(softcap=30),
    "label smoothing under a softcap": option(label_smoothing=0.1, softcap=30),
    "rank as a metric": with_metrics(rank=True),
    "sum of squares as a metric": with_metrics(collision=True),
    "four targets of each hidden vector": gradient(four_targets),
    "frozen weight": jax.value_and_grad(plain),
    "no gradient": plain,
  }


SHARDED_LOSSES = {
  MATERIALISED: losses.materialised_loss,
  TILED: lambda h, w, t: -linear_log_prob(h, w, t, vocab_axis="model").mean(),
}


def memory(quick: bool) -> Iterator[dict[str, Any]]:
  """Compile losses of large vocabularies for one device and for eight."""
  devices = simulated_devices(DEVICES)
  large, sharded = LossShape(16384, 1024, 256_000), LossShape(2048, 256, 262_144)
  if quick:
    large, sharded = LossShape(64, 16, 1009), LossShape(64, 16, 1024)
  one = make_mesh(MeshShape(), devices[:1])
  every = make_mesh(MeshShape(model=DEVICES), devices)
  rows = [
    {
      "shape": shape._asdict(),
      "devices": mesh.size,
      "loss": name,
      "temp_bytes": loss_temporaries(loss, shape, mesh),
    }
    for shape, mesh in ((large, one), (sharded, one), (sharded, every))
    for name, loss in SHARDED_LOSSES.items()
  ]
  measure.show_rows(
    "temporaries of loss and gradient, float32, compiled for a CPU; weight rows sharded",
    ("", "N", "D", "V", "devices", "MiB a device"),
    [
      [r["loss"], *map(str, r["shape"].values()), str(r["devices"]), measure.mib(r["temp_bytes"])]
      for r in rows
    ],
  )
  yield {"rows": rows}


def loss_temporaries(loss: Callable, shape: LossShape, mesh: Mesh) -> int:
  """Bytes of temporaries on each device, with the weight sharded over `model`."""
  rows, replicated = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
  of = lambda dims, dtype, sharding: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
  arguments = (
    of((shape.tokens, shape.dim), jnp.float32, replicated),
    of((shape.vocab, shape.dim), jnp.float32, rows),
    of((shape.tokens,), jnp.int32, replicated),
  )
  with jax.set_mesh(mesh):
    function = jax.jit(gradient(loss), out_shardings=(replicated, (replicated, rows)))
    return measure.temp_bytes(function.lower(*arguments).compile())
