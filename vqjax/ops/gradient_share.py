"""The share of the logits' gradient that a head passes on to its hidden vectors.

A cross-entropy has the gradient g = p - onehot in the V logits of a token. Backpropagation replaces
it by Jᵀ g, where J [V, D] is the Jacobian of the logits in the hidden vector: what is orthogonal to
the columns of J is lost, and no step of the hidden vector can follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vqjax.ops import sampling, vocab_parallel

__all__ = ["GradientShare"]

# Part of the largest singular value of J below which one counts as zero, in float32.
_NO_GAIN = 1e-5


class GradientShare(NamedTuple):
  """What becomes of the gradient g of -log p(token) in the logits; nan where g is 0.

  Attributes:
    kept: |P g| / |g|, where P projects on the changes of the logits that a change of the hidden
      vector can make, up to a constant for all tokens, which a softmax ignores. In [0, 1].
    gain: |Jᵀ g| / |g|, the ratio of the norms of the gradients in hidden vector and logits.
    norm: |g|.
    rank: dimension of these changes, at most D.
  """

  kept: Float[Array, "*B"]
  gain: Float[Array, "*B"]
  norm: Float[Array, "*B"]
  rank: Int[Array, "*B"]


def gradient_share(
  blocks_of: Callable[[Float[Array, "D"]], sampling.Blocks],
  hidden: Float[Array, "*B D"],
  tokens: Int[Array, "*B"],
) -> GradientShare:
  """Shares of the gradients of -log p(token), one context after another.

  A block of the vocabulary contributes its rows of [1, J, g], of which only the triangular factor
  R [D + 2, D + 2] is kept: orthogonal transformations change neither norms nor projections. No sum
  of squares of J is formed, so that small directions are as accurate as large ones.
  """

  def of_one(given):
    hidden_D, token = given
    score = lambda index: lambda h: blocks_of(h).block(index)[0].astype(jnp.float32)
    blocks = blocks_of(hidden_D)
    log_z = sampling.log_z(blocks)

    def step(r, index):
      score_W, token_W = blocks.block(index)
      # Column by column, since a tangent of all would hold [W, D, D] in heads with factors.
      tangents = jax.vmap(lambda t: jax.jvp(score(index), (hidden_D,), (t,))[1])
      jacobian_WD = tangents(jnp.eye(hidden_D.shape[0], dtype=hidden_D.dtype)).T
      present_W1 = jnp.isfinite(score_W)[:, None]
      # The rows of padding have -inf as scores, and any derivatives.
      prob_W = jnp.exp(score_W - log_z)
      own_W = (token_W == token) & present_W1[:, 0]
      columns = jnp.ones_like(present_W1, jnp.float32), jacobian_WD, (prob_W - own_W)[:, None]
      rows = jnp.where(present_W1, jnp.concatenate(columns, axis=1), 0.0)
      return _triangle(jnp.concatenate([r, rows])), None

    start = jnp.zeros((hidden_D.shape[0] + 2,) * 2, jnp.float32)
    start = vocab_parallel.varying((start, log_z, blocks.block(0)[0]))[0]
    r = lax.scan(step, start, blocks.indices)[0]
    if blocks.axis is not None:
      every = vocab_parallel.gathered(r, blocks.axis)
      r = _triangle(every.reshape(-1, r.shape[-1]))
    return _shares(r)

  flat = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
  found = lax.map(of_one, flat)
  return jax.tree.map(lambda x: x.reshape(tokens.shape), found)


def _triangle(rows: Float[Array, "W C"]) -> Float[Array, "C C"]:
  """The factor R of a QR decomposition, square."""
  r = jnp.linalg.qr(rows, mode="r")
  return jnp.pad(r, ((0, rows.shape[1] - r.shape[0]), (0, 0)))


def _shares(r: Float[Array, "C C"]) -> GradientShare:
  """The shares from the factor R of [1, J, g]."""
  # Without the first row, which has the part along the ones of every column: the rest is centred.
  jacobian, gradient = r[1:, 1:-1], r[1:, -1]
  left, values, _ = jnp.linalg.svd(jacobian, full_matrices=False)
  is_there = values > _NO_GAIN * values[0]
  inside = jnp.where(is_there, left.T @ gradient, 0.0)
  norm = jnp.linalg.norm(gradient)
  kept = jnp.minimum(jnp.linalg.norm(inside) / norm, 1.0)
  gain = jnp.linalg.norm(values * inside) / norm
  return GradientShare(kept, gain, norm, is_there.sum(dtype=jnp.int32))
