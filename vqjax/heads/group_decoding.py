"""Decoding by groups, each of which bounds the probability of its tokens."""

from __future__ import annotations

import abc
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.heads.base import Head
from vqjax.ops import group_search, sampling, topk, vocab_parallel


class GroupDecodingHead(Head):
  """A head that decodes without scoring every group of its vocabulary.

  A subclass defines its groups by `groups_and_slots` and `_groups`. Its `_blocks` hold whole groups
  of S positions.
  """

  @abc.abstractmethod
  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""

  @abc.abstractmethod
  def _groups(self, rows: dict, hidden: Float[Array, "*B D"]) -> group_search.Groups:
    """The groups of `rows`: the arrays of `_rows`, of which a device may hold a part."""

  def _prefers_group_search(self, hidden: Float[Array, "*B D"]) -> bool:
    """Whether the best-first search is cheaper than scoring all groups for all rows."""
    del hidden
    return True

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly.

    Groups that cannot hold one of them are not scored.
    """
    return self.top_k_visited(hidden, k)[:2]

  def top_k_visited(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
    """`top_k`, and the number of groups whose slots were scored.

    Equal log-probabilities come in the order of their positions.
    """
    self._check_k(k)
    return self._over_vocabulary(lambda rows, hidden: self._best(rows, hidden, k), hidden)

  def _best(self, rows, hidden, k):
    if not self._prefers_group_search(hidden):
      scores_Bk, token_Bk, log_z_B = sampling.best(self._blocks(rows, hidden), k)
      return scores_Bk - log_z_B[..., None], token_Bk, self._all_groups(hidden)
    groups = self._groups(rows, hidden)
    log_prob_Bk, position_Bk, visited_B = group_search.best_first_top_k(
      groups.log_group, groups.score_groups, k, self._step_width(groups), self.vocab_axis
    )
    return log_prob_Bk, groups.token_at(position_Bk), visited_B

  def _step_width(self, groups):
    rows, count = math.prod(groups.log_group.shape[:-1]), groups.log_group.shape[-1]
    return group_search.step_width(rows, count, self.groups_and_slots()[1])

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
    """Draw a token, by group and slot where possible: see `sample_visited`."""
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
    """The token that `sample` draws, and the number of groups whose slots were scored.

    Without filters a group is drawn first, then its slot. At temperature 1 one group is scored; at
    another temperature or under a mask all groups are, for the mass of each. The `top_k` best, the
    arg max (temperature 0) and the nucleus at temperature 1 come from the best-first search. A mask
    together with a filter, and the nucleus at another temperature, score all groups.
    """
    sampling.check_options(temperature, top_k, top_p)
    allowed = None if allowed is None else jnp.asarray(allowed)
    top_p = None if top_p == 1 else top_p
    greedy = temperature < 1e-6
    if allowed is None and greedy:
      _, tokens, visited = self.top_k_visited(hidden, 1)
      return tokens[..., 0], visited
    if allowed is None and top_k is not None:
      log_prob_Bk, token_Bk, visited = self.top_k_visited(hidden, min(top_k, self.vocab))
      return sampling.draw_among(log_prob_Bk / temperature, token_Bk, key, top_p), visited
    if top_k is None and top_p is None and not greedy:
      return self._drawn_by_group(hidden, key, temperature, allowed)
    if allowed is None and temperature == 1 and self._prefers_group_search(hidden):
      return self._drawn_from_nucleus(hidden, key, top_p)
    tokens = super().sample(hidden, key, temperature, top_k, top_p, allowed)
    return tokens, self._all_groups(hidden)

  def _drawn_from_nucleus(self, hidden, key, top_p):
    def body(rows, hidden, key):
      groups = self._groups(rows, hidden)
      width, slots = self._step_width(groups), self.groups_and_slots()[1]
      most = sampling.STORED_SCORES // max(1, math.prod(hidden.shape[:-1]) * slots)
      steps = max(1, min(group_search.MOST, most) // width)
      position_B, known_B, visited_B = group_search.best_first_nucleus(
        groups.log_group, groups.score_groups, top_p, key, slots, steps, width, self.vocab_axis
      )
      token_B = groups.token_at(position_B)
      everything = lambda: sampling.sample(self._blocks(rows, hidden), key, 1.0, None, top_p)
      token_B = jnp.where(
        known_B, token_B, jax.lax.cond(known_B.all(), lambda: token_B, everything)
      )
      return token_B, jnp.where(known_B, visited_B, self._all_groups(hidden))

    return self._over_vocabulary(body, hidden, key)

  def _drawn_by_group(self, hidden, key, temperature, allowed):
    def body(rows, hidden, key, allowed):
      axis = vocab_parallel.inside(self.vocab_axis)
      if axis:
        key = jax.random.fold_in(vocab_parallel.varying(key, axis), jax.lax.axis_index(axis))
      group_key, slot_key = jax.random.split(key)
      log_mass_BG = self._log_mass(rows, hidden, temperature, allowed)
      noisy_BG = log_mass_BG + sampling.gumbel(group_key, log_mass_BG.shape)
      group_B1 = jnp.argmax(noisy_BG, axis=-1, keepdims=True).astype(jnp.int32)
      groups = self._groups(rows, hidden)
      score_B1S, position_B1S = groups.score_groups(group_B1, jnp.zeros(group_B1.shape))
      score_BS = score_B1S[..., 0, :]
      token_BS = groups.token_at(position_B1S[..., 0, :])
      score_BS = _masked(score_BS / temperature, token_BS, allowed)
      slot_B1 = jnp.argmax(
        score_BS + sampling.gumbel(slot_key, score_BS.shape), axis=-1, keepdims=True
      )
      best_B = noisy_BG.max(axis=-1)
      token_B = jnp.take_along_axis(token_BS, slot_B1, axis=-1)[..., 0]
      return topk.winner(best_B, jnp.where(jnp.isneginf(best_B), -1, token_B), axis)

    tokens = self._over_vocabulary(body, hidden, key, allowed)
    plain = temperature == 1 and allowed is None
    visited = self._all_groups(hidden)
    return tokens, jnp.ones_like(visited) if plain else visited

  def _log_mass(self, rows, hidden, temperature, allowed):
    """Unnormalised log-mass [*B, G] of each group's allowed tokens."""
    if temperature == 1 and allowed is None:
      return self._groups(rows, hidden).log_group
    blocks = sampling.allow(self._blocks(rows, hidden), allowed, self.vocab)
    slots, batch = self.groups_and_slots()[1], blocks.batch

    def mass(index):
      score_RB, _ = blocks.block(index)
      score_WSB = score_RB.reshape(score_RB.shape[0] // slots, slots, *batch) / temperature
      return jax.nn.logsumexp(score_WSB, axis=1)

    mass_CWB = jax.lax.map(mass, blocks.indices)
    return jnp.moveaxis(jax.lax.collapse(mass_CWB, 0, 2), 0, -1)


def _masked(scores, tokens, allowed):
  """-inf for tokens [*B, S] that `allowed`, [V] or [*B, V], does not mark."""
  if allowed is None:
    return scores
  if allowed.ndim == 1:
    return jnp.where(allowed[tokens], scores, -jnp.inf)
  allowed = allowed.reshape(*[1] * (tokens.ndim - allowed.ndim), *allowed.shape)
  return jnp.where(jnp.take_along_axis(allowed, tokens, axis=-1), scores, -jnp.inf)
