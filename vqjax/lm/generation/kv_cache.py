"""Forward passes of the general decoder that read and extend a cache of earlier tokens.

Each block has a cache of its own: keys and values of as many positions as its window, or of all of
them, or the state of its delta rule. Memories of n-grams have caches, too. Blocks are computed one
after another, not in a scan over stacked parameters, because a scan copies a block's weights before
it multiplies one token with them, and that takes longer than the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vqjax.lm.generation.draft_trees import DraftTree
from vqjax.lm.models import Transformer
from vqjax.lm.models.attention import attend
from vqjax.lm.models.decoder import Angles, Block, BlockSettings
from vqjax.lm.models.recurrent import DeltaCache
from vqjax.ngrams import MemoryCache

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

  Attributes:
    key: the keys.
    value: the values.
    index: the keys of the block's index; None: it has none.
  """

  key: Float[Array, "B W G C"]
  value: Float[Array, "B W G C"]
  index: Float[Array, "B W C"] | None = None

  def of_prompt(self, length: Int[Array, "B"], slots: int) -> Ring:
    """The ring after a prompt, from what all its positions have.

    Row b has `length[b]` tokens and then padding.
    """
    position_BW = length[:, None] - slots + jnp.arange(slots)
    # Slots before the first position hold copies of a key, which `positions` hides.
    index_BW = jnp.clip(position_BW, 0, self.key.shape[1] - 1)
    take = lambda x: jnp.take_along_axis(x, jnp.expand_dims(index_BW, range(2, x.ndim)), axis=1)
    return jax.tree.map(take, self)

  def extended(self, new: Ring, step: Int[Array, "*b"]) -> Ring:
    """The ring with what generated tokens `step` to `step` + T - 1 have.

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
      slot_BT = (step[:, None] + jnp.arange(new.key.shape[1])) % slots
      write = lambda old, new: old.at[row_B1, slot_BT].set(new)
    return jax.tree.map(lambda old, new: write(old, new.astype(old.dtype)), self, new)

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
    return jax.tree.map(lambda old: old.at[row_B1, write_BT].set(old[row_B1, read_BT]), self)


Cache = Ring | DeltaCache | MemoryCache
"""What a block, or a memory before it, needs of earlier tokens."""


def unstacked(variables: Variables) -> Variables:
  """Variables of a decoder with the parameters of each block in arrays of their own.

  Generation computes with this form. The blocks are copied: where memory is short, convert once
  and drop the stacked ones. Converted variables are returned as they are.
  """
  params = variables["params"]
  if "blocks" not in params:
    names = sorted((name for name in params if name.startswith("blocks_")), key=_number)
    rest = {name: tree for name, tree in params.items() if name not in names}
    return {**variables, "params": {**rest, "blocks": tuple(params[name] for name in names)}}
  if isinstance(params["blocks"], tuple):
    return variables
  return {**variables, "params": {**params, "blocks": _split(params["blocks"])}}


def _number(name: str) -> int:
  return int(name.rpartition("_")[2])


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
) -> tuple[Float[Array, "B *T D"], tuple[Cache, ...]]:
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
  if rejected:
    model.check_keys_suffice()
  slots_L = [slots + rejected for slots in _cache_slots(model, capacity)]

  def forward(model, blocks):
    position_T = jnp.arange(tokens.shape[1])
    x_BTD = model.embedded(model.embedding(tokens), position_T)
    # Padding does not make a text longer, on which some angles depend.
    angles = model.angles(jnp.minimum(position_T, length[:, None] - 1))
    caches, memories, of_memories = [], _memories(model), []
    for number, (params, layer) in enumerate(zip(blocks, _layers(model))):
      if number in memories:
        memory = memories[number]
        given = x_BTD, tokens, memory.cache(len(tokens)), None, length
        added_BTD, cache = memory.step(*given)
        x_BTD = x_BTD + added_BTD
        of_memories.append(cache)
      x_BTD, cache = model.block(number).apply(
        {"params": params}, *(x_BTD, layer, angles, length, slots_L[number]), method=_of_prompt
      )
      caches.append(cache)
    caches = *caches, *of_memories
    if all_positions:
      return model.final(x_BTD), caches
    last_BD = jnp.take_along_axis(x_BTD, (length - 1)[:, None, None], axis=1)[:, 0]
    return model.final(last_BD), caches

  return model.apply(variables, variables["params"]["blocks"], method=forward)


def _memories(model):
  """The memories before blocks, by the numbers of these."""
  return dict(zip(model.memory_blocks, model.memories))


def decode(
  model: Transformer,
  variables: Variables,
  caches: tuple[Cache, ...],
  token: Int[Array, "B"],
  length: Int[Array, "B"],
  step: Int[Array, ""],
) -> tuple[Float[Array, "B D"], tuple[Cache, ...]]:
  """Final hidden vectors of generated token number `step`, and the caches with it.

  Args:
    model: the decoder.
    variables: its `unstacked` variables.
    caches: those of the blocks, and then those of memories.
    token: the token of each row.
    length: number of tokens of each prompt.
    step: number of tokens that were generated before this one.
  """
  hidden_BTD, caches = extend(model, variables, caches, token[:, None], length, step)
  return hidden_BTD[:, 0], caches


def extend(
  model: Transformer,
  variables: Variables,
  caches: tuple[Cache, ...],
  tokens: Int[Array, "B T"],
  length: Int[Array, "B"],
  step: Int[Array, "*b"],
  tree: DraftTree | None = None,
) -> tuple[Float[Array, "B T D"], tuple[Cache, ...]]:
  """Final hidden vectors of T generated tokens, and the caches with them.

  Args:
    model: the decoder.
    variables: its `unstacked` variables.
    caches: as of `decode`.
    tokens: the tokens of each row.
    length: number of tokens of each prompt.
    step: number of tokens that were generated before these, for each row, or for all where T = 1.
    tree: the tokens are its nodes: each follows those on the path to it, at the position of its
      depth. `Ring.along` moves a path to its place. None: each follows all before it.

  Raises:
    ValueError: a cache has fewer slots than the tree has nodes.
  """
  ahead_T = jnp.arange(tokens.shape[1]) if tree is None else jnp.asarray(tree.depths)
  if tree is not None and (slots := min(ring.key.shape[1] for ring in caches)) <= tree.size:
    raise ValueError(
      f"`rings` must have slots for the {tree.size + 1} nodes of the tree; got {slots}. Give"
      f" `prefill` rejected={tree.size}."
    )

  def forward(model, blocks):
    position_BT = (length + step)[:, None] + ahead_T
    x_BTD = model.embedded(model.embedding(tokens), position_BT)
    angles, starts, extended = model.angles(position_BT), _block_starts(model, caches), []
    memories, of_memories = _memories(model), list(caches[model.layers :])
    for number, (params, layer) in enumerate(zip(blocks, _layers(model))):
      if number in memories:
        added_BTD, cache = memories[number].step(x_BTD, tokens, of_memories.pop(0))
        x_BTD = x_BTD + added_BTD
        of_memories.append(cache)
      given = x_BTD, layer, angles, starts, caches[number], length, step, tree
      x_BTD, cache = model.block(number).apply({"params": params}, *given, method=_of_tokens)
      extended.append(cache)
    return model.final(x_BTD), (*extended, *of_memories)

  return model.apply(variables, variables["params"]["blocks"], method=forward)


def _block_starts(model: Transformer, caches: tuple[Cache, ...]) -> Angles | None:
  """Angles of the first position of each block of an index; None: there is no index."""
  if model.attention.index is None:
    return None
  slots = max((cache.key.shape[1] for cache in caches if isinstance(cache, Ring)), default=0)
  return model.angles(jnp.arange(0, slots, model.attention.index.ratio))


def _cache_slots(model: Transformer, capacity: int) -> list[int]:
  """Number of positions in the cache of each block."""
  return [min(model.window, capacity) if local else capacity for local in model.is_local()]


def _layers(model: Transformer) -> list[BlockSettings]:
  inputs = model.layer_inputs()
  return [_entry(inputs, layer) for layer in range(model.layers)]


def _of_prompt(
  block: Block, x_BTD: Array, layer: BlockSettings, angles: Angles | None, length: Array, slots: int
) -> tuple[Array, Cache]:
  mix = lambda given: block.mixed(given, layer, angles, tiled=True, count=length)
  x_BTD, kept = block.step(x_BTD, mix, deterministic=True)
  return x_BTD, kept if block.delta is not None else Ring(*kept).of_prompt(length, slots)


def _of_tokens(
  block: Block,
  x_BTD: Array,
  layer: BlockSettings,
  angles: Angles | None,
  starts: Angles | None,
  cache: Cache,
  length: Array,
  step: Array,
  tree: DraftTree | None,
) -> tuple[Array, Cache]:
  if block.delta is not None:
    return block.step(x_BTD, lambda given: block.delta_rule(given, cache), deterministic=True)

  def among(query, key, value, indexed):
    ring = cache.extended(Ring(key, value, None if indexed is None else indexed.key), step)
    if tree is None:
      ahead_T, seen = jnp.arange(x_BTD.shape[1]), None
      key_position = ring.positions(length, step + ahead_T[-1])
    else:
      ahead_T = jnp.asarray(tree.depths)
      key_position, seen = ring.of_tree(length, step, tree)
    position_BT = (length + step)[:, None] + ahead_T
    if indexed is not None and block.attention.index.chooses(ring.key.shape[1]):
      # In the order of positions, of which a ring without a window has all.
      slot_BW = (jnp.arange(ring.key.shape[1]) - length[:, None]) % ring.key.shape[1]
      ordered = jnp.take_along_axis(ring.index, slot_BW[..., None], axis=1)
      of_blocks = block.angles_of(layer, starts)
      seen = block.index.seen(indexed.query, ordered, of_blocks, position_BT)
      found_BW = jnp.minimum(key_position, ring.key.shape[1] - 1)
      seen = jnp.take_along_axis(seen, found_BW[:, None], axis=-1)
    given = query, ring.key, ring.value, position_BT, key_position, layer.window, seen
    return attend(*given, **block.attention_options()), ring

  mix = lambda given: block.attended(given, layer, angles, among)
  return block.step(x_BTD, mix, deterministic=True)
