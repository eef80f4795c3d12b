"""References of the tests in float64 NumPy, and the values that a traced program makes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.ops import device


def _compiles_float16() -> bool:
  try:
    jax.jit(lambda x: x.astype(jnp.float32) * 2)(jnp.ones(3, jnp.float16)).block_until_ready()
  except jax.errors.JaxRuntimeError:
    return False
  return True


needs_float16 = pytest.mark.skipif(
  not _compiles_float16(), reason="XLA compiles no float16 for a CPU without F16C instructions"
)


def log_softmax(logits):
  """float64 log-softmax over the last axis."""
  logits = np.asarray(logits, np.float64)
  logits = logits - logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def of_tokens(log_prob, tokens):
  """Entries [*B] of `log_prob` [*B, V]."""
  return np.take_along_axis(log_prob, np.asarray(tokens)[..., None], -1)[..., 0]


def in_bfloat16(array):
  """The nearest bfloat16 of each number, in float64."""
  return np.asarray(array).astype(jnp.bfloat16).astype(np.float64)


def check_slopes(gradients, function, *arguments, atol=3e-5):
  """Checks gradients of a float64 function, each array in eight random directions.

  Their entries are 1 and -1: an error of one entry of a gradient is an error of every slope.
  """
  rng = np.random.default_rng(8)
  leaves, tree = jax.tree.flatten(arguments)
  for i, (gradient, leaf) in enumerate(zip(tree.flatten_up_to(gradients), leaves)):
    for direction in rng.choice([-1.0, 1.0], (8, *leaf.shape)):
      ends = (leaf + step * direction for step in (1e-6, -1e-6))
      above, below = (
        function(*tree.unflatten([*leaves[:i], end, *leaves[i + 1 :]])) for end in ends
      )
      found = (np.asarray(gradient, np.float64) * direction).sum()
      np.testing.assert_allclose(found, (above - below) / 2e-6, atol=atol)


def linear_log_prob(hidden, weight, tokens, bias=None):
  """float64 log softmax(hidden · weightᵀ + bias)[tokens]."""
  logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
  if bias is not None:
    logits = logits + np.asarray(bias, np.float64)
  return np.take_along_axis(log_softmax(logits), np.asarray(tokens)[..., None], -1)[..., 0]


def linear_gradients(hidden, weight, tokens, cotangent, bias=None):
  """float64 gradients of sum(cotangent · log_prob) in hidden [N, D], weight and bias, by hand."""
  hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
  logits = hidden @ weight.T + (0.0 if bias is None else np.asarray(bias, np.float64))
  score = -np.exp(log_softmax(logits))
  score[np.arange(len(tokens)), tokens] += 1
  score *= np.asarray(cotangent, np.float64)[:, None]
  return score @ weight, score.T @ hidden, score.sum(axis=0)


def linear_softmax(hidden, weight, bias, tokens, kept, softcap=None, k=0, temperature=1) -> tuple:
  """(log_prob, log_z, entropy, mean_log_prob, top_log_probs, collision) over the rows `kept`.

  All scores at once, in jax.numpy and the precision of the arguments, to be differentiated.
  """
  scores = hidden @ weight[kept].T + (0.0 if bias is None else bias[kept])
  scores = (softcap * jnp.tanh(scores / softcap) if softcap else scores) / temperature
  log_z = jax.nn.logsumexp(scores, axis=-1)
  log_prob = scores - log_z[..., None]
  own = jnp.take_along_axis(
    log_prob, np.searchsorted(kept, tokens).astype(np.int32)[..., None], -1
  )[..., 0]
  top = jax.lax.top_k(log_prob, min(k, len(kept)))[0]
  top = jnp.pad(top, [(0, 0)] * (top.ndim - 1) + [(0, k - top.shape[-1])], constant_values=-jnp.inf)
  entropy, collision = -(jnp.exp(log_prob) * log_prob).sum(-1), jnp.exp(2 * log_prob).sum(-1)
  return own, log_z, entropy, log_prob.mean(-1), top, collision


def gradient_share(logits, hidden, tokens) -> tuple:
  """(kept, gain, norm, rank) of contexts [N, D] and targets [N], one after another.

  The Jacobian is that of central differences of `logits`, and the projection that of its singular
  vectors after the mean over the vocabulary is removed.
  """
  found = []
  for h, token in zip(np.asarray(hidden, np.float64), np.asarray(tokens)):
    steps = 1e-5 * np.eye(len(h))
    jacobian = (logits(h + steps) - logits(h - steps)).T / 2e-5
    gradient = np.exp(log_softmax(logits(h)))
    gradient[token] -= 1
    left, values, _ = np.linalg.svd(jacobian - jacobian.mean(axis=0), full_matrices=False)
    inside, norm = left[:, values > 1e-5 * values[0]], np.linalg.norm(gradient)
    kept, gain = np.linalg.norm(inside.T @ gradient), np.linalg.norm(jacobian.T @ gradient)
    found.append((kept / norm, gain / norm, norm, inside.shape[1]))
  return tuple(np.transpose(found))


def largest_value(function, *args) -> int:
  """Elements of the largest array that the traced program makes, inputs and outputs apart."""
  return max((math.prod(shape) for shape, _ in values_of(function, *args)), default=0)


def shapes_of(function, *args) -> set:
  """Shapes of all values that the traced program makes."""
  return {shape for shape, _ in values_of(function, *args)}


def products_of(function, *args) -> list:
  """Shapes of the results of the matrix products in the traced program; a loop's count once."""
  equations = _equations(jax.make_jaxpr(function)(*args).jaxpr)
  return [e.outvars[0].aval.shape for e in equations if e.primitive.name == "dot_general"]


def precisions_of(function, *args) -> set:
  """Precisions of the matrix products in the traced program."""
  equations = _equations(jax.make_jaxpr(function)(*args).jaxpr)
  return {e.params["precision"] for e in equations if "dot_general" in e.primitive.name}


def values_of(function, *args) -> set:
  """(shape, dtype) of all values that the traced program makes."""
  # A tile of a GPU holds all scores of any size that a test may have.
  limits = device.of("cpu") if device.current() == device.of("gpu") else device.current()
  with device.using(limits):
    return set(_values(jax.make_jaxpr(function)(*args).jaxpr))


def _values(jaxpr):
  for equation in _equations(jaxpr):
    for value in equation.outvars:
      yield getattr(value.aval, "shape", ()), getattr(value.aval, "dtype", None)


def _equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for parameter in jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from _equations(inner)
