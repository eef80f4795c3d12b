"""Is the tiled softmax as fast as materialised logits and tokamax, how much smaller, how exact?

python -m experiments.bench.softmax
python -m experiments.bench.softmax --json softmax.json
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import benching, losses
from experiments.bench.losses import Shape, gradient
from experiments.bench.timing import Timed, compare
from vqjax import linear_log_prob
from vqjax.lab.training.provenance import device, provenance

NAIVE, OURS = "materialised (optax)", "linear_log_prob"
TILES = ((256, 1280), (512, 640), (512, 2560), (1024, 1280), (2048, 640))
COLUMNS = ("", "ms", "ratio", "temp MiB", "loss", "off float64")
WRONG = 1e-4
"""Nats: float32 sums of any order are closer to float64 than this, a different sum is not."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the tables, writes what was asked for, and returns the exit code."""
  options = benching.parser("experiments.bench.softmax", __doc__.splitlines()[0]).parse_args(
    arguments
  )
  if options.quick:
    sizes, tiles, rounds = (Shape(32, 16, 512), Shape(32, 16, 509)), TILES[:1], 1
  else:
    sizes, tiles, rounds = (Shape(2048, 256, 32000), Shape(2048, 256, 50257)), TILES, 5
  tables = [speed(sizes[0], tiles, rounds), speed(sizes[1], (), rounds)]
  figures = {
    "speed": tables,
    "exactness": exactness(sizes[1]._replace(tokens=sizes[1].tokens // 2)),
  }
  benching.write(options.json, figures | {"provenance": provenance()})
  return 0


def speed(shape: Shape, tiles: Sequence[tuple[int, int]], rounds: int) -> dict:
  """Prints time, temporaries and loss of loss and gradient, against the materialised ones."""
  data = losses.arrays(shape)
  programs = {
    NAIVE: (gradient(losses.materialised_loss), data),
    OURS: (gradient(losses.tiled_loss()), data),
  }
  programs |= {f"  tile {n} x {v}": (gradient(losses.tiled_loss((n, v))), data) for n, v in tiles}
  peers, refused = losses.tokamax_programs(data)
  timed = compare(programs | peers, rounds)
  expected = -float(losses.exact_log_prob(*data).mean())
  rows = {name: _figures(t, timed[NAIVE], expected) for name, t in timed.items()}
  benching.show(
    f"loss and gradient, {shape} float32, {device()}",
    COLUMNS,
    [_cells(name, row) for name, row in rows.items()],
  )
  for name, why in refused.items():
    benching.say(f"{name} does not run here: {why}")
  return {"shape": shape._asdict(), "loss_float64": expected, "rows": rows, "refused": refused}


def _figures(timed: Timed, first: Timed, expected: float) -> dict:
  loss = float(timed.output[0])
  return {
    "seconds": timed.seconds,
    "time_ratio": timed.seconds / first.seconds,
    "temp_bytes": timed.temp_bytes,
    "loss": loss,
    "error": abs(loss - expected),
  }


def _cells(name: str, row: dict) -> list[str]:
  wrong = " WRONG" if row["error"] > WRONG else ""
  return [
    name,
    f"{row['seconds'] * 1e3:.1f}",
    f"{row['time_ratio']:.2f}",
    benching.mib(row["temp_bytes"]),
    f"{row['loss']:.6f}",
    f"{row['error']:.0e}{wrong}",
  ]


def exactness(shape: Shape) -> list[dict]:
  """Prints the largest error of a token's log-probability against float64, in nats."""
  found = []
  for dtype in (jnp.float32, jnp.bfloat16):
    data = losses.arrays(shape, dtype)
    expected = losses.exact_log_prob(*data)
    ours = np.asarray(jax.jit(linear_log_prob)(*data), np.float64)
    each, mean = np.abs(ours - expected).max(), abs(ours.mean() - expected.mean())
    name = jnp.dtype(dtype).name
    benching.say(
      f"{shape} {name}: off float64 on the same values by at most {each:.1e} nats a token,"
      f" {mean:.1e} in the mean loss"
    )
    found.append({"dtype": name, "token": float(each), "mean": float(mean)})
  return found


if __name__ == "__main__":
  sys.exit(main())
