"""Random operands in NumPy, and the comparison of values and gradients with float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np


def normals(seed: int, *shapes: tuple) -> list:
  """float32 arrays of standard normal numbers, one of each shape."""
  draw = np.random.default_rng(seed)
  return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def float64(tree):
  """The arrays in float64, which JAX keeps where `jax.enable_x64` is on."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def scores(hidden, weight, bias=None, softcap=None, temperature=1.0):
  """All scores at once, in the precision of the arrays."""
  score = hidden @ weight.T + (0.0 if bias is None else bias)
  return (softcap * jnp.tanh(score / softcap) if softcap else score) / temperature


@functools.partial(jax.jit, static_argnums=0)
def _with_pullback(function, arrays, cotangents):
  values, pull = jax.vjp(lambda *a: tuple(function(*a)), *arrays)
  # Where fewer than k tokens have a probability there is a -inf, which no loss may use.
  some = [jnp.where(jnp.isneginf(x), 0.0, c) for x, c in zip(values, cotangents)]
  return values, pull(tuple(some))


def compare(ours, whole, arrays, *, atol, rtol=0.0):
  """Values and all gradients of both agree, the second in float64; returns those of the first.

  Both return tuples. Their cotangents are random, neither equal nor 1.
  """
  shapes = jax.eval_shape(lambda *a: tuple(ours(*a)), *arrays)
  cotangents = tuple(normals(7, *(x.shape for x in shapes)))
  found = jax.device_get(_with_pullback(ours, tuple(arrays), cotangents))
  with jax.enable_x64(True):
    wide = float64((tuple(arrays), cotangents))
    expected = jax.device_get(_with_pullback(whole, *wide))
  chex.assert_trees_all_close(found, expected, atol=atol, rtol=rtol)
  return found
