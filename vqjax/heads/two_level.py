"""The base class of heads that predict a group, then a slot inside the group."""

# The arrays of a call, for the G groups of S slots that a device holds:
#
#   log_group   [*B, G]       softmax over the groups of all devices
#   context     [*B, ...]     what the slots of all groups share (`_slot_context`)
#   log_slot    [*B, W, S]    of some W groups: softmax over the slots that a group has
#   log p(v) = log_group[group] + log_slot[group, slot]
#
#   log_prob         the token's own group alone (`_slot_log_prob`)
#   top_k, sample    a search of groups, most of which are not scored (`group_decoding`)
#   _scores          blocks of W whole groups, W·S positions, -inf where a group lacks a slot
#   logits           all groups at once, [*B, G, S], gathered into the order of the tokens
#
# Groups are runs of positions. Two tables, if the tokens are not in order already, translate:
#
#   token  --position-->  position  --starts-->  (group, slot)       to score a token
#   (group, slot)  --group_start-->  position  --order-->  token     to name what was scored
#
# On a mesh groups are split, never their slots, and `order` and `position` are whole.

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from vqjax.assign.groups import in_order
from vqjax.assign.text import TextStats
from vqjax.heads.base import Arrays
from vqjax.heads.group_decoding import GroupDecodingHead
from vqjax.ops import group_search, sampling, softmax, vocab_parallel
from vqjax.ops import groups as group_ops
from vqjax.ops.vocab_parallel import Sharded
from vqjax.ops.vocabulary import check_arrays, in_vocabulary, value_of
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["TwoLevelHead"]


class TwoLevelHead(GroupDecodingHead):
  """p(group of the token) · p(its slot in the group).

  A subclass scores slots: `_slot_context`, `_slot_scores` and `_slot_log_prob`. Tokens have
  positions 0 to V - 1, and group g holds the positions starts[g] to starts[g + 1] - 1. Token v has
  position v, or the one that `order_init` gives it. Exact top-k and nuclei score groups in order of
  p(group) and stop where no other group can matter (`vqjax.ops.group_search`).

  Attributes:
    groups: number of equal groups, G; None, without `sizes`: floor(sqrt(V)).
    sizes: number of tokens of each group, which add up to V; not together with `groups`.
    order_init: int [V], the token at each position, or a function (key, shape, dtype) that makes
      it. It is kept as variable `order` of the collection `codes`, with its inverse `position`, and
      never trained. None: the token at position v is v, without a variable.
    use_bias: add a bias to the group scores and to the slot scores.
    group_init: initialiser of the [G, D] group weight.
    bias_init: initialiser of the biases of slots.
    group_bias_init: initialiser of the biases of groups; None: `bias_init`.
  """

  groups: int | None = None
  sizes: tuple[int, ...] | None = None
  order_init: Initializer | None = None
  use_bias: bool = False
  group_init: Initializer = row_init
  bias_init: Initializer = nn.initializers.zeros_init()
  group_bias_init: Initializer | None = dataclasses.field(default=None, kw_only=True)

  def declare(self) -> Declaration:
    """The groups' weight [G, D] and bias [G], and the order of the tokens [V]."""
    groups, v, dtype = len(self._group_sizes()), self.vocab, self.param_dtype
    shape, axes = (groups, self.dim), ("groups", "table_embed")
    declared = {"group_weight": Variable(shape, axes, self.group_init, dtype, pad_value=0)}
    if self.use_bias:
      init = self.group_bias_init or self.bias_init
      declared["group_bias"] = Variable((groups,), ("groups",), init, dtype)
    if self.order_init is not None:
      # Every device reads all of both tables, so that no lookup communicates.
      invert = lambda order, shape, dtype: group_ops.positions(order)
      options = {"dtype": jnp.int32, "collection": "codes"}
      declared["order"] = Variable((v,), ("positions",), self._checked_order, **options)
      declared["position"] = Variable((v,), ("tokens",), invert, **options, source="order")
    return declared

  def _checked_order(self, key, shape, dtype):
    order = self.order_init(key, shape, dtype)
    group_ops.check_order(order, self.vocab)
    return jnp.asarray(order, dtype)

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """Clusters of contexts as groups, their means as rows, and each group's frequency."""
    order = text.order(self._group_sizes(), self.order_init)
    if order is None:
      return {}
    starts, rows = self.starts[:-1], text.contexts(self.dim)
    found = {"order_init": order}
    if rows is not None:
      weight_V = text.counts[order] + 1.0
      sums_GD = np.add.reduceat(rows[order] * weight_V[:, None], starts)
      found["group_init"] = sums_GD / np.add.reduceat(weight_V, starts)[:, None]
    if self.use_bias:
      mass_G = np.add.reduceat(np.exp(text.log_frequencies()[order]), starts)
      found["group_bias_init"] = np.log(mass_G)
    return found

  def _slots(self, rows: Float[np.ndarray, "V ..."], order: Int[np.ndarray, "V"]) -> np.ndarray:
    """What each slot's token has, [G, S, ...]; 0 in the slots that a group lacks."""
    groups, slots = self.groups_and_slots()
    is_there = np.arange(slots) < self._group_sizes()[:, None]
    table = np.zeros((groups, slots, *rows.shape[1:]), np.float32)
    table[is_there] = rows[order]
    return table

  def _is_free(self, name: str) -> bool:
    return super()._is_free(name) or (name == "order_init" and self.order_init is in_order)

  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""
    sizes = self._group_sizes()
    return len(sizes), int(sizes.max())

  def _group_sizes(self):
    return group_ops.checked_sizes(self.vocab, self.groups, self.sizes)

  @property
  def starts(self) -> np.ndarray:
    """First position of each group, and V at the end: int64 [G + 1]."""
    return np.concatenate([[0], np.cumsum(self._group_sizes())])

  @final
  def group_of(self, tokens: Integer[ArrayLike, "*B"]) -> Int[Array, "*B"]:
    """The group of each token; -1 for a token outside [0, V)."""
    check_arrays(tokens=tokens)
    tokens = value_of(tokens)

    def groups(tokens):
      known, token = in_vocabulary(tokens, self.vocab)
      position = token if self.order_init is None else self.array("position")[token]
      group, _ = group_ops.group_and_slot(position, self.starts)
      return jnp.where(known, group, -1)

    return self._computed(groups, tokens, tokens)

  @final
  def log_group(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B G"]:
    """Log-probabilities of the groups in nats."""
    return self._on_devices(self._log_group, hidden, axis=None)

  def _log_group(self, arrays, hidden):
    """Log-probabilities of the groups that this device holds."""
    scores = softmax.linear_scores(hidden, arrays["group_weight"], arrays["group_bias"], self.dtype)
    return softmax.log_softmax(scores, self.vocab_axis)

  def _group_and_slot(self, arrays, token):
    position = token if self.order_init is None else arrays["position"][token]
    return group_ops.group_and_slot(position, self.starts)

  def _logits(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are normalised logits."""
    groups = self._groups(arrays, hidden)
    group_G = jnp.arange(groups.log_group.shape[-1], dtype=jnp.int32)
    log_prob_BGS, _ = groups.score_groups(group_G, groups.log_group)
    group, slot = self._group_and_slot(arrays, jnp.arange(self.vocab, dtype=jnp.int32))
    return log_prob_BGS[..., group, slot]

  def _log_prob(self, arrays, hidden, token, temperature, counted):
    # At another temperature the mass of a group is a sum over its slots: all are scored.
    if temperature != 1:
      return super()._log_prob(arrays, hidden, token, temperature, counted)
    group, slot = self._group_and_slot(arrays, token)
    log_prob_group = softmax.linear_log_prob(
      hidden,
      arrays["group_weight"],
      group,
      arrays["group_bias"],
      mask=counted,
      dtype=self.dtype,
      vocab_axis=self.vocab_axis,
    )
    return log_prob_group + self._slot_log_prob(arrays, hidden, group, slot)

  @abc.abstractmethod
  def _slot_context(self, arrays: Arrays, hidden: Array) -> Array:
    """The part of the slots' scores that all groups share: [*B, ...]."""

  @abc.abstractmethod
  def _slot_scores(self, arrays: Arrays, context: Array, group: Array) -> Array:
    """Scores [*B, W, S] of the slots of some groups, [W] or [*B, W], before any mask."""

  @abc.abstractmethod
  def _slot_log_prob(self, arrays: Arrays, hidden: Array, group: Array, slot: Array) -> Array:
    """Log-probability [*B] of a slot in its group, in nats."""

  def parts(self) -> dict[str, Any]:
    """The variables, and the size and the first position of each group."""
    sizes, axis = self._group_sizes(), self.vocab_axis
    # Groups are split as rows are. A group that pads a device's part has size 0 and a bias of -inf,
    # even where the head itself has no bias.
    bias = vocab_parallel.bias_of_padding(self.array("group_bias"), len(sizes), axis)
    return super().parts() | {
      "group_bias": Sharded(bias, -jnp.inf),
      "group_size": Sharded(jnp.asarray(sizes, jnp.int32), 0),
      "group_start": Sharded(jnp.asarray(self.starts[:-1], jnp.int32), 0),
    }

  def _groups(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> group_search.Groups:
    """The groups that this device holds, as the best-first search takes them."""
    # Both once a call; `score_groups` runs in the steps of a loop and reads them.
    log_group = self._log_group(arrays, hidden)
    context, order = self._slot_context(arrays, hidden), arrays.get("order")

    def score_groups(group, log_group):
      # A softmax in each group needs all slots of the group, which is why groups are not split.
      scores = self._slot_scores(arrays, context, group)
      slot = jnp.arange(scores.shape[-1], dtype=jnp.int32)
      present = slot < arrays["group_size"][group][..., None]
      log_slot = jax.nn.log_softmax(jnp.where(present, scores, -jnp.inf))
      # Masked again: in a group that pads a device's part no slot is present, and log_slot is nan.
      log_prob = jnp.where(present, log_group[..., None] + log_slot, -jnp.inf)
      return log_prob, jnp.where(present, arrays["group_start"][group][..., None] + slot, 0)

    # Positions are a search's result, -1 in its entries without a token.
    def token_at(position):
      if order is None:
        return position
      return jnp.where(position < 0, -1, order[jnp.maximum(position, 0)])

    return group_search.Groups(log_group, score_groups, token_at)

  def _scores(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, in blocks of whole groups."""
    groups, batch = self._groups(arrays, hidden), hidden.shape[:-1]
    (_, slots), count = self.groups_and_slots(), groups.log_group.shape[-1]
    width = max(1, sampling.block_width(math.prod(batch), count * slots) // slots)

    def block(index):
      # The last block may reach beyond the groups: it scores the last one again, with p(group) 0.
      group_W = index * width + jnp.arange(width, dtype=jnp.int32)
      row_W = jnp.minimum(group_W, count - 1)
      log_group_BW = jnp.where(group_W < count, groups.log_group[..., row_W], -jnp.inf)
      log_prob_BWS, position_WS = groups.score_groups(row_W, log_group_BW)
      log_prob_BR = log_prob_BWS.reshape(*batch, width * slots)
      return jnp.moveaxis(log_prob_BR, -1, 0), groups.token_at(position_WS).reshape(-1)

    return sampling.Blocks(-(-count // width), block, batch, vocab_parallel.inside(self.vocab_axis))
