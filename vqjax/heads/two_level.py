"""What is shared by heads that predict a group of the vocabulary first, then a slot inside it?"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.heads.base import Head, row_init
from vqjax.ops import groups as group_ops
from vqjax.ops import ranking, sampling, shards, softmax, visiting
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import ADDED_LATER, Dtype


class Rows(NamedTuple):
  """What each group has: its row of the weight, bias, size, first place, and its slots' arrays.

  And the token at each place, or None where it is the place itself.
  """

  weight: Array
  bias: Array | None
  size: Array
  first: Array
  order: Array | None
  slots: tuple

  def token_at(self, place: Array) -> Array:
    """The tokens at places; -1 stays -1."""
    if self.order is None:
      return place
    return jnp.where(place < 0, -1, self.order[jnp.maximum(place, 0)])


class TwoLevelHead(Head):
  """p(group of the token) · p(its slot in the group).

  A subclass says how slots score: `_slot_rows`, `_shared`, `_slot_scores` and `_slot_log_prob`.
  Tokens lie at places 0 to V - 1, and group g holds places starts[g] to starts[g + 1] - 1: token v
  lies at place v, or where `order_init` puts it. Exact top-k and nuclei visit groups in order of
  p(group) and stop where no other group can matter (`vqjax.ops.visiting`).

  Attributes:
    groups: number of equal groups, G; None, without `sizes`: floor(sqrt(V)).
    sizes: number of tokens of each group, which add up to V; not together with `groups`.
    order_init: (key, shape, dtype) -> int [V], the token at each place; kept as variable `order` of
      the collection `codes`, with its inverse `place`: never trained. None: no variable.
    use_bias: add a bias to the group scores and to the slot scores.
    group_init: initialiser of the [G, D] group weight.
    bias_init: initialiser of the biases.
    dtype: dtype of the matrix products' operands; None: that of hidden and weights together.
    param_dtype: dtype of the parameters.
  """

  groups: int | None = None
  sizes: tuple[int, ...] | None = dataclasses.field(default=None, metadata=ADDED_LATER)
  order_init: nn.initializers.Initializer | None = dataclasses.field(
    default=None, metadata=ADDED_LATER
  )
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
      self.place = self.variable("codes", "place", lambda: group_ops.places(self.order.value))
      if self.order.value.shape != (self.vocab,):
        group_ops.check_order(self.order.value, self.vocab)

  def _new(self, name, init, *shape):
    return self.param(name, init, shape, self.param_dtype)

  def _initial_order(self):
    order = self.order_init(self.make_rng("params"), (self.vocab,), jnp.int32)
    # Under jit there is nothing to look at yet.
    if not isinstance(order, jax.core.Tracer):
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
    """First place of each group, and V at the end: int64 [G + 1]."""
    return np.concatenate([[0], np.cumsum(self._group_sizes())])

  def _place_of(self, tokens):
    return tokens if self.order_init is None else jnp.asarray(self.place.value)[tokens]

  def group_of(self, tokens: Integer[Array, "*B"]) -> Int[Array, "*B"]:
    """The group of each token; -1 for a token outside [0, V)."""
    known, token = in_vocabulary(tokens, self.vocab)
    group, _ = group_ops.group_and_slot(self._place_of(token), self.starts)
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
    rows = _split(tuple(part.rows for part in self._rows()))
    log_group_BG = self.log_group(hidden)
    number = jnp.arange(log_group_BG.shape[-1], dtype=jnp.int32)
    log_prob_BGS, _ = self._tokens_of(rows, hidden)(number, log_group_BG)
    places = self._place_of(jnp.arange(self.vocab, dtype=jnp.int32))
    group, slot = group_ops.group_and_slot(places, self.starts)
    return log_prob_BGS[..., group, slot]

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; only each token's own group is scored."""
    self._check_hidden(hidden)
    known, token = in_vocabulary(tokens, self.vocab)
    group, slot = group_ops.group_and_slot(self._place_of(token), self.starts)

    def body(rows, hidden, group, slot):
      rows = _split(rows)
      log_prob_group = softmax.linear_log_prob(
        hidden, rows.weight, group, rows.bias, dtype=self.dtype, vocab_axis=self.vocab_axis
      )
      return log_prob_group + self._slot_log_prob(rows, hidden, group, slot)

    return jnp.where(known, self._over_vocabulary(body, hidden, group, slot), jnp.nan)

  def _slot_rows(self) -> tuple[shards.Padded | shards.Whole, ...]:
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

  def _rows(self) -> tuple[shards.Padded | shards.Whole, ...]:
    sizes, axis = self._group_sizes(), self.vocab_axis
    return (
      shards.Padded(self.group_weight, 0),
      shards.Padded(shards.bias_of_padding(self.group_bias, len(sizes), axis), -jnp.inf),
      shards.Padded(jnp.asarray(sizes, jnp.int32), 0),
      shards.Padded(jnp.asarray(self.starts[:-1], jnp.int32), 0),
      # Inside `nn.scan` the variable may be the NumPy array it was made from.
      shards.Whole(None if self.order_init is None else jnp.asarray(self.order.value)),
      *self._slot_rows(),
    )

  def _tokens_of(self, rows: Rows, hidden: Array) -> visiting.OfGroups:
    """Log-probabilities and places of the tokens of some groups, given those of the groups."""
    shared = self._shared(rows.slots, hidden)

    def of_groups(group, log_group):
      scores = self._slot_scores(rows.slots, shared, group)
      slot = jnp.arange(scores.shape[-1], dtype=jnp.int32)
      present = slot < rows.size[group][..., None]
      log_slot = jax.nn.log_softmax(jnp.where(present, scores, -jnp.inf))
      # Of a group that fills up a device's part every slot is absent, and the softmax is nan.
      log_prob = jnp.where(present, log_group[..., None] + log_slot, -jnp.inf)
      return log_prob, jnp.where(present, rows.first[group][..., None] + slot, 0)

    return of_groups

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, some whole groups at a time."""
    rows = _split(rows)
    log_group_BG = self._log_group(rows.weight, rows.bias, hidden)
    of_groups, batch = self._tokens_of(rows, hidden), hidden.shape[:-1]
    slots, groups = self.groups_and_slots()[1], rows.weight.shape[0]
    width = max(1, sampling.block_width(math.prod(batch), groups * slots) // slots)

    def block(index):
      group_W = index * width + jnp.arange(width, dtype=jnp.int32)
      row_W = jnp.minimum(group_W, groups - 1)
      log_group_BW = jnp.where(group_W < groups, log_group_BG[..., row_W], -jnp.inf)
      log_prob_BWS, place_WS = of_groups(row_W, log_group_BW)
      return log_prob_BWS.reshape(*batch, -1), rows.token_at(place_WS).reshape(-1)

    return sampling.Blocks(-(-groups // width), block, batch, shards.inside(self.vocab_axis))

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """As `Head.top_k`, without scoring groups that cannot matter."""
    return self.top_k_visited(hidden, k)[:2]

  def top_k_visited(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
    """Log-probabilities and tokens of the k most likely tokens, and how many groups it took.

    Equal log-probabilities come in the order of their places.
    """
    if not 1 <= k <= self.vocab:
      raise ValueError(f"k {k} for a vocabulary of {self.vocab} tokens; give 1 to {self.vocab}")
    return self._over_vocabulary(lambda rows, hidden: self._best(rows, hidden, k), hidden)

  def _best(self, rows, hidden, k):
    if not self._is_worth_visiting(hidden):
      scores_Bk, token_Bk, log_z_B = sampling.best(self._blocks(rows, hidden), k)
      return scores_Bk - log_z_B[..., None], token_Bk, self._all_groups(hidden)
    rows = _split(rows)
    log_group_BG, of_groups, width = self._to_visit(rows, hidden)
    log_prob_Bk, place_Bk, visited_B = visiting.best_visited(
      log_group_BG, of_groups, k, width, self.vocab_axis
    )
    return log_prob_Bk, rows.token_at(place_Bk), visited_B

  def _is_worth_visiting(self, hidden) -> bool:
    """Whether scoring the groups of each row apart is cheaper than all groups for all rows."""
    del hidden
    return True

  def _to_visit(self, rows, hidden):
    log_group_BG = self._log_group(rows.weight, rows.bias, hidden)
    slots = self.groups_and_slots()[1]
    width = visiting.step_width(math.prod(hidden.shape[:-1]), rows.weight.shape[0], slots)
    return log_group_BG, self._tokens_of(rows, hidden), width

  def _all_groups(self, hidden):
    return jnp.full(hidden.shape[:-1], self.groups_and_slots()[0], jnp.int32)

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """As `Head.sample`, by group and slot where it can be: see `sample_visited`."""
    return self.sample_visited(hidden, key, temperature, top_k, top_p, allowed)[0]

  def sample_visited(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """A token as `sample` draws it, and how many groups had their slots scored for it.

    Without filters a group is drawn first, then its slot: one group at temperature 1, and at
    another temperature or under a mask all of them once, for the mass of each. The `top_k` best,
    the arg max (temperature 0) and the nucleus at temperature 1 are found by visiting. A mask
    together with a filter, and the nucleus at another temperature, score everything.
    """
    sampling.check_options(temperature, top_k, top_p)
    allowed = None if allowed is None else jnp.asarray(allowed)
    top_p = None if top_p == 1 else top_p
    greedy = temperature < 1e-6
    if allowed is None and greedy:
      _, tokens, visited = self.top_k_visited(hidden, 1)
      return tokens[..., 0], visited
    if allowed is None and top_k is not None:
      return self._drawn_from_best(hidden, key, temperature, top_k, top_p)
    if top_k is None and top_p is None and not greedy:
      return self._drawn_by_group(hidden, key, temperature, allowed)
    if allowed is None and temperature == 1 and self._is_worth_visiting(hidden):
      return self._drawn_from_nucleus(hidden, key, top_p)
    tokens = super().sample(hidden, key, temperature, top_k, top_p, allowed)
    return tokens, self._all_groups(hidden)

  def _drawn_from_best(self, hidden, key, temperature, top_k, top_p):
    log_prob_Bk, token_Bk, visited_B = self.top_k_visited(hidden, min(top_k, self.vocab))
    return sampling.draw_among(log_prob_Bk / temperature, token_Bk, key, top_p), visited_B

  def _drawn_from_nucleus(self, hidden, key, top_p):
    def body(arrays, hidden, key):
      rows = _split(arrays)
      log_group_BG, of_groups, width = self._to_visit(rows, hidden)
      slots, count = self.groups_and_slots()[1], math.prod(hidden.shape[:-1])
      most = min(visiting.MOST, sampling.STORED_SCORES // max(1, count * slots))
      steps = max(1, most // width)
      found = visiting.nucleus_visited(
        log_group_BG, of_groups, top_p, key, slots, steps, width, self.vocab_axis
      )
      token_B = rows.token_at(found.place)
      everything = lambda: sampling.sample(self._blocks(arrays, hidden), key, 1.0, None, top_p)
      rest_B = jax.lax.cond(found.found.all(), lambda: token_B, everything)
      token_B = jnp.where(found.found, token_B, rest_B)
      return token_B, jnp.where(found.found, found.visited, self._all_groups(hidden))

    return self._over_vocabulary(body, hidden, key)

  def _drawn_by_group(self, hidden, key, temperature, allowed):
    def body(arrays, hidden, key, allowed):
      rows = _split(arrays)
      axis = shards.inside(self.vocab_axis)
      if axis:
        key = jax.random.fold_in(shards.varying(key, axis), jax.lax.axis_index(axis))
      group_key, slot_key = jax.random.split(key)
      log_mass_BG = self._log_mass(arrays, hidden, temperature, allowed)
      noisy_BG = log_mass_BG + sampling.gumbel(group_key, log_mass_BG.shape)
      group_B1 = jnp.argmax(noisy_BG, axis=-1, keepdims=True).astype(jnp.int32)
      of_groups = self._tokens_of(rows, hidden)
      score_BS, place_BS = (x[..., 0, :] for x in of_groups(group_B1, jnp.zeros(group_B1.shape)))
      token_BS = rows.token_at(place_BS)
      score_BS = _masked(score_BS / temperature, token_BS, allowed)
      slot_B1 = jnp.argmax(
        score_BS + sampling.gumbel(slot_key, score_BS.shape), axis=-1, keepdims=True
      )
      best_B = noisy_BG.max(axis=-1)
      token_B = jnp.take_along_axis(token_BS, slot_B1, axis=-1)[..., 0]
      return ranking.winner(best_B, jnp.where(jnp.isneginf(best_B), -1, token_B), axis)

    tokens = self._over_vocabulary(body, hidden, key, allowed)
    plain = temperature == 1 and allowed is None
    visited = self._all_groups(hidden)
    return tokens, jnp.ones_like(visited) if plain else visited

  def _log_mass(self, rows, hidden, temperature, allowed):
    """Log-mass [*B, G] of what is allowed of each group, at a temperature, not normalised."""
    if temperature == 1 and allowed is None:
      return self._log_group(*_split(rows)[:2], hidden)
    blocks = sampling.allow(self._blocks(rows, hidden), allowed, self.vocab)
    groups, slots, batch = rows[0].shape[0], self.groups_and_slots()[1], blocks.batch

    def mass(index):
      score_BW, _ = blocks.block(index)
      score_BWS = score_BW.reshape(*batch, score_BW.shape[-1] // slots, slots) / temperature
      return jax.nn.logsumexp(score_BWS, axis=-1)

    mass_CBW = jax.lax.map(mass, blocks.indices)
    width = mass_CBW.shape[-1]
    return jnp.moveaxis(mass_CBW, 0, -2).reshape(*batch, blocks.count * width)[..., :groups]

  def _axes_of_order(self) -> dict:
    """Every device reads all of it, so that no look-up travels."""
    return (
      {} if self.order_init is None else {"codes": {"order": ("places",), "place": ("tokens",)}}
    )

  def _bytes_of_order(self) -> int:
    return 0 if self.order_init is None else 2 * 4 * self.vocab


def _split(rows: tuple) -> Rows:
  return Rows(*rows[:5], rows[5:])


def _masked(scores, tokens, allowed):
  """-inf for tokens [*B, S] that `allowed`, [V] or [*B, V], does not mark."""
  if allowed is None:
    return scores
  if allowed.ndim == 1:
    return jnp.where(allowed[tokens], scores, -jnp.inf)
  allowed = allowed.reshape(*[1] * (tokens.ndim - allowed.ndim), *allowed.shape)
  return jnp.where(jnp.take_along_axis(allowed, tokens, axis=-1), scores, -jnp.inf)
