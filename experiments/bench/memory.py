"""How much memory does the loss need at sizes that are only compiled, on one device and on eight?

python -m experiments.bench.memory
python -m experiments.bench.memory --json memory.json
"""

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import benching, losses
from experiments.bench.losses import Shape
from experiments.bench.timing import temp_bytes
from experiments.plan.compiling import simulated_devices
from vqjax import linear_log_prob
from vqjax.lab.training.provenance import provenance
from vqjax.sharding import MeshShape, make_mesh

DEVICES = 8
LOSSES = {
  "materialised (optax)": losses.materialised_loss,
  "linear_log_prob": lambda h, w, t: -linear_log_prob(h, w, t, vocab_axis="model").mean(),
}


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, writes what was asked for, and returns the exit code."""
  options = benching.parser("experiments.bench.memory", __doc__.splitlines()[0]).parse_args(
    arguments
  )
  devices = simulated_devices(DEVICES)
  large, spread = Shape(16384, 1024, 256_000), Shape(2048, 256, 262_144)
  if options.quick:
    large, spread = Shape(64, 16, 1009), Shape(64, 16, 1024)
  one = make_mesh(MeshShape(), devices[:1])
  all_of_them = make_mesh(MeshShape(model=DEVICES), devices)
  rows = [
    {"shape": shape._asdict(), "devices": mesh.size, "loss": name, "temp_bytes": temp}
    for shape, mesh in ((large, one), (spread, one), (spread, all_of_them))
    for name, loss in LOSSES.items()
    for temp in [loss_temporaries(loss, shape, mesh)]
  ]
  benching.show(
    "temporaries of loss and gradient, float32, compiled for a CPU; weight rows over the devices",
    ("", "N", "D", "V", "devices", "MiB a device"),
    [
      [r["loss"], *map(str, r["shape"].values()), str(r["devices"]), benching.mib(r["temp_bytes"])]
      for r in rows
    ],
  )
  benching.write(options.json, {"rows": rows, "provenance": provenance()})
  return 0


def loss_temporaries(loss: Callable, shape: Shape, mesh: Mesh) -> int:
  """Bytes of temporaries on each device; the weight and its gradient lie over `model`."""
  rows, whole = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
  of = lambda dims, dtype, where: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
  arguments = (
    of((shape.tokens, shape.dim), jnp.float32, whole),
    of((shape.vocab, shape.dim), jnp.float32, rows),
    of((shape.tokens,), jnp.int32, whole),
  )
  with jax.set_mesh(mesh):
    function = jax.jit(losses.gradient(loss), out_shardings=(whole, (whole, rows)))
    return temp_bytes(function.lower(*arguments).compile())


if __name__ == "__main__":
  sys.exit(main())
