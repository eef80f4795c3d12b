"""Exponentials that neither overflow nor become nan."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def exp_shift(top: Float[Array, "*B"]) -> Float[Array, "*B"]:
  """The number to subtract before exp: the maximum score, or 0 where it is -inf.

  Where every score so far is -inf, -inf - (-inf) would be nan.
  """
  return jnp.where(jnp.isneginf(top), 0.0, top)
