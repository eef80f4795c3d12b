"""What is shared by heads that predict a group of the vocabulary first, then a slot inside it?"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.heads.base import row_init
from vqjax.heads.group_decoding import VisitedHead
from vqjax.ops import group_search, sampling, softmax, vocab_parallel
from vqjax.ops import groups as group_ops
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype


class Rows(NamedTuple):
  """What each group has: its row of the weight, bias, size, first position, and its slots' arrays.

  And the token at each position, or None where it is the position itself.
  """

  weight: Array
  bias: Array | None
  size: Array
  first: Array
  order: Array | None
  slots: tuple

  def token_at(self, position: Array) -> Array:
    """The tokens at positions; -1 stays -1."""
    if self.order is None:
      return position
    return jnp.where(position < 0, -1, self.order[jnp.maximum(position, 0)])


class TwoLevelHead(VisitedHead):
  """p(group of the token) · p(its slot in the group).

  A subclass says how slots score: `_slot_rows`, `_shared`, `_slot_scores` and `_slot_log_prob`.
  Tokens lie at positions 0 to V - 1, and group g holds positions starts[g] to starts[g + 1] - 1: token v
  lies at position v, or where `order_init` puts it. Exact top-k and nuclei visit groups in order of
  p(group) and stop where no other group can matter (`vqjax.ops.group_search`).

  Attributes:
    groups: number of equal groups, G; None, without `sizes`: floor(sqrt(V)).
    sizes: number of tokens of each group, which add up to V; not together with `groups`.
    order_init: (key, shape, dtype) -> int [V], the token at each position; kept as variable `order` of
      the collection `codes`, with its inverse `position`: never trained. None: no variable.
    use_bias: add a bias to the group scores and to the slot scores.
    group_init: initialiser of the [G, D] group weight.
    bias_init: initialiser of the biases.
    dtype: dtype of the matrix products' operands; None: that of hidden and weights together.
    param_dtype: dtype of the parameters.
  """

  groups: int | None = None
  sizes: tuple[int, ...] | None = None
  order_init: nn.initializers.Initializer | None = None
  use_bias: bool = False
  group_init: nn.initializers.Initializer = row_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    groups, _ = self.groups_and_slots()
    self.group_weight = self._new("group_weight", self.group_init, groups, self.dim)
    self.group_bias = self._new("group_bias", self.bias_init, groups) if self.use_bias else None
    if self.order_init is not None:
      self.order = self.variable("codes", "order", self._initial_order)
      self.position = self.variable(
        "codes", "position", lambda: group_ops.positions(self.order.value)
      )
      if self.order.value.shape != (self.vocab,):
        group_ops.check_order(self.order.value, self.vocab)

  def _new(self, name, init, *shape):
    return self.param(name, init, shape, self.param_dtype)

  def _initial_order(self):
    order = self.order_init(self.make_rng("params"), (self.vocab,), jnp.int32)
    group_ops.check_order(order, self.vocab)
    return jnp.asarray(order, jnp.int32)

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

  def _position_of(self, tokens):
    return tokens if self.order_init is None else jnp.asarray(self.position.value)[tokens]

  def group_of(self, tokens: Integer[Array, "*B"]) -> Int[Array, "*B"]:
    """The group of each token; -1 for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    group, _ = group_ops.group_and_slot(self._position_of(token), self.starts)
    return jnp.where(known, group, -1)

  def log_group(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B G"]:
    """Log-probabilities of the groups in nats."""
    return self._log_group(self.group_weight, self.group_bias, hidden)

  def _log_group(self, weight, bias, hidden):
    """Log-probabilities of the groups that are here."""
    self._check_hidden(hidden)
    scores = softmax.linear_scores(hidden, weight, bias, self.dtype)
    return softmax.log_softmax(scores, self.vocab_axis)

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are logits that need no normaliser."""
    found = self._groups(tuple(part.rows for part in self._rows()), hidden)
    number = jnp.arange(found.log_group.shape[-1], dtype=jnp.int32)
    log_prob_BGS, _ = found.score_groups(number, found.log_group)
    positions = self._position_of(jnp.arange(self.vocab, dtype=jnp.int32))
    group, slot = group_ops.group_and_slot(positions, self.starts)
    return log_prob_BGS[..., group, slot]

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; only each token's own group is scored."""
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)
    group, slot = group_ops.group_and_slot(self._position_of(token), self.starts)

    def body(rows, hidden, group, slot):
      rows = _split(rows)
      log_prob_group = softmax.linear_log_prob(
        hidden, rows.weight, group, rows.bias, dtype=self.dtype, vocab_axis=self.vocab_axis
      )
      return log_prob_group + self._slot_log_prob(rows, hidden, group, slot)

    return jnp.where(known, self._over_vocabulary(body, hidden, group, slot), jnp.nan)

  def _slot_rows(self) -> tuple[vocab_parallel.Sharded | vocab_parallel.Replicated, ...]:
    """The arrays that each group has for its slots, and those that all groups share."""
    raise TypeError(f"{type(self).__name__} has no slots: define _slot_rows")

  def _shared(self, slots: tuple, hidden: Array) -> Array:
    """What the scores of the slots of all groups have in common: [*B, ...]."""
    raise TypeError(f"{type(self).__name__} does not score slots: define _shared")

  def _slot_scores(self, slots: tuple, shared: Array, group: Array) -> Array:
    """Scores [*B, W, S] of the slots of some groups, [W] or [*B, W], masked or not."""
    raise TypeError(f"{type(self).__name__} does not score slots: define _slot_scores")

  def _slot_log_prob(self, rows: Rows, hidden: Array, group: Array, slot: Array) -> Array:
    """Log-probability [*B] of the slot in its group, in nats."""
    raise TypeError(f"{type(self).__name__} does not score slots: define _slot_log_prob")

  def _rows(self) -> tuple[vocab_parallel.Sharded | vocab_parallel.Replicated, ...]:
    sizes, axis = self._group_sizes(), self.vocab_axis
    return (
      vocab_parallel.Sharded(self.group_weight, 0),
      vocab_parallel.Sharded(
        vocab_parallel.bias_of_padding(self.group_bias, len(sizes), axis), -jnp.inf
      ),
      vocab_parallel.Sharded(jnp.asarray(sizes, jnp.int32), 0),
      vocab_parallel.Sharded(jnp.asarray(self.starts[:-1], jnp.int32), 0),
      # Inside `nn.scan` the variable may be the NumPy array it was made from.
      vocab_parallel.Replicated(None if self.order_init is None else jnp.asarray(self.order.value)),
      *self._slot_rows(),
    )

  def _groups(self, arrays: tuple, hidden: Float[Array, "*B D"]) -> group_search.Groups:
    """The groups that are here, to be visited."""
    rows = _split(arrays)
    log_group = self._log_group(rows.weight, rows.bias, hidden)
    shared = self._shared(rows.slots, hidden)

    def score_groups(group, log_group):
      scores = self._slot_scores(rows.slots, shared, group)
      slot = jnp.arange(scores.shape[-1], dtype=jnp.int32)
      present = slot < rows.size[group][..., None]
      log_slot = jax.nn.log_softmax(jnp.where(present, scores, -jnp.inf))
      # Of a group that fills up a device's part every slot is absent, and the softmax is nan.
      log_prob = jnp.where(present, log_group[..., None] + log_slot, -jnp.inf)
      return log_prob, jnp.where(present, rows.first[group][..., None] + slot, 0)

    return group_search.Groups(log_group, score_groups, rows.token_at)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, some whole groups at a time."""
    found, batch = self._groups(rows, hidden), hidden.shape[:-1]
    slots, groups = self.groups_and_slots()[1], found.log_group.shape[-1]
    width = max(1, sampling.block_width(math.prod(batch), groups * slots) // slots)

    def block(index):
      group_W = index * width + jnp.arange(width, dtype=jnp.int32)
      row_W = jnp.minimum(group_W, groups - 1)
      log_group_BW = jnp.where(group_W < groups, found.log_group[..., row_W], -jnp.inf)
      log_prob_BWS, position_WS = found.score_groups(row_W, log_group_BW)
      return log_prob_BWS.reshape(*batch, width * slots), found.token_at(position_WS).reshape(-1)

    return sampling.Blocks(
      -(-groups // width), block, batch, vocab_parallel.inside(self.vocab_axis)
    )

  def _axes_of_order(self) -> dict:
    """Every device reads all of it, so that no look-up travels."""
    return (
      {}
      if self.order_init is None
      else {"codes": {"order": ("positions",), "position": ("tokens",)}}
    )

  def _bytes_of_order(self) -> int:
    return 0 if self.order_init is None else 2 * 4 * self.vocab


def _split(rows: tuple) -> Rows:
  return Rows(*rows[:5], rows[5:])
