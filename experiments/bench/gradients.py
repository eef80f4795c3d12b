"""Errors of the gradients of nearly certain tokens, against float64.

Where p(target) is near 1 its score has the cotangent p - 1, of which a rounded probability leaves
few digits, and the other rows share what is left: the gradients that end a training.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import losses, measure
from vqjax import linear_cross_entropy, linear_log_prob
from vqjax.lab.training.provenance import device
from vqjax.ops import device as limits

TOKENS, DIM, DOUBT = 16, 64, 1e-4
VOCABULARIES = 32_003, 1_000_003
ROWS = 2**16
"""Rows of the weight that float64 meets at once."""


class Errors(NamedTuple):
  """Norms of errors of gradients over those of the gradients.

  Attributes:
    hidden: of the hidden vectors.
    target: of the targets' rows.
    others: of all other rows.
  """

  hidden: float
  target: float
  others: float


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Measure the programs of each kind of device, run on this one."""
  tables = []
  for vocab in (1031,) if quick else VOCABULARIES:
    data = nearly_certain(vocab)
    rows = {name: errors(program, *data)._asdict() for name, program in programs().items()}
    measure.show_rows(
      f"relative errors of gradients, p(target) = 1 - {DOUBT:g}, N={TOKENS} D={DIM} V={vocab},"
      f" bfloat16 products, {device()}",
      ("", *Errors._fields),
      [[name, *(f"{error:.1e}" for error in row.values())] for name, row in rows.items()],
    )
    tables.append({"vocab": vocab, "rows": rows})
    yield {"tokens": TOKENS, "dim": DIM, "doubt": DOUBT, "tables": tables}


def programs() -> dict[str, Callable]:
  """Mean losses of float32 arrays by products of bfloat16 operands, so that results stay wide."""
  narrow = lambda *arrays: [x.astype(jnp.bfloat16) for x in arrays]
  mean = lambda *x: linear_cross_entropy(*x, reduction="mean", dtype=jnp.bfloat16)
  log_prob = lambda *x: -linear_log_prob(*x, dtype=jnp.bfloat16).mean()

  def on(kind, loss):
    def of_kind(*arrays):
      # Products so slow that what they make is kept, as at large widths.
      with limits.using(limits.of(kind)._replace(balance=0.0)):
        return loss(*arrays)

    return of_kind

  return {
    "stored logits": lambda h, w, t: losses.materialised_loss(*narrow(h, w), t),
    **{
      f"{name}, as on a {kind.upper()}": on(kind, loss)
      for kind in ("cpu", "gpu", "tpu")
      for name, loss in (("log_prob", log_prob), ("mean", mean))
    },
  }


def nearly_certain(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """float32 arrays that bfloat16 holds: hidden vectors, rows and targets of 1 - `DOUBT`."""
  rng = np.random.default_rng(0)
  rounded = lambda x: np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)
  hidden = rounded(rng.standard_normal((TOKENS, DIM), np.float32))
  weight = rounded(0.25 * rng.standard_normal((vocab, DIM), np.float32))
  tokens = rng.permutation(vocab)[:TOKENS]
  weight[tokens] = 0
  log_z = _log_z(hidden, weight)
  own = log_z - math.log(DOUBT)
  weight[tokens] = rounded(hidden * (own / (hidden**2).sum(axis=1))[:, None])
  return hidden, weight, tokens.astype(np.int32)


def errors(loss: Callable, hidden: np.ndarray, weight: np.ndarray, tokens: np.ndarray) -> Errors:
  """Errors of the gradients of a mean loss, all of whose numbers are compared."""
  found, of_rows = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(hidden, weight, tokens))
  wide, log_z = np.asarray(hidden, np.float64), _log_z(hidden, weight)
  exact, is_target = np.zeros_like(wide), np.zeros(len(weight), bool)
  is_target[tokens] = True
  sums = np.zeros((2, 2))
  for start in range(0, len(weight), ROWS):
    rows = np.asarray(weight[start : start + ROWS], np.float64)
    d_scores = np.exp(wide @ rows.T - log_z[:, None])
    here = (tokens >= start) & (tokens < start + len(rows))
    d_scores[here, tokens[here] - start] -= 1
    d_scores /= len(tokens)
    exact += d_scores @ rows
    d_rows = d_scores.T @ wide
    wrong = of_rows[start : start + ROWS] - d_rows
    for i, some in enumerate((is_target, ~is_target)):
      chosen = some[start : start + ROWS]
      sums[i] += (wrong[chosen] ** 2).sum(), (d_rows[chosen] ** 2).sum()
  relative = np.sqrt(sums[:, 0] / sums[:, 1])
  of_hidden = np.linalg.norm(found - exact) / np.linalg.norm(exact)
  return Errors(float(of_hidden), float(relative[0]), float(relative[1]))


def _log_z(hidden, weight):
  """log-normalisers [N] in float64."""
  parts = [
    np.logaddexp.reduce(np.float64(hidden) @ np.float64(weight[i : i + ROWS]).T, axis=1)
    for i in range(0, len(weight), ROWS)
  ]
  return np.logaddexp.reduce(parts, axis=0)
