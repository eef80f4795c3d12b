"""Decoding by groups, each of which bounds the probability of its tokens."""

# Which groups a call scores, of a head with p(group) · p(slot | group):
#
#   top_k, arg max, sample with top_k   those that may hold one of the k best   best_first_top_k
#   top_p at temperature 1              those of the nucleus, up to `MOST`,     best_first_nucleus
#                                       and all where these do not hold it
#   no filter at temperature 1          the one that was drawn by p(group)      _draw_group_first
#   no filter, a mask or T not 1        all, for their masses, and one again    _draw_group_first
#   a filter or arg max under a mask    all                                     Head._sample
#   top_p at another temperature        all                                     Head._sample
#
# A search scores groups of each row's own, in steps of `_step_width`. Where that costs more than a
# pass over all groups for all rows, `_prefers_group_search` is False, and searches become passes.
# The number of scored groups is a result, so that its mean can be reported.

from __future__ import annotations

import abc
import math
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from vqjax.heads.base import Arrays, Head
from vqjax.ops import device, group_search, sampling, topk, vocab_parallel
from vqjax.ops.sampling import SamplingOptions

__all__ = []


class GroupDecodingHead(Head):
  """A head that decodes without scoring every group of its vocabulary.

  A subclass defines its groups by `groups_and_slots` and `_groups`. Its `_scores` hold whole groups
  of S positions.
  """

  @abc.abstractmethod
  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""

  @abc.abstractmethod
  def _groups(self, arrays: Arrays, hidden: Float[Array, "*B D"]) -> group_search.Groups:
    """The groups that this device holds."""

  def _prefers_group_search(self, hidden: Float[Array, "*B D"]) -> bool:
    """Whether the best-first search is cheaper than scoring all groups for all rows."""
    del hidden
    return True

  @final
  def top_k_visited(
    self, hidden: Float[ArrayLike, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
    """`top_k`, and the number of groups whose slots were scored.

    Groups that cannot hold one of the k best tokens are not scored. Equal log-probabilities come in
    the order of their positions.
    """
    self._check_k(k)
    return self._on_devices(lambda arrays, hidden: self._best(arrays, hidden, k), hidden)

  @final
  def sample_visited(
    self,
    hidden: Float[ArrayLike, "*B D"],
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
    options = SamplingOptions(temperature, top_k, top_p)

    def body(arrays, hidden, key, allowed):
      return self._draw(arrays, hidden, key, options, allowed)

    return self._drawn(body, hidden, key, allowed)

  def _top_k(self, arrays, hidden, k):
    log_probs, tokens, _ = self._best(arrays, hidden, k)
    return log_probs, tokens

  def _sample(self, arrays, hidden, key, options, allowed):
    tokens, _ = self._draw(arrays, hidden, key, options, allowed)
    return tokens

  def _best(self, arrays, hidden, k):
    """Log-probabilities and tokens of the k best, and the number of scored groups."""
    if not self._prefers_group_search(hidden):
      return *super()._top_k(arrays, hidden, k), self._all_groups(hidden)
    groups = self._groups(arrays, hidden)
    log_prob_Bk, position_Bk, visited_B = group_search.best_first_top_k(
      groups.log_group, groups.score_groups, k, self._step_width(groups), self.vocab_axis
    )
    return log_prob_Bk, groups.token_at(position_Bk), visited_B

  def _step_width(self, groups):
    *batch, count = groups.log_group.shape
    _, slots = self.groups_and_slots()
    return group_search.step_width(math.prod(batch), count, slots)

  def _all_groups(self, hidden):
    groups, _ = self.groups_and_slots()
    return jnp.full(hidden.shape[:-1], groups, jnp.int32)

  def _draw(self, arrays, hidden, key, options, allowed):
    """A token for each vector, and the number of groups that were scored."""
    if allowed is None and options.kept is not None:
      k = min(options.kept, self.vocab)
      log_prob_Bk, token_Bk, visited = self._best(arrays, hidden, k)
      return sampling.draw_of_best(log_prob_Bk, token_Bk, key, options), visited
    if options.is_plain:
      return self._draw_group_first(arrays, hidden, key, options.temperature, allowed)
    # A nucleus is left, or a filter under a mask.
    if allowed is None and options.temperature == 1 and self._prefers_group_search(hidden):
      return self._draw_from_nucleus(arrays, hidden, key, options)
    tokens = super()._sample(arrays, hidden, key, options, allowed)
    return tokens, self._all_groups(hidden)

  def _draw_from_nucleus(self, arrays, hidden, key, options):
    groups = self._groups(arrays, hidden)
    width, (_, slots) = self._step_width(groups), self.groups_and_slots()
    # The search stores the scores of its groups, for the draw.
    most = device.current().stored // max(1, math.prod(hidden.shape[:-1]) * slots)
    steps = max(1, min(group_search.MOST, most) // width)
    top_p, axis = options.top_p, self.vocab_axis
    position_B, known_B, visited_B = group_search.best_first_nucleus(
      groups.log_group, groups.score_groups, top_p, key, slots, steps, width, axis
    )
    token_B = groups.token_at(position_B)
    # One branch for the batch: a row that the search has settled keeps its token all the same.
    everything = lambda: sampling.sample(self._scores(arrays, hidden), key, options)
    token_B = jnp.where(known_B, token_B, jax.lax.cond(known_B.all(), lambda: token_B, everything))
    return token_B, jnp.where(known_B, visited_B, self._all_groups(hidden))

  def _draw_group_first(self, arrays, hidden, key, temperature, allowed):
    axis = vocab_parallel.inside(self.vocab_axis)
    # Each device draws among its own groups, with noise of its own; `winner` takes the highest. The
    # Gumbel maximum over all groups is the maximum of those of the devices.
    if axis:
      key = jax.random.fold_in(vocab_parallel.varying(key, axis), jax.lax.axis_index(axis))
    group_key, slot_key = jax.random.split(key)
    log_mass_BG = self._log_mass(arrays, hidden, temperature, allowed)
    noisy_BG = log_mass_BG + sampling.gumbel(group_key, log_mass_BG.shape)
    group_B1 = jnp.argmax(noisy_BG, axis=-1, keepdims=True).astype(jnp.int32)
    groups = self._groups(arrays, hidden)
    # With log p(group) = 0 the scores are log p(slot | group).
    score_B1S, position_B1S = groups.score_groups(group_B1, jnp.zeros(group_B1.shape))
    token_BS = groups.token_at(position_B1S[..., 0, :])
    score_BS = _masked(score_B1S[..., 0, :] / temperature, token_BS, allowed)
    noisy_BS = score_BS + sampling.gumbel(slot_key, score_BS.shape)
    slot_B1 = jnp.argmax(noisy_BS, axis=-1, keepdims=True)
    best_B = noisy_BG.max(axis=-1)
    token_B = jnp.take_along_axis(token_BS, slot_B1, axis=-1)[..., 0]
    token_B = topk.winner(best_B, jnp.where(jnp.isneginf(best_B), -1, token_B), axis)
    visited_B = self._all_groups(hidden)
    is_one = temperature == 1 and allowed is None
    return token_B, jnp.ones_like(visited_B) if is_one else visited_B

  def _log_mass(self, arrays, hidden, temperature, allowed):
    """Unnormalised log-mass [*B, G] of each group's allowed tokens."""
    if temperature == 1 and allowed is None:
      return self._groups(arrays, hidden).log_group
    blocks = sampling.allow(self._scores(arrays, hidden), allowed, self.vocab)
    (_, slots), batch = self.groups_and_slots(), blocks.batch

    def mass(index):
      score_RB, _ = blocks.block(index)
      score_WSB = score_RB.reshape(score_RB.shape[0] // slots, slots, *batch) / temperature
      return jax.nn.logsumexp(score_WSB, axis=1)

    # A block is whole groups, so that each mass is a sum inside of a block.
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
