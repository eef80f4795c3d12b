"""Tokens outside of the vocabulary: a mask of them, and means without them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer


def check_arrays(**arrays: Any) -> None:
  """Raise TypeError unless each argument is an array of JAX or NumPy, or None."""
  for name, array in arrays.items():
    # PyTorch's arrays have a shape, and a method that JAX's do not have.
    if array is not None and (not hasattr(array, "shape") or hasattr(array, "detach")):
      raise TypeError(
        f"`{name}` must be an array; got {type(array).__name__}. Use jnp.asarray({name})."
      )


def check_mask(mask: Array, shape: tuple[int, ...]) -> None:
  """Raise ValueError unless a mask has one boolean for each token."""
  if mask.shape != shape or mask.dtype != bool:
    raise ValueError(
      f"`mask` must be bool of shape {shape}, one for each token; got {mask.dtype} of shape"
      f" {mask.shape}. Use mask > 0."
    )


def widened(tokens: Integer[Array, "*B"]) -> Integer[Array, "*B"]:
  """The tokens in at least 32 bits, in which -1 and vocabulary sizes do not wrap.

  Raises:
    ValueError: the tokens are not integers.
  """
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(f"`tokens` must be integers; got {tokens.dtype}. Cast them to int32.")
  return tokens.astype(jnp.int32) if jnp.iinfo(tokens.dtype).bits < 32 else tokens


def in_vocabulary(
  tokens: Integer[Array, "*B"], vocab: int
) -> tuple[Bool[Array, "*B"], Int[Array, "*B"]]:
  """A mask of the tokens in [0, vocab), and the tokens as int32, others as 0.

  Raises:
    ValueError: the tokens are not integers.
  """
  tokens = widened(tokens)
  valid = (tokens >= 0) & (tokens < vocab)
  return valid, jnp.where(valid, tokens, 0).astype(jnp.int32)


def mean_in_vocabulary(
  numbers: Float[Array, "*B"], tokens: Integer[Array, "*B"], vocab: int
) -> Float[Array, ""]:
  """Mean of the numbers of the tokens in [0, vocab); 0 if there are none."""
  valid, _ = in_vocabulary(tokens, vocab)
  total = jnp.where(valid, numbers, 0.0).astype(jnp.float32).sum()
  return total / jnp.maximum(valid.sum(), 1)
