"""The gated delta rule: attention whose memory of earlier tokens is a matrix that does not grow.

Axes beside the usual letters: H heads, C width of a key, E width of a value, L tokens of a chunk.
A head keeps a state S [C, E]. Token t forgets a part of it, and writes what the state does not yet
say of its key:

  S <- a_t S,   S <- S + k_t u_t^T with u_t = b_t (v_t - S^T k_t),   o_t = S^T q_t

Source: Yang et al., Gated Delta Networks, 2024 (arXiv 2412.06464), Section 3.
"""

# In a chunk that begins with the state S, A_t being the product of its a up to token t,
#
#   u_t + b_t sum_{s < t} A_t / A_s (k_t k_s) u_s = b_t v_t - b_t A_t S^T k_t
#
# is a triangular system for all u of the chunk. Its right side is linear in S, so that it is solved
# for both parts in all chunks at once, and only products with S go from chunk to chunk. Ratios of A
# come from sums of the logarithms between two tokens: differences of sums from the start of the
# chunk would be rounded by all that was forgotten before.

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

__all__ = []

CHUNK = 64
"""Tokens of a chunk."""

State = Float[Array, "B H C E"]


def gated_delta_rule(
  query: Float[Array, "B T H C"],
  key: Float[Array, "B T H C"],
  value: Float[Array, "B T H E"],
  log_decay: Float[Array, "B T H"],
  rate: Float[Array, "B T H"],
  state: State | None = None,
  *,
  chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H E"], State]:
  """The outputs o of all tokens, and the state after them, in float32.

  A token whose rate and logarithm of the decay are 0 leaves the state as it is.

  Args:
    query: q.
    key: k, of length 1 at most for a stable state.
    value: v.
    log_decay: the logarithms of a, at most 0.
    rate: b, in [0, 1].
    state: the state before the first token; None: zeros.
    chunk: tokens whose outputs are computed together.
  """
  batch, length, heads, width = key.shape
  if state is None:
    state = jnp.zeros((batch, heads, width, value.shape[-1]), jnp.float32)
  given = [x.astype(jnp.float32) for x in (query, key, value, log_decay, rate)]
  if length == 1:
    return _step(*given, state.astype(jnp.float32))
  size = min(chunk, length)
  count = -(-length // size)
  split = lambda x: _in_chunks(x, count, size)
  query, key, value, log_decay, rate = map(split, given)  # [N, B, H, L, ...]
  below = jnp.tri(size, k=-1, dtype=bool)
  between = jnp.cumsum(jnp.where(below, log_decay[..., None], 0), axis=-2)
  ratio = jnp.where(jnp.tri(size, dtype=bool), jnp.exp(between), 0)
  system = rate[..., None] * ratio * _product(key, key)
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
  sides = rate[..., None] * jnp.concatenate([value, from_start * key], axis=-1)
  solved = jax.scipy.linalg.solve_triangular(system, sides, lower=True, unit_diagonal=True)
  parts = jnp.split(solved, [value.shape[-1]], axis=-1)
  to_end = ratio[..., -1, :, None]

  def step(state, given):
    written, read, query, among, key, kept = given
    written = written - read @ state
    out = query @ state + among @ written
    return kept * state + jnp.swapaxes(key, -1, -2) @ written, out

  among = ratio * _product(query, key)
  kept = from_start[..., -1:, :]
  given = *parts, from_start * query, among, to_end * key, kept
  state, out = lax.scan(step, state.astype(jnp.float32), given)
  out = jnp.moveaxis(out, (0, 3), (1, 2))  # [B, N, L, H, E]
  return out.reshape(batch, count * size, heads, -1)[:, :length], state


def _step(query, key, value, log_decay, rate, state):
  """The rule for one token, without a system of equations."""
  query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))  # [B, H, 1, C]
  decay, rate = (jnp.swapaxes(x, 1, 2)[..., None] for x in (log_decay, rate))
  state = jnp.exp(decay) * state
  state = state + jnp.swapaxes(key, -1, -2) * (rate * (value - key @ state))
  return jnp.swapaxes(query @ state, 1, 2), state


def _in_chunks(x, count, size):
  """[B, T, H, ...] -> [N, B, H, L, ...], with zeros behind the last token."""
  pad = count * size - x.shape[1]
  x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
  return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), (1, 3), (0, 2))


def _product(one, other):
  return jnp.einsum("...lc,...mc->...lm", one, other)
