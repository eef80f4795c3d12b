"""Small vectors and helpers that the tests of quantisers share."""

import jax
import numpy as np

N, D, K, M = 13, 12, 5, 3


def vectors(shape=(N, D)):
  return jax.random.normal(jax.random.key(1), shape)


def made(quantizer, x=None, train=False):
  """The variables of a quantiser, and its result for x."""
  x = vectors() if x is None else x
  keys = {"params": jax.random.key(0), "sample": jax.random.key(5)}
  variables = quantizer.init(keys, x)
  return variables, quantizer.apply(variables, x, train, method="quantized", rngs=keys)


def trained(quantizer, variables, x, mask=None):
  """The result of a training call, and the updated collections."""
  return quantizer.apply(
    variables,
    x,
    True,
    mask,
    method="quantized",
    mutable=["batch_stats", "centroids", "revival"],
    rngs={"sample": jax.random.key(7)},
  )


def in_float64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
