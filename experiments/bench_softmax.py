"""Is the tiled softmax as fast as materialised logits, how much smaller, and how exact?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from experiments.timing import compare
from vqjax import linear_log_prob
from vqjax.training.provenance import device

TILES = (None, (256, 1280), (512, 640), (512, 2560), (1024, 1280), (2048, 640))


def arrays(n: int, d: int, v: int, dtype=jnp.float32):
  """Hidden vectors, a weight whose scores have variance 1, and tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (n, d)).astype(dtype)
  weight = (jax.random.normal(keys[1], (v, d)) * d**-0.5).astype(dtype)
  return hidden, weight, jax.random.randint(keys[2], (n,), 0, v)


def materialised_loss(hidden, weight, tokens):
  """The loss that everybody writes first: all logits at once."""
  return optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, tokens).mean()


def tiled_loss(tile=None):
  """The same loss in tiles."""
  return lambda h, w, t: -linear_log_prob(h, w, t, tile=tile).mean()


def speed(console: Console, n=2048, d=256, v=32000) -> None:
  """Prints time and temporaries of loss and gradient, against the materialised ones."""
  data = arrays(n, d, v)
  gradient = lambda f: jax.value_and_grad(f, argnums=(0, 1))
  programs = {"materialised (optax)": (gradient(materialised_loss), data)}
  for tile in TILES:
    name = "linear_log_prob" if tile is None else f"  tile {tile[0]} x {tile[1]}"
    programs[name] = gradient(tiled_loss(tile)), data
  timed = compare(programs)
  first = timed["materialised (optax)"]
  table = Table(title=f"loss and gradient, N={n} D={d} V={v} float32, {device()}")
  for column in ("", "ms", "time ratio", "temp MiB", "loss"):
    table.add_column(column, justify="left" if not column else "right")
  for name, t in timed.items():
    ratio, mib = t.seconds / first.seconds, t.temp_bytes / 2**20
    loss = float(t.output[0])
    table.add_row(name, f"{t.seconds * 1e3:.0f}", f"{ratio:.2f}", f"{mib:.1f}", f"{loss:.6f}")
  console.print(table)


def exactness(console: Console, n=1000, d=256, v=50257) -> None:
  """Prints the largest error of a token's log-probability against float64, in nats."""
  for dtype in (jnp.float32, jnp.bfloat16):
    hidden, weight, tokens = arrays(n, d, v, dtype)
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    top = logits.max(axis=1, keepdims=True)
    log_z = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    expected = logits[np.arange(n), tokens] - log_z
    found = np.asarray(jax.jit(linear_log_prob)(hidden, weight, tokens), np.float64)
    each, mean = np.abs(found - expected).max(), abs(found.mean() - expected.mean())
    console.print(
      f"N={n} D={d} V={v} {jnp.dtype(dtype).name}: off float64 on the same values by at most"
      f" {each:.1e} nats a token, {mean:.1e} in the mean loss",
      highlight=False,
    )


if __name__ == "__main__":
  terminal = Console()
  speed(terminal)
  exactness(terminal)
