"""What does a head do whose tokens come in groups that bound how likely they are?"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.heads.base import Head
from vqjax.ops import group_search, sampling, topk, vocab_parallel


class VisitedHead(Head):
  """A head that finds the best tokens, and draws, without scoring every group of its vocabulary.

  A subclass says what its groups are: `groups_and_slots` and `_groups`; and `_blocks`, for what
  needs all of them, in whole groups of S positions.
  """

  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""
    raise TypeError(f"{type(self).__name__} has no groups: define groups_and_slots")

  def _groups(self, rows: tuple, hidden: Float[Array, "*B D"]) -> group_search.Groups:
    """The groups of `rows`, which are those of `_rows` or one device's part of them."""
    raise TypeError(f"{type(self).__name__} has no groups: define _groups")

  def _is_worth_visiting(self, hidden: Float[Array, "*B D"]) -> bool:
    """Whether scoring the groups of each row apart is cheaper than all groups for all rows."""
    del hidden
    return True

  def top_k(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """As `Head.top_k`, without scoring groups that cannot matter."""
    return self.top_k_visited(hidden, k)[:2]

  def top_k_visited(
    self, hidden: Float[Array, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
    """Log-probabilities and tokens of the k most likely tokens, and how many groups it took.

    Equal log-probabilities come in the order of their positions.
    """
    if not 1 <= k <= self.vocab:
      raise ValueError(f"k {k} for a vocabulary of {self.vocab} tokens; give 1 to {self.vocab}")
    return self._over_vocabulary(lambda rows, hidden: self._best(rows, hidden, k), hidden)

  def _best(self, rows, hidden, k):
    if not self._is_worth_visiting(hidden):
      scores_Bk, token_Bk, log_z_B = sampling.best(self._blocks(rows, hidden), k)
      return scores_Bk - log_z_B[..., None], token_Bk, self._all_groups(hidden)
    found = self._groups(rows, hidden)
    log_prob_Bk, position_Bk, visited_B = group_search.best_first_top_k(
      found.log_group, found.score_groups, k, self._width(found), self.vocab_axis
    )
    return log_prob_Bk, found.token_at(position_Bk), visited_B

  def _width(self, found):
    rows, groups = math.prod(found.log_group.shape[:-1]), found.log_group.shape[-1]
    return group_search.step_width(rows, groups, self.groups_and_slots()[1])

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
    def body(rows, hidden, key):
      groups = self._groups(rows, hidden)
      width, slots = self._width(groups), self.groups_and_slots()[1]
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
      found = self._groups(rows, hidden)
      scored = found.score_groups(group_B1, jnp.zeros(group_B1.shape))
      score_BS, position_BS = (x[..., 0, :] for x in scored)
      token_BS = found.token_at(position_BS)
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
    """Log-mass [*B, G] of what is allowed of each group, at a temperature, not normalised."""
    if temperature == 1 and allowed is None:
      return self._groups(rows, hidden).log_group
    blocks = sampling.allow(self._blocks(rows, hidden), allowed, self.vocab)
    slots, batch = self.groups_and_slots()[1], blocks.batch

    def mass(index):
      score_BW, _ = blocks.block(index)
      score_BWS = score_BW.reshape(*batch, score_BW.shape[-1] // slots, slots) / temperature
      return jax.nn.logsumexp(score_BWS, axis=-1)

    mass_CBW = jax.lax.map(mass, blocks.indices)
    width = mass_CBW.shape[-1]
    return jnp.moveaxis(mass_CBW, 0, -2).reshape(*batch, blocks.count * width)


def _masked(scores, tokens, allowed):
  """-inf for tokens [*B, S] that `allowed`, [V] or [*B, V], does not mark."""
  if allowed is None:
    return scores
  if allowed.ndim == 1:
    return jnp.where(allowed[tokens], scores, -jnp.inf)
  allowed = allowed.reshape(*[1] * (tokens.ndim - allowed.ndim), *allowed.shape)
  return jnp.where(jnp.take_along_axis(allowed, tokens, axis=-1), scores, -jnp.inf)
