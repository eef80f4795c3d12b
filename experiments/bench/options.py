"""What does each option of the tiled softmax cost, beside the plain loss?

python -m experiments.bench.options
python -m experiments.bench.options --json options.json
"""

import sys
from collections.abc import Callable, Sequence

import jax

from experiments.bench import benching, losses
from experiments.bench.losses import Shape
from experiments.bench.timing import compare
from vqjax import linear_cross_entropy, linear_softmax
from vqjax.lab.training.provenance import device, provenance

PLAIN = "plain loss"


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, writes what was asked for, and returns the exit code."""
  options = benching.parser("experiments.bench.options", __doc__.splitlines()[0]).parse_args(
    arguments
  )
  shape = Shape(32, 16, 509) if options.quick else Shape(2048, 256, 32000)
  data = losses.arrays(shape)
  timed = compare({n: (f, data) for n, f in functions().items()}, 1 if options.quick else 5)
  first = timed[PLAIN]
  rows = {
    name: {
      "seconds": t.seconds,
      "time_ratio": t.seconds / first.seconds,
      "temp_bytes": t.temp_bytes,
    }
    for name, t in timed.items()
  }
  benching.show(
    f"linear_softmax, loss and gradient, {shape} float32, {device()}",
    ("", "ms", "time ratio", "temp MiB"),
    [
      [n, f"{r['seconds'] * 1e3:.1f}", f"{r['time_ratio']:.2f}", benching.mib(r["temp_bytes"])]
      for n, r in rows.items()
    ],
  )
  benching.write(options.json, {"shape": shape._asdict(), "rows": rows, "provenance": provenance()})
  return 0


def functions() -> dict[str, Callable]:
  """Loss and gradient with each option; what is looked at beside the loss has no gradient."""
  plain = lambda h, w, t: -linear_softmax(h, w, t).log_prob.mean()
  entropic = lambda h, w, t: _entropic(linear_softmax(h, w, t, entropy=True))
  return {
    PLAIN: losses.gradient(plain),
    "log Z and entropy, looked at": _looking(entropy=True),
    "log Z and entropy, in the loss": losses.gradient(entropic),
    "best token, looked at": _looking(top_k=1),
    "8 best tokens, looked at": _looking(top_k=8),
    "label smoothing": _option(label_smoothing=0.1),
    "softcap": _option(softcap=30),
    "label smoothing under a softcap": _option(label_smoothing=0.1, softcap=30),
    "frozen weight": jax.value_and_grad(plain),
    "no gradient": plain,
  }


def _entropic(found):
  return (-found.log_prob + 1e-4 * found.log_z**2 - 0.01 * found.entropy).mean()


def _looking(**asked):
  def loss(h, w, t):
    found = linear_softmax(h, w, t, **asked)
    return -found.log_prob.mean(), found

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def _option(**options):
  return losses.gradient(lambda h, w, t: linear_cross_entropy(h, w, t, **options).mean())


if __name__ == "__main__":
  sys.exit(main())
