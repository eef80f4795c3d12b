"""What distribution does a vocabulary in consecutive groups have, a group first, then its slot?

  log p(v) = log softmax(W_g h + b_g)[group] + log softmax(P_group ∘ (W_s h + b_s) + Q_group)[slot]

W_s is shared by all groups; each group has a scale P and a shift Q for each of its S slots. Groups
differ by at most one in size, so some lack their last slot: it is masked, or the probabilities
would not sum to one. Source: LLM Vocabulary Compression for Low-Compute Environments, Sections 2.2
and 2.3; the mask is not in the paper.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from vqjax.ops import shards


def group_starts(vocab: int, groups: int) -> np.ndarray:
  """First token of each group, and the vocabulary's size at the end: int64 [G + 1].

  S_g = floor(V·g / G); E_g = S_{g+1} - 1 (Section 2.2).
  """
  return np.arange(groups + 1, dtype=np.int64) * vocab // groups


def group_and_slot(
  tokens: Integer[Array, "*B"], starts: np.ndarray
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
  """The group of each token, and its place inside it."""
  first = jnp.asarray(starts[:-1], jnp.int32)
  group = jnp.searchsorted(first, tokens, side="right") - 1
  return group, tokens - first[group]


def slot_scores(
  shared: Float[Array, "*#B S"], scale: Float[Array, "*#B S"], shift: Float[Array, "*#B S"], sizes
) -> Float[Array, "*B S"]:
  """Scores of the slots, scale ∘ shared + shift; -inf for a slot at or beyond its group's size."""
  scores = shared.astype(jnp.float32) * scale.astype(jnp.float32) + shift.astype(jnp.float32)
  return jnp.where(jnp.arange(scores.shape[-1]) < sizes[..., None], scores, -jnp.inf)


def slot_log_prob(
  shared: Float[Array, "*B S"],
  scale: Float[Array, "G S"],
  shift: Float[Array, "G S"],
  sizes: Int[Array, "G"],
  group: Int[Array, "*B"],
  slot: Int[Array, "*B"],
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a slot inside its group, given W_s h + b_s of each token.

  Only the token's own group is scored: arrays of N·S elements, never N·V. Inside of `vocab_axis`
  scale, shift and sizes are of the device's own groups, and `group` counts over those of all.
  """
  axis = shards.inside(vocab_axis)
  here = group - shards.first_row(axis, sizes.shape[0])
  mine = (here >= 0) & (here < sizes.shape[0])
  here = jnp.where(mine, here, 0)
  # A group that fills up a device's part has no slot, and log 0 no gradient: give it one.
  rows = shards.taken(scale, here), shards.taken(shift, here)
  scores = slot_scores(shared, *rows, jnp.maximum(sizes[here], 1))
  picked = jnp.take_along_axis(scores, slot[..., None], axis=-1)[..., 0]
  log_prob = jnp.where(mine, picked - jax.nn.logsumexp(scores, axis=-1), 0.0)
  return lax.psum(log_prob, axis) if axis else log_prob
