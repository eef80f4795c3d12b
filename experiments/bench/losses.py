"""Dense losses that the benchmarks compare, and their arrays."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.measure import Call
from vqjax import linear_log_prob

BLOCKS = 64


class LossShape(NamedTuple):
  """Sizes of a loss: N tokens, width D, vocabulary V."""

  tokens: int
  dim: int
  vocab: int

  def __str__(self) -> str:
    return f"N={self.tokens} D={self.dim} V={self.vocab}"


def arrays(shape: LossShape, dtype=jnp.float32) -> tuple:
  """Hidden states, a weight whose logits have variance 1, and tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = _normal(keys[0], shape.tokens, shape.dim, 1.0, dtype)
  weight = _normal(keys[1], shape.vocab, shape.dim, shape.dim**-0.5, dtype)
  return hidden, weight, jax.random.randint(keys[2], (shape.tokens,), 0, shape.vocab)


def _normal(key, rows, dim, scale, dtype):
  """A normal array [rows, dim], made in blocks to limit the peak of memory."""

  def block(key):
    return (scale * jax.random.normal(key, (-(-rows // BLOCKS), dim))).astype(dtype)

  made = jax.jit(lambda keys: jax.lax.map(block, keys).reshape(-1, dim)[:rows])
  return made(jax.random.split(key, BLOCKS))


def materialised_loss(hidden, weight, tokens):
  """The mean cross-entropy with all logits in memory."""
  logits = (hidden @ weight.T).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def chunked_loss(size: int) -> Callable:
  """The mean over chunks of tokens that are recomputed in the backward pass.

  MaxText's vocabulary tiling does it like this.
  """

  def loss(hidden, weight, tokens):
    part = jax.checkpoint(materialised_loss)
    step = lambda total, one: (total + part(one[0], weight, one[1]), None)
    parts = hidden.reshape(-1, size, hidden.shape[1]), tokens.reshape(-1, size)
    return jax.lax.scan(step, 0.0, parts)[0] * size / len(tokens)

  return loss


def tiled_loss(tile: tuple[int, int] | None = None) -> Callable:
  """The mean cross-entropy by `linear_log_prob`."""
  return lambda h, w, t: -linear_log_prob(h, w, t, tile=tile).mean()


def gradient(loss: Callable) -> Callable:
  """The function of a loss and its gradient in hidden and weight."""
  return jax.value_and_grad(loss, argnums=(0, 1))


def exact_log_prob(hidden, weight, tokens) -> np.ndarray:
  """Log-probabilities of the tokens in nats, computed in float64 with NumPy."""
  weight = np.asarray(weight, np.float64)
  found = []
  for start in range(0, len(tokens), 256):
    part, token = hidden[start : start + 256], np.asarray(tokens[start : start + 256])
    logits = np.asarray(part, np.float64) @ weight.T
    logits -= logits.max(axis=1, keepdims=True)
    found.append(logits[np.arange(len(token)), token] - np.log(np.exp(logits).sum(axis=1)))
  return np.concatenate(found)


def tokamax_programs(data: tuple) -> tuple[dict[str, Call], dict[str, str]]:
  """Programs of tokamax's loss that run here, and the errors of the others.

  Both are empty where tokamax is not installed. tokamax takes the weight as [D, V].
  """
  try:
    from absl import flags
    from tokamax._src.ops.linear_softmax_cross_entropy_loss import api
  except ImportError:
    return {}, {}
  # Otherwise tokamax parses this command line and refuses flags that are not its own.
  flags.FLAGS.mark_as_parsed()
  hidden, weight, tokens = data
  arguments = hidden, jnp.asarray(weight.T), tokens
  programs, refused = {}, {}
  for name in api.IMPLEMENTATIONS:
    function = gradient(_tokamax_loss(api.linear_softmax_cross_entropy_loss, name))
    try:
      jax.jit(function).lower(*arguments)
    except Exception as error:  # implementations raise errors of many types on other platforms
      refused[f"tokamax {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    else:
      programs[f"tokamax {name}"] = function, arguments
  return programs, refused


def _tokamax_loss(loss, name):
  return lambda h, w, t: loss(h, t, w, reduction="mean", implementation=name)
