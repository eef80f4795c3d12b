"""Codes [V, M] of product quantisation: their dtype, initial values and checks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

__all__ = []


def code_dtype(codes: int) -> jnp.dtype:
  """The narrowest unsigned integers that hold `codes` codes."""
  return jnp.dtype(jnp.uint8 if codes <= 2**8 else jnp.uint16 if codes <= 2**16 else jnp.uint32)


def mixed_radix(vocab: int, codes: int, subspaces: int) -> Int[np.ndarray, "V M"]:
  """Data-independent codes: digits of a token id, shifted by hashes of lower digits.

  If V is at most K^M, no two tokens share all codes; each code is used by about V/K tokens.
  """
  higher, lower = np.arange(vocab, dtype=np.uint64), np.zeros(vocab, np.uint64)
  base, power, columns = np.uint64(codes), 1, []
  for m in range(subspaces):
    # A multiplicative hash for each subspace: the high digits of most ids are zero, and without the
    # shift neighbours would share codes.
    mixed = (lower + np.uint64(m)) * np.uint64(0x9E3779B97F4A7C15 + 2 * m) >> np.uint64(33)
    digit = higher % base
    columns.append((digit + (mixed if m else np.uint64(0))) % base)
    lower += digit * np.uint64(power)
    higher, power = higher // base, min(power * codes, vocab)
  return np.stack(columns, axis=1).astype(np.int64)


def checked_codes(
  codes: np.ndarray, vocab: int, count: int, subspaces: int
) -> Integer[np.ndarray, "V M"]:
  """The codes in their narrowest dtype.

  Raises:
    ValueError: the codes are not integers [V, M], or one is outside [0, K).
  """
  if codes.shape != (vocab, subspaces) or not np.issubdtype(codes.dtype, np.integer):
    raise ValueError(
      f"`codes` must be integers [{vocab}, {subspaces}], one for each token and subspace; got"
      f" {codes.dtype}{list(codes.shape)}. Give the layer the numbers with which they were made."
    )
  outside = np.argwhere((codes < 0) | (codes >= count))
  if len(outside):
    token, m = outside[0]
    raise ValueError(
      f"`codes` must be in [0, {count}); got {codes[token, m]} for token {token} in subspace {m}"
      f" ({len(outside)} such codes). Give another number of codes, or rebuild them."
    )
  return codes.astype(code_dtype(count))
