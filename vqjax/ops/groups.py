"""What distribution does a vocabulary in groups have, a group first, then its slot?

  log p(v) = log softmax(W_g h + b_g)[group] + log softmax(P_group ∘ (W_s h + b_s) + Q_group)[slot]

W_s is shared by all groups; each group has a scale P and a shift Q for each of its S slots. Groups
lie one after another in an order of the tokens: a token has a position, and a position a group and a
slot. A group smaller than the largest lacks its last slots: they are masked, or the probabilities
would not sum to one. Source: LLM Vocabulary Compression for Low-Compute Environments, Sections 2.2
and 2.3; the mask and any order but that of the token ids are not in the paper.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from vqjax.ops import softmax, tiles, vocab_parallel
from vqjax.types import Dtype


def group_starts(vocab: int, groups: int) -> np.ndarray:
  """First position of each of equal groups, and the vocabulary's size at the end: int64 [G + 1].

  S_g = floor(V·g / G); E_g = S_{g+1} - 1 (Section 2.2).
  """
  return np.arange(groups + 1, dtype=np.int64) * vocab // groups


def checked_sizes(
  vocab: int, groups: int | None = None, sizes: tuple[int, ...] | None = None
) -> np.ndarray:
  """Number of tokens in each group, int64 [G]: `sizes`, or those of `groups` equal ones.

  With neither there are floor(sqrt(V)) groups.

  Raises:
    ValueError: no token, both arguments, more groups than tokens, an empty group, or sizes that do
      not add up to the vocabulary.
  """
  if vocab < 1:
    raise ValueError(f"vocab {vocab} holds no token; give at least 1")
  if sizes is None:
    groups = math.isqrt(vocab) if groups is None else groups
    if not 1 <= groups <= vocab:
      raise ValueError(f"groups {groups} for a vocabulary of {vocab}; give 1 to {vocab}")
    return np.diff(group_starts(vocab, groups))
  if groups is not None:
    raise ValueError(f"groups {groups} and {len(sizes)} sizes are given; give one of the two")
  if len(sizes) > vocab:
    raise ValueError(f"{len(sizes)} groups for a vocabulary of {vocab}; give 1 to {vocab} sizes")
  empty = [g for g, size in enumerate(sizes) if size < 1]
  if empty:
    raise ValueError(
      f"group {empty[0]} has size {sizes[empty[0]]}, and every group holds a token; leave out the"
      f" {len(empty)} empty groups, as assign.grouping does"
    )
  if sum(sizes) != vocab:
    raise ValueError(
      f"sizes add up to {sum(sizes)} tokens for a vocabulary of {vocab}; take them from"
      " assign.grouping(assignment).sizes"
    )
  return np.asarray(sizes, np.int64)


def check_order(order: ArrayLike, vocab: int) -> None:
  """Nothing, where `order` names each token of [0, V) exactly once; under jit, where it has V.

  Raises:
    ValueError: it does not; the message names the first token that it should not, or should, name.
  """
  remedy = f"; give each token of 0 to {vocab - 1} one position, as assign.grouping(...).order does"
  if np.shape(order) != (vocab,) or not jnp.issubdtype(jnp.result_type(order), jnp.integer):
    raise ValueError(f"order {jnp.result_type(order)}{np.shape(order)} is no int[{vocab}]{remedy}")
  if isinstance(order, jax.core.Tracer):
    return
  order = np.asarray(order)
  outside = order[(order < 0) | (order >= vocab)]
  if outside.size:
    raise ValueError(f"order names {outside[0]}, which is no token of {vocab}{remedy}")
  count = np.bincount(order, minlength=vocab)
  if (count != 1).any():
    twice, never = np.argmax(count > 1), np.argmin(count)
    at = " and ".join(map(str, np.flatnonzero(order == twice)[:2]))
    raise ValueError(
      f"order has token {twice} at positions {at}, and token {never} at none{remedy}"
    )


def positions(order: Int[Array, "V"]) -> Int[Array, "V"]:
  """The position of each token: the inverse of the token at each position."""
  return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


def group_and_slot(
  position: Integer[Array, "*B"], starts: np.ndarray
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
  """The group of each position, and its slot inside it."""
  first = jnp.asarray(starts[:-1], jnp.int32)
  group = jnp.searchsorted(first, position, side="right").astype(jnp.int32) - 1
  return group, position - first[group]


def scaled(
  shared: Float[Array, "*#B S"], scale: Float[Array, "*#B S"], shift: Float[Array, "*#B S"]
) -> Float[Array, "*B S"]:
  """Scores of the slots of a group, scale ∘ shared + shift, in float32."""
  return shared.astype(jnp.float32) * scale.astype(jnp.float32) + shift.astype(jnp.float32)


def log_prob_in_group(scores: Float[Array, "*B S"], sizes, slot: Int[Array, "*B"]) -> Array:
  """Log-probability, in nats, of a slot among the first `sizes` [*B] slots."""
  present = jnp.arange(scores.shape[-1]) < sizes[..., None]
  scores = jnp.where(present, scores, -jnp.inf)
  picked = jnp.take_along_axis(scores, slot[..., None], axis=-1)[..., 0]
  return picked - jax.nn.logsumexp(scores, axis=-1)


class Slots(NamedTuple):
  """What scores slots: the shared weight [S, D] and bias [S] or None, scale and shift [G, S]."""

  weight: Array
  bias: Array | None
  scale: Array
  shift: Array


def slot_log_prob(
  hidden: Float[Array, "*B D"],
  slots: Slots,
  sizes: Int[Array, "G"],
  group: Int[Array, "*B"],
  slot: Int[Array, "*B"],
  dtype: Dtype | None = None,
  vocab_axis: str | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a slot inside its group; only the token's own group is scored.

  A tile of tokens is scored at a time, and again for the gradient: a few arrays of [tile, S] are
  alive, none of [N, S]. Inside of `vocab_axis` scale, shift and sizes are of the device's own
  groups, and `group` counts over those of all.
  """
  axis = vocab_parallel.inside(vocab_axis)
  here = group - vocab_parallel.first_row(axis, sizes.shape[0])
  mine = (here >= 0) & (here < sizes.shape[0])
  dtype = dtype or jnp.promote_types(hidden.dtype, slots.weight.dtype)
  spread = vocab_parallel.token_shards(vocab_axis)
  flat = hidden.reshape(-1, hidden.shape[-1]), jnp.where(mine, here, 0).ravel(), slot.ravel()
  # A copy of the tables for each part of the tokens: their gradients are summed once, not a tile.
  # A group that fills up a device's part has no slot, and log 0 no gradient: give it one.
  tables = slots, jnp.maximum(sizes, 1)
  exact = lambda x: spread.keep(
    jnp.broadcast_to(x.astype(vocab_parallel.summed_dtype(x.dtype)), (spread.count, *x.shape))
  )
  tables = jax.tree.map(exact, tables)
  tables, tokens = vocab_parallel.varying((tables, jax.tree.map(spread.split, flat)))
  found = _each_part(lambda tables, tokens: _by_tiles(tables, tokens, dtype), tables, tokens)
  found = spread.join(found, flat[0].shape[0]).reshape(group.shape)
  log_prob = jnp.where(mine, found, 0.0)
  return lax.psum(log_prob, axis) if axis else log_prob


def _each_part(function, *trees):
  """function for each part of the first axis; not as a batch where there is one part."""
  if jax.tree.leaves(trees)[0].shape[0] > 1:
    return jax.vmap(function)(*trees)
  return function(*jax.tree.map(lambda x: x[0], trees))[None]


def _by_tiles(tables, tokens, dtype):
  count, slots = tokens[0].shape[0], tables[0].scale.shape[1]
  least = -(-count * slots // tiles.most_scores())
  if least <= 1:
    return _tile_log_prob(tables, *tokens, dtype)
  # Tokens that no number of tiles divides are copied, to be filled up.
  steps = next((n for n in range(least, 2 * least) if count % n == 0), least)
  fill = -count % steps

  def cut(x):
    x = jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)) if fill else x
    return x.reshape(steps, -1, *x.shape[1:])

  again = jax.checkpoint(_tile_log_prob, prevent_cse=False, static_argnums=(4,))
  step = lambda carry, tile: (carry, again(tables, *tile, dtype))
  return lax.scan(step, None, jax.tree.map(cut, tokens))[1].reshape(-1)[:count]


def _tile_log_prob(tables, hidden, group, slot, dtype):
  (weight, bias, scale, shift), sizes = tables
  shared = softmax.linear_scores(hidden, weight, bias, dtype)
  return log_prob_in_group(scaled(shared, scale[group], shift[group]), sizes[group], slot)
