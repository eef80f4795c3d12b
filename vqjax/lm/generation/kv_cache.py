"""Forward passes of the general decoder that read and extend a cache of keys and values.

Each block has a cache of its own: as many positions as its window, or all of them. Blocks are
computed one after another, not in a scan over stacked parameters, because a scan copies a block's
weights before it multiplies one token with them, and that takes longer than the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.lm.generation.draft_trees import DraftTree
from vqjax.lm.models import Transformer
from vqjax.lm.models.attention import attend, attend_to_itself
from vqjax.lm.models.decoder import Angles, Block, BlockSettings

__all__ = ["Variables", "decode", "extend", "prefill", "unstacked"]

Variables = dict[str, Any]
"""Variables of a model, by collection."""


class Ring(NamedTuple):
  """Keys and values of the last W positions of each row of a batch.

  A row whose prompt has n tokens begins with position n - W + j in slot j. Generated token i, at
  position n + i, replaces slot i mod W, which held position n + i - W: the slots that are written
  are the same for all rows, however long their prompts are.

  Tokens may be rejected after they were written, and the next ones replace them. Until then a
  position of a rejected token is read as the one W before it, which has to lie before the window:
  a ring has as many slots more than its window as tokens may be rejected at a time.
  """

  key: Float[Array, "B W G C"]
  value: Float[Array, "B W G C"]

  @staticmethod
  def of_prompt(
    key: Float[Array, "B T G C"],
    value: Float[Array, "B T G C"],
    length: Int[Array, "B"],
    slots: int,
  ) -> Ring:
    """The ring after a prompt, of which row b has `length[b]` tokens and then padding."""
    position_BW = length[:, None] - slots + jnp.arange(slots)
    # Slots before the first position hold copies of a key, which `positions` hides.
    index_BW11 = jnp.clip(position_BW, 0, key.shape[1] - 1)[..., None, None]
    return Ring(*(jnp.take_along_axis(x, index_BW11, axis=1) for x in (key, value)))

  def extended(
    self, key: Float[Array, "B T G C"], value: Float[Array, "B T G C"], step: Int[Array, "*b"]
  ) -> Ring:
    """The ring with the keys and values of generated tokens `step` to `step` + T - 1.

    `step` is one number, for T = 1, or a number for each row.
    """
    slots = self.key.shape[1]
    if step.ndim == 0:
      write = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, step % slots, 1)
    elif len(step) == 1:
      # On CPUs a scatter is a loop over its indices, which takes longer than a small block.
      def write(old, new):
        for ahead in range(new.shape[1]):
          slot = (step[0] + ahead) % slots
          old = lax.dynamic_update_slice_in_dim(old, new[:, ahead : ahead + 1], slot, 1)
        return old
    else:
      row_B1 = jnp.arange(len(step))[:, None]
      slot_BT = (step[:, None] + jnp.arange(key.shape[1])) % slots
      write = lambda old, new: old.at[row_B1, slot_BT].set(new)
    return Ring(*(write(old, new.astype(old.dtype)) for old, new in zip(self, (key, value))))

  def positions(self, length: Int[Array, "B"], step: Int[Array, "*b"]) -> Int[Array, "B W"]:
    """The position in each slot once token `step` is written; later than any for an empty one."""
    slots = self.key.shape[1]
    step_B1 = jnp.broadcast_to(step, length.shape)[:, None]
    position_BW = length[:, None] + step_B1 - (step_B1 - jnp.arange(slots)) % slots
    return jnp.where(position_BW < 0, jnp.iinfo(jnp.int32).max, position_BW)

  def of_tree(
    self, length: Int[Array, "B"], step: Int[Array, "B"], tree: DraftTree
  ) -> tuple[Int[Array, "B W"], Bool[Array, "B N W"]]:
    """The position in each slot once N nodes of a tree are written, and which nodes see it.

    The nodes are in the slots of tokens `step` to `step` + N - 1, at the positions of their depths.
    """
    node_BW = (jnp.arange(self.key.shape[1]) - step[:, None]) % self.key.shape[1]
    is_node_BW = node_BW <= tree.size
    node_BW = jnp.where(is_node_BW, node_BW, 0)
    position_BW = (length + step)[:, None] + jnp.asarray(tree.depths)[node_BW]
    position_BW = jnp.where(is_node_BW, position_BW, self.positions(length, step + tree.size))
    sees_BNW = jnp.moveaxis(jnp.asarray(tree.sees)[:, node_BW], 0, 1)
    return position_BW, sees_BNW | ~is_node_BW[:, None]

  def along(self, step: Int[Array, "B"], nodes: Int[Array, "B T"]) -> Ring:
    """The ring in which tokens `step` to `step` + T - 1 are these nodes of the tree there."""
    slots, row_B1 = self.key.shape[1], jnp.arange(len(step))[:, None]
    read_BT = (step[:, None] + nodes) % slots
    write_BT = (step[:, None] + jnp.arange(nodes.shape[1])) % slots
    return Ring(*(old.at[row_B1, write_BT].set(old[row_B1, read_BT]) for old in self))


def unstacked(variables: Variables) -> Variables:
  """Variables of a decoder with the parameters of each block in arrays of their own.

  Generation computes with this form. The blocks are copied: where memory is short, convert once
  and drop the stacked ones. Converted variables are returned as they are.
  """
  blocks = variables["params"]["blocks"]
  if isinstance(blocks, tuple):
    return variables
  return {**variables, "params": {**variables["params"], "blocks": _split(blocks)}}


@jax.jit
def _split(blocks):
  return tuple(_entry(blocks, layer) for layer in range(len(jax.tree.leaves(blocks)[0])))


def _entry(tree, layer):
  return jax.tree.map(lambda x: x[layer], tree)


def prefill(
  model: Transformer,
  variables: Variables,
  tokens: Int[Array, "B T"],
  length: Int[Array, "B"],
  capacity: int,
  rejected: int = 0,
  *,
  all_positions: bool = False,
) -> tuple[Float[Array, "B *T D"], tuple[Ring, ...]]:
  """Final hidden vectors of the last tokens of prompts, and the caches after them.

  Args:
    model: the decoder.
    variables: its `unstacked` variables.
    tokens: prompts, each followed by padding of any tokens.
    length: number of tokens of each prompt.
    capacity: positions that a cache holds unless its block has a smaller window.
    rejected: number of tokens that may be rejected at a time.
    all_positions: return the vectors of all tokens, [B, T, D]; those of padding are arbitrary.
  """
  model.check_keys_suffice()
  slots_L = [slots + rejected for slots in _cache_slots(model, capacity)]

  def forward(model, blocks):
    position_T = jnp.arange(tokens.shape[1])
    x_BTD = model.embedded(model.embedding(tokens), position_T)
    # Padding does not make a text longer, on which some angles depend.
    angles, rings = model.angles(jnp.minimum(position_T, length[:, None] - 1)), []
    for params, layer, slots in zip(blocks, _layers(model), slots_L):
      x_BTD, ring = model.block().apply(
        {"params": params},
        *(x_BTD, layer, angles, length, slots),
        method=_of_prompt,
      )
      rings.append(ring)
    if all_positions:
      return model.final(x_BTD), tuple(rings)
    last_BD = jnp.take_along_axis(x_BTD, (length - 1)[:, None, None], axis=1)[:, 0]
    return model.final(last_BD), tuple(rings)

  return model.apply(variables, variables["params"]["blocks"], method=forward)


def decode(
  model: Transformer,
  variables: Variables,
  rings: tuple[Ring, ...],
  token: Int[Array, "B"],
  length: Int[Array, "B"],
  step: Int[Array, ""],
) -> tuple[Float[Array, "B D"], tuple[Ring, ...]]:
  """Final hidden vectors of generated token number `step`, and the caches with it.

  Args:
    model: the decoder.
    variables: its `unstacked` variables.
    rings: the cache of each block.
    token: the token of each row.
    length: number of tokens of each prompt.
    step: number of tokens that were generated before this one.
  """
  hidden_BTD, rings = extend(model, variables, rings, token[:, None], length, step)
  return hidden_BTD[:, 0], rings


def extend(
  model: Transformer,
  variables: Variables,
  rings: tuple[Ring, ...],
  tokens: Int[Array, "B T"],
  length: Int[Array, "B"],
  step: Int[Array, "*b"],
  tree: DraftTree | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Ring, ...]]:
  """Final hidden vectors of T generated tokens, and the caches with them.

  Args:
    model: the decoder.
    variables: its `unstacked` variables.
    rings: the cache of each block.
    tokens: the tokens of each row.
    length: number of tokens of each prompt.
    step: number of tokens that were generated before these, for each row, or for all where T = 1.
    tree: the tokens are its nodes: each follows those on the path to it, at the position of its
      depth. `Ring.along` moves a path to its place. None: each follows all before it.

  Raises:
    ValueError: a cache has fewer slots than the tree has nodes.
  """
  ahead_T = jnp.arange(tokens.shape[1]) if tree is None else jnp.asarray(tree.depths)
  if tree is not None and (slots := min(ring.key.shape[1] for ring in rings)) <= tree.size:
    raise ValueError(
      f"`rings` must have slots for the {tree.size + 1} nodes of the tree; got {slots}. Give"
      f" `prefill` rejected={tree.size}."
    )

  def forward(model, blocks):
    position_BT = (length + step)[:, None] + ahead_T
    x_BTD = model.embedded(model.embedding(tokens), position_BT)
    angles, extended = model.angles(position_BT), []
    for params, layer, ring in zip(blocks, _layers(model), rings):
      x_BTD, ring = model.block().apply(
        {"params": params}, *(x_BTD, layer, angles, ring, length, step, tree), method=_of_tokens
      )
      extended.append(ring)
    return model.final(x_BTD), tuple(extended)

  return model.apply(variables, variables["params"]["blocks"], method=forward)


def _cache_slots(model: Transformer, capacity: int) -> list[int]:
  """Number of positions in the cache of each block."""
  return [min(model.window, capacity) if local else capacity for local in model.is_local()]


def _layers(model: Transformer) -> list[BlockSettings]:
  inputs = model.layer_inputs()
  return [_entry(inputs, layer) for layer in range(model.layers)]


def _of_prompt(
  block: Block, x_BTD: Array, layer: BlockSettings, angles: Angles | None, length: Array, slots: int
) -> tuple[Array, Ring]:
  query, key, value = block.query_key_values(x_BTD, layer, angles)
  options = block.attention_options()
  mixed = attend_to_itself(query, key, value, layer.window, tiled=True, **options)
  ring = Ring.of_prompt(key, value, length, slots)
  return block.feed_forward(x_BTD, mixed, deterministic=True), ring


def _of_tokens(
  block: Block,
  x_BTD: Array,
  layer: BlockSettings,
  angles: Angles | None,
  ring: Ring,
  length: Array,
  step: Array,
  tree: DraftTree | None,
) -> tuple[Array, Ring]:
  query, key, value = block.query_key_values(x_BTD, layer, angles)
  ring = ring.extended(key, value, step)
  if tree is None:
    ahead_T, seen = jnp.arange(x_BTD.shape[1]), None
    key_position = ring.positions(length, step + ahead_T[-1])
  else:
    ahead_T = jnp.asarray(tree.depths)
    key_position, seen = ring.of_tree(length, step, tree)
  positions = (length + step)[:, None] + ahead_T, key_position
  options = block.attention_options()
  mixed = attend(query, ring.key, ring.value, *positions, layer.window, seen, **options)
  return block.feed_forward(x_BTD, mixed, deterministic=True), ring
