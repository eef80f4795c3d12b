"""Which M codes does each token sit on, before anything is known of it, and are these right?"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer


def code_dtype(codes: int) -> jnp.dtype:
  """The narrowest unsigned integers that hold `codes` codes."""
  return jnp.dtype(jnp.uint8 if codes <= 2**8 else jnp.uint16 if codes <= 2**16 else jnp.uint32)


def mixed_radix(vocab: int, codes: int, subspaces: int) -> Int[np.ndarray, "V M"]:
  """Codes without knowledge of the tokens: the digits of a token, base K, each moved by the lower.

  No two tokens share all codes where V is at most K^M, and each code is on about V/K tokens.
  """
  higher, lower = np.arange(vocab, dtype=np.uint64), np.zeros(vocab, np.uint64)
  base, place, columns = np.uint64(codes), 1, []
  for m in range(subspaces):
    # A multiplicative hash a subspace: high digits are zero, and neighbours share few codes.
    mixed = (lower + np.uint64(m)) * np.uint64(0x9E3779B97F4A7C15 + 2 * m) >> np.uint64(33)
    digit = higher % base
    columns.append((digit + (mixed if m else np.uint64(0))) % base)
    lower += digit * np.uint64(place)
    higher, place = higher // base, min(place * codes, vocab)
  return np.stack(columns, axis=1).astype(np.int64)


def checked_codes(
  codes: np.ndarray, vocab: int, count: int, subspaces: int
) -> Integer[np.ndarray, "V M"]:
  """The codes in their narrowest dtype; ValueError if one is not in [0, K) or some are missing."""
  if codes.shape != (vocab, subspaces) or not np.issubdtype(codes.dtype, np.integer):
    raise ValueError(
      f"codes are {codes.dtype}{list(codes.shape)}; give integers [{vocab}, {subspaces}], one for"
      " each token and subspace"
    )
  outside = np.argwhere((codes < 0) | (codes >= count))
  if len(outside):
    token, m = outside[0]
    raise ValueError(
      f"token {token} has code {codes[token, m]} in subspace {m}, outside [0, {count})"
      f" ({len(outside)} such codes); give another number of codes, or rebuild them"
    )
  return codes.astype(code_dtype(count))
