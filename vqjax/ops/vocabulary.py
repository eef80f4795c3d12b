"""Which tokens are in the vocabulary, whatever integer type they come in?"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer


def in_vocabulary(
  tokens: Integer[Array, "*B"], vocab: int
) -> tuple[Bool[Array, "*B"], Int[Array, "*B"]]:
  """Whether each token is in [0, vocab), and the tokens as int32 with 0 for those that are not.

  Narrow integers are widened first: compared as they are, a vocabulary beyond their range would
  wrap.
  """
  if jnp.iinfo(tokens.dtype).bits < 32:
    tokens = tokens.astype(jnp.int32)
  known = (tokens >= 0) & (tokens < vocab)
  return known, jnp.where(known, tokens, 0).astype(jnp.int32)


def mean_in_vocabulary(
  numbers: Float[Array, "*B"], tokens: Integer[Array, "*B"], vocab: int
) -> Float[Array, ""]:
  """Mean of the numbers of those tokens that are in [0, vocab); 0 where there is none."""
  known, _ = in_vocabulary(tokens, vocab)
  total = jnp.where(known, numbers, 0.0).astype(jnp.float32).sum()
  return total / jnp.maximum(known.sum(), 1)
