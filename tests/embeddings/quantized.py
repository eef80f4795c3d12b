"""Quantisers, options and programs that the tests of embeddings share."""

import functools

import jax
import jax.numpy as jnp

from vqjax.quantizers import CentroidQuantizer, SoftmaxQuantizer

V, D, K, M = 53, 12, 6, 3

QUANTIZERS = {
  "sx": SoftmaxQuantizer(K, M, D),
  "sx shared": SoftmaxQuantizer(K, M, D, shared=True),
  "sx additive": SoftmaxQuantizer(K, 5, D, additive=True),
  "sx narrow": SoftmaxQuantizer(K, M, 6, value_dim=D),
  "vq": CentroidQuantizer(K, M, D),
}


@functools.partial(jax.jit, static_argnums=0)
def trained(embedding, variables, tokens):
  """The result of a training call, and the updated collections."""
  mutable, rngs = ["batch_stats"], {"sample": jax.random.key(6)}
  return embedding.apply(variables, tokens, False, method="loss_terms", mutable=mutable, rngs=rngs)


@functools.partial(jax.jit, static_argnums=0)
def after_a_batch(embedding):
  """Variables after a training batch, so that statistics are not the initial ones."""
  fresh = embedding.init(jax.random.key(0), jnp.arange(5))
  return fresh | trained(embedding, fresh, jnp.arange(40))[1]


@jax.jit
def vectors_of(small, tokens):
  """Vectors of a compact embedding."""
  return small(tokens)
