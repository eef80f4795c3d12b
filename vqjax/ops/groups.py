"""Distribution over a vocabulary in groups: a group, then a slot of the group.

  log p(v) = log softmax(W_g h + b_g)[group] + log softmax(P_group ∘ (W_s h + b_s) + Q_group)[slot]

W_s is shared by all groups; each group has a scale P and a shift Q for each of its S slots. An
order of the tokens gives each token a position, and groups are runs of consecutive positions. A
group smaller than the largest lacks its last slots, which are masked so that the probabilities sum
to one. Source: LLM Vocabulary Compression for Low-Compute Environments, Sections 2.2 and 2.3; the
mask and orders other than that of the token ids are not in the paper.
"""

# Groups are runs of positions, whatever the ids of the tokens are. Three equal groups of 10 tokens:
#
#   position   0  1  2 | 3  4  5 | 6  7  8  9         group_starts: [0, 3, 6, 10]
#   group      0       | 1       | 2
#   slot       0  1  2 | 0  1  2 | 0  1  2  3         slot 3 of groups 0 and 1 is masked
#   token      order[position]

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from vqjax.ops import device, softmax, tiles, vocab_parallel
from vqjax.ops.scores import exp_shift
from vqjax.types import Dtype, MeshAxes

__all__ = ["group_and_slot", "log_prob_in_group", "scaled"]


def group_starts(vocab: int, groups: int) -> np.ndarray:
  """First positions of G equal groups, and V at the end: int64 [G + 1].

  S_g = floor(V·g / G); E_g = S_{g+1} - 1 (Section 2.2).
  """
  return np.arange(groups + 1, dtype=np.int64) * vocab // groups


def checked_sizes(
  vocab: int, groups: int | None = None, sizes: tuple[int, ...] | None = None
) -> np.ndarray:
  """Number of tokens in each group, int64 [G].

  They are `sizes`, or the sizes of `groups` equal groups; without both there are floor(sqrt(V))
  groups.

  Raises:
    ValueError: `vocab` is below 1, both arguments are given, there are more groups than tokens, a
      group is empty, or `sizes` do not add up to `vocab`.
  """
  if vocab < 1:
    raise ValueError(f"`vocab` must be at least 1; got {vocab}. Give the number of tokens.")
  if sizes is None:
    groups = math.isqrt(vocab) if groups is None else groups
    if not 1 <= groups <= vocab:
      raise ValueError(
        f"`groups` must be in [1, {vocab}] for a vocabulary of {vocab}; got {groups}. None is"
        " sqrt(V)."
      )
    return np.diff(group_starts(vocab, groups))
  if groups is not None:
    raise ValueError(
      f"`groups` must be None beside `sizes`; got {groups} and {len(sizes)} sizes. Give one"
      " of the two."
    )
  if len(sizes) > vocab:
    raise ValueError(
      f"`sizes` must have 1 to {vocab} entries for a vocabulary of {vocab}; got {len(sizes)}. Take"
      " them from assign.grouping(assignment).sizes."
    )
  empty = [g for g, size in enumerate(sizes) if size < 1]
  if empty:
    raise ValueError(
      f"`sizes` must be at least 1; got {sizes[empty[0]]} for group {empty[0]}. Leave out the"
      f" {len(empty)} empty groups, as assign.grouping does."
    )
  if sum(sizes) != vocab:
    raise ValueError(
      f"`sizes` must add up to the vocabulary of {vocab}; got {sum(sizes)}. Take them from"
      " assign.grouping(assignment).sizes."
    )
  return np.asarray(sizes, np.int64)


def check_order(order: ArrayLike, vocab: int) -> None:
  """Check that `order` is a permutation; under jit, only its shape and dtype.

  Raises:
    ValueError: `order` is not a permutation; the message gives the first wrong token.
  """
  remedy = f" Give each token of [0, {vocab}) one position, as assign.grouping(...).order does."
  if np.shape(order) != (vocab,) or not jnp.issubdtype(jnp.result_type(order), jnp.integer):
    kind = f"{jnp.result_type(order)}{list(np.shape(order))}"
    raise ValueError(f"`order` must be int[{vocab}]; got {kind}.{remedy}")
  if isinstance(order, jax.core.Tracer):
    return
  order = np.asarray(order)
  outside = order[(order < 0) | (order >= vocab)]
  if outside.size:
    raise ValueError(f"`order` must be a permutation; got token {outside[0]} of {vocab}.{remedy}")
  count = np.bincount(order, minlength=vocab)
  if (count != 1).any():
    twice, never = np.argmax(count > 1), np.argmin(count)
    at = " and ".join(map(str, np.flatnonzero(order == twice)[:2]))
    raise ValueError(
      f"`order` must be a permutation; got token {twice} at positions {at}, and token {never} at"
      f" none.{remedy}"
    )


def positions(order: Int[Array, "V"]) -> Int[Array, "V"]:
  """Position of each token, the inverse of the permutation `order`."""
  return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


def group_and_slot(
  position: Integer[Array, "*B"], starts: np.ndarray
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
  """Group and slot of each position."""
  # int32, for JAX without x64 has no int64, and positions fit.
  first = jnp.asarray(starts[:-1], jnp.int32)
  group = jnp.searchsorted(first, position, side="right").astype(jnp.int32) - 1
  return group, position - first[group]


def scaled(
  shared: Float[Array, "*#B S"], scale: Float[Array, "*#B S"], shift: Float[Array, "*#B S"]
) -> Float[Array, "*B S"]:
  """Scores of the slots of a group in float32: scale ∘ shared + shift."""
  return shared.astype(jnp.float32) * scale.astype(jnp.float32) + shift.astype(jnp.float32)


def log_prob_in_group(scores: Float[Array, "*B S"], sizes, slot: Int[Array, "*B"]) -> Array:
  """Log-probability, in nats, of a slot among the first `sizes` [*B] slots."""
  present = jnp.arange(scores.shape[-1]) < sizes[..., None]
  scores = jnp.where(present, scores, -jnp.inf)
  own = jnp.take_along_axis(scores, slot[..., None], axis=-1)[..., 0]
  return own - jax.nn.logsumexp(scores, axis=-1)


def log_best_slot(
  shared: Float[Array, "*B S"],
  scale: Float[Array, "G S"],
  shift: Float[Array, "G S"],
  sizes: Int[Array, "G"],
) -> Float[Array, "*B G"]:
  """Log-probability, in nats, of the best slot in each group; -inf for an empty group."""
  groups, slots = scale.shape
  shared_SB = jnp.moveaxis(shared.astype(jnp.float32), -1, 0)
  batch = shared_SB.shape[1:]
  # Groups before slots before tokens: sums over slots are then sums of vectors. A few groups at a
  # time, at most 2^19 scores (2 MiB), so that their scores stay in a cache.
  count = -(-groups // max(1, 2**19 // max(1, slots * math.prod(batch))))
  width = -(-groups // count)
  column = lambda x: x.astype(jnp.float32).reshape(*x.shape, *[1] * len(batch))

  def step(_, index):
    start = jnp.minimum(index * width, groups - width)
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, width)
    score_wSB = column(cut(scale)) * shared_SB + column(cut(shift))
    present_wS = jnp.arange(slots, dtype=jnp.int32) < cut(sizes)[:, None]
    score_wSB = jnp.where(column(present_wS) > 0, score_wSB, -jnp.inf)
    top_wB = score_wSB.max(axis=1)
    shift_wB = exp_shift(top_wB)
    total_wB = jnp.exp(score_wSB - shift_wB[:, None]).sum(axis=1)
    return None, jnp.where(jnp.isneginf(top_wB), -jnp.inf, -jnp.log(total_wB))

  _, found_CwB = lax.scan(step, None, jnp.arange(count, dtype=jnp.int32))
  # The last step repeats groups of the one before.
  row_G = jnp.arange(groups, dtype=jnp.int32)
  step_G = row_G // width
  place_G = row_G - jnp.minimum(step_G * width, groups - width)
  return jnp.moveaxis(found_CwB[step_G, place_G], 0, -1)


class Slots(NamedTuple):
  """Weight [S, D], bias [S] or None, scale and shift [G, S] of slot scores."""

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
  vocab_axis: MeshAxes | None = None,
) -> Float[Array, "*B"]:
  """Log-probability, in nats, of a slot in its group.

  Only the token's own group is scored. Unless the scores [N, S] are few enough to be kept, a tile
  of tokens is scored at a time, and once more for the gradient: a few arrays of [tile, S] exist at
  a time. Inside of `vocab_axis`, `slots` and `sizes` are those of the device's own groups, and
  `group` counts over the groups of all devices.
  """
  axis = vocab_parallel.inside(vocab_axis)
  local = group - vocab_parallel.first_row(axis, sizes.shape[0])
  is_local = (local >= 0) & (local < sizes.shape[0])
  dtype = dtype or jnp.promote_types(hidden.dtype, slots.weight.dtype)
  shards = vocab_parallel.token_shards(vocab_axis)
  flat = hidden.reshape(-1, hidden.shape[-1]), jnp.where(is_local, local, 0).ravel(), slot.ravel()

  def copies(x):
    # One copy for each token shard, so that gradients are summed over devices once and not in
    # every tile; in float32, because many tokens add to them.
    wide = x.astype(vocab_parallel.summed_dtype(x.dtype))
    return shards.keep(jnp.broadcast_to(wide, (shards.count, *x.shape)))

  # A group that only pads a device's shard has no slot, and log 0 has no gradient: give it one.
  tables = jax.tree.map(copies, (slots, jnp.maximum(sizes, 1)))
  tables, tokens = vocab_parallel.varying((tables, jax.tree.map(shards.split, flat)))
  run = lambda tables, tokens: _by_tiles(tables, tokens, dtype)
  if shards.count > 1:
    log_prob = jax.vmap(run)(tables, tokens)
  else:
    # Without `vmap`, which turns gathers and products into slower batched ones.
    log_prob = run(*jax.tree.map(lambda x: x[0], (tables, tokens)))[None]
  log_prob = shards.join(log_prob, flat[0].shape[0]).reshape(group.shape)
  log_prob = jnp.where(is_local, log_prob, 0.0)
  return lax.psum(log_prob, axis) if axis else log_prob


def _by_tiles(tables, tokens, dtype):
  count, slots = tokens[0].shape[0], tables[0].scale.shape[1]
  if 4 * count * slots <= device.current().kept:
    return _tile_log_prob(tables, *tokens, dtype)
  least = -(-count * slots // tiles.most_scores())
  # Tokens have to be copied to be padded; a number of tiles that divides them avoids that.
  steps = next((n for n in range(least, 2 * least) if count % n == 0), least)
  fill = -count % steps

  def cut(x):
    x = jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)) if fill else x
    return x.reshape(steps, -1, *x.shape[1:])

  # Recomputed in the backward pass; a scan's body needs no protection from common-subexpression
  # elimination.
  tile_log_prob = jax.checkpoint(_tile_log_prob, prevent_cse=False, static_argnums=(4,))
  step = lambda carry, tile: (carry, tile_log_prob(tables, *tile, dtype))
  return lax.scan(step, None, jax.tree.map(cut, tokens))[1].reshape(-1)[:count]


def _tile_log_prob(tables, hidden, group, slot, dtype):
  (weight, bias, scale, shift), sizes = tables
  shared = softmax.linear_scores(hidden, weight, bias, dtype)
  return log_prob_in_group(scaled(shared, scale[group], shift[group]), sizes[group], slot)
