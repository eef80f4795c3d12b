"""Small vectors and helpers that the tests of quantisers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

N, D, K, M = 13, 12, 5, 3


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def vectors(shape=(N, D)):
  return normal(1, *shape)


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def made(quantizer, x=None, train=False):
  """The variables of a quantiser, and its result for x."""
  x = jnp.asarray(vectors() if x is None else x)
  keys = {"params": jax.random.key(0), "sample": jax.random.key(5)}
  variables = quantizer.init(keys, x)
  return variables, quantizer.apply(variables, x, train, method="quantized", rngs=keys)


def training_call(quantizer, variables, x, mask=None):
  """The result of a training call, and the updated collections."""
  return quantizer.apply(
    variables,
    jnp.asarray(x),
    True,
    mask,
    method="quantized",
    mutable=["batch_stats"],
    rngs={"sample": jax.random.key(7)},
  )


trained = jax.jit(training_call, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def apply(quantizer, variables, *args, method="__call__"):
  """What a method of the quantiser returns outside training."""
  return quantizer.apply(variables, *args, method=method)


def in_float64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
