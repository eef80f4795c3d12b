"""Exact top-k and nuclei by best-first search over groups of the vocabulary.

A token is at most as likely as its group, p(v) <= p(group of v). Groups are scored in order of
descending probability, a step of some groups at a time, until no remaining group can change the
result. Where each device of a mesh axis has its own groups, each searches those.
"""

# The search, in steps of W groups of falling probability:
#
#   groups   | .31 .22 .10 | .08 .08 .05 | .03 .02 ... |
#            step 0        step 1        step 2           stops before a step whose first group is
#   best k     of step 0     merged        merged         less likely than the k-th token so far
#
# Ties are kept as a sort of all tokens would have them: a group as likely as the k-th token is
# scored, and merges order equal scores by position.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import sampling, topk, vocab_parallel
from vqjax.types import MeshAxes

__all__ = []

# Groups of a row that one step scores.
WIDTH = 32

# Groups of a row among which a nucleus is searched before everything is scored.
MOST = 64

# (groups, their log-probabilities) -> (log-probabilities, positions) [*B, W, S] of their tokens.
#
# Slots without a token, and all slots of a group of log-probability -inf, score -inf.
_ScoreGroups = Callable[[Int[Array, "*B W"], Float[Array, "*B W"]], tuple[Array, Array]]


class Groups(NamedTuple):
  """The groups of this device, for a search.

  Attributes:
    log_group: log-probabilities of the groups.
    score_groups: the function that scores the tokens of some groups.
    token_at: positions of any shape -> tokens; -1 stays -1.
  """

  log_group: Float[Array, "*B G"]
  score_groups: _ScoreGroups
  token_at: Callable[[Array], Array]


class _SearchOrder(NamedTuple):
  """Groups by descending probability, in C steps of W groups.

  Attributes:
    group: [C, *B, W], groups of each step.
    log_group: [C, *B, W], their log-probabilities; -inf for the padding of the last step.
    bound: [C + 1, *B], the highest log-probability of a step; -inf beyond the last.
  """

  group: Int[Array, "C *B W"]
  log_group: Float[Array, "C *B W"]
  bound: Float[Array, "n *B"]


def step_width(rows: int, groups: int, slots: int) -> int:
  """Number of groups of a step: `WIDTH`, or fewer beyond 4 Mi scores."""
  return max(1, min(WIDTH, groups, 2**22 // max(1, rows * slots)))


def _search_order(log_group: Float[Array, "*B G"], width: int) -> _SearchOrder:
  """The groups by descending probability, in steps of `width`."""
  missing = -log_group.shape[-1] % width
  fill = [(0, 0)] * (log_group.ndim - 1) + [(0, missing)]
  number = jnp.broadcast_to(jnp.arange(log_group.shape[-1], dtype=jnp.int32), log_group.shape)
  # Two keys: groups of equal probability come in the order of their numbers.
  falling, group = lax.sort((-log_group, number), num_keys=2)
  falling = jnp.pad(falling, fill, constant_values=jnp.inf)
  group = jnp.pad(group, fill)
  steps = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], x.shape[-1] // width, width), -2, 0)
  group, falling = steps(group), steps(falling)
  beyond = jnp.full((1, *falling.shape[1:-1]), -jnp.inf, jnp.float32)
  bound = jnp.concatenate([-falling[..., 0], beyond])
  return _SearchOrder(group, -falling, bound)


def best_first_top_k(
  log_group: Float[Array, "*B G"],
  score_groups: _ScoreGroups,
  k: int,
  width: int = WIDTH,
  axis: MeshAxes | None = None,
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
  """The k most likely tokens: log-probabilities, positions, visited groups.

  The result equals that of scoring every group: log-probabilities in descending order, ties in the
  order of their positions, -inf and -1 in entries without a token. A row visits the groups that
  are at least as likely as its k-th best token (of each device, where the groups are sharded).
  """
  axis = vocab_parallel.inside(axis)
  order = _search_order(log_group, width)
  batch, count = log_group.shape[:-1], order.group.shape[0]

  def matters(state):
    index, top = state
    # `>=`, for a group as likely as the k-th token may hold one that ties with it.
    some = (order.bound[index] >= top.scores[..., -1]).any()
    if axis:
      # A loop with collectives must be equally long on all devices.
      some = lax.pmax(some.astype(jnp.int32), axis) > 0
    return (index == 0) | ((index < count) & some)

  def step(state):
    index, top = state
    # By group number, so that tokens of one step that tie come in the order of their positions.
    groups, log_prob = lax.sort((order.group[index], order.log_group[index]), num_keys=1)
    score_BWS, position_BWS = score_groups(groups, log_prob)
    return index + 1, _merge_by_position(top, _flat(score_BWS), _flat(position_BWS))

  start = vocab_parallel.varying(
    topk.empty(batch, k), *vocab_parallel.varies_over(jax.typeof(log_group))
  )
  _, top = lax.while_loop(matters, step, (jnp.int32(0), start))
  visited_B = _visited(log_group, top.scores[..., -1:], axis)
  top = topk.across_devices(top, axis)
  return top.scores, top.tokens, visited_B


def best_of_groups(
  groups: Groups, log_best: Float[Array, "*B G"], k: int, axis: MeshAxes | None = None
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
  """The k most likely tokens and their positions, from the best token of each group.

  The k groups of the best tokens hold the k best tokens, so that only those are scored. The results
  are those of `best_first_top_k`. `log_best` is the log-probability of the best token.
  """
  axis, count = vocab_parallel.inside(axis), min(k, log_best.shape[-1])
  number = jnp.arange(log_best.shape[-1], dtype=jnp.int32)
  start = vocab_parallel.varying((topk.empty(log_best.shape[:-1], count), log_best))[0]
  # In the order of their numbers, so that tokens that tie come in the order of their positions. A
  # missing group is one of probability 0.
  group_Bk = jnp.sort(jnp.maximum(topk.merge(start, log_best, number).tokens, 0), axis=-1)
  log_group_Bk = jnp.take_along_axis(groups.log_group, group_Bk, axis=-1)
  repeated_Bk = jnp.diff(group_Bk, axis=-1, prepend=-1) == 0
  log_group_Bk = jnp.where(repeated_Bk, -jnp.inf, log_group_Bk)
  score_BkS, position_BkS = groups.score_groups(group_Bk, log_group_Bk)
  empty = vocab_parallel.varying((topk.empty(log_best.shape[:-1], k), score_BkS))[0]
  top = topk.merge(empty, _flat(score_BkS), _flat(position_BkS))
  return tuple(topk.across_devices(top, axis))


# [..., a, b] -> [..., a·b]
_flat = functools.partial(lax.collapse, start_dimension=-2)


def _merge_by_position(top, scores, positions):
  """The top k of a list and new scores, ties by position unlike `topk.merge`."""
  k = top.scores.shape[-1]
  new = topk.merge(topk.empty(scores.shape[:-1], k), scores, positions)
  score, position = (jnp.concatenate(pair, axis=-1) for pair in zip(top, new))
  # nan sorts first, as in `lax.top_k`, so that it stays visible.
  falling = jnp.where(jnp.isnan(score), -jnp.inf, -score)
  _, position, score = lax.sort((falling, position, score), num_keys=2)
  return topk.TopK(score[..., :k], position[..., :k])


class Nucleus(NamedTuple):
  """A draw from a nucleus.

  Attributes:
    position: position of the drawn token, if `complete`.
    complete: whether the visited groups contain the whole nucleus.
    visited: number of visited groups.
  """

  position: Int[Array, "*B"]
  complete: Bool[Array, "*B"]
  visited: Int[Array, "*B"]


def best_first_nucleus(
  log_group: Float[Array, "*B G"],
  score_groups: _ScoreGroups,
  top_p: float,
  key: PRNGKeyArray,
  slots: int,
  steps: int,
  width: int = WIDTH,
  axis: MeshAxes | None = None,
) -> Nucleus:
  """A draw from the `top_p` nucleus, by best-first search.

  The nucleus is that of `sampling.nucleus`, with ties in the order of the search. At
  most `steps` steps of `width` groups are scored. The set is complete once the tokens that are
  more likely than the next group have the mass.
  """
  axis = vocab_parallel.inside(axis)
  order = _search_order(log_group, width)
  # A mass of 0 would be reached before any group is scored.
  top_p = max(top_p, float(jnp.finfo(jnp.float32).tiny))
  batch, count = log_group.shape[:-1], min(steps, order.group.shape[0])
  everything = count == order.group.shape[0]
  total = lambda x: lax.psum(x, axis) if axis else x

  def complete(state):
    index, score_CBw, _ = state
    bound_B = order.bound[index]
    bound_B = lax.pmax(bound_B, axis) if axis else bound_B
    sure_CBw = jnp.where(score_CBw > bound_B[..., None], jnp.exp(score_CBw), 0.0)
    return total(sure_CBw.sum(axis=(0, -1))) >= top_p

  def step(state):
    index, score_CBw, position_CBw = state
    score_BWS, position_BWS = score_groups(order.group[index], order.log_group[index])
    scores, positions = score_CBw.at[index].set(_flat(score_BWS)), _flat(position_BWS)
    return index + 1, scores, position_CBw.at[index].set(positions)

  # All scores of the search are stored, for the bisection and the draw after it.
  shape = count, *batch, width * slots
  start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
  start = vocab_parallel.varying(start, *vocab_parallel.varies_over(jax.typeof(log_group)))
  state = lax.while_loop(
    lambda state: (state[0] < count) & ~complete(state).all(), step, (jnp.int32(0), *start)
  )
  score_Bw, position_Bw = (_flat(jnp.moveaxis(x, 0, -2)) for x in state[1:])
  own = jnp.moveaxis(score_Bw, -1, 0), jnp.arange(score_Bw.shape[-1])
  blocks = sampling.Blocks(1, lambda _: own, batch, axis)
  zero_B = jnp.zeros(batch, jnp.float32)
  edge_B = sampling.nucleus_edge(blocks, top_p, zero_B)
  kept_wB, _ = sampling.cut(blocks, edge_B, top_p, zero_B).block(jnp.int32(0))
  drawn_B = sampling.draw_among(jnp.moveaxis(kept_wB, 0, -1), position_Bw, key, None, axis)
  return Nucleus(
    drawn_B, complete(state) | everything, _visited(log_group, edge_B[..., None], axis)
  )


def _visited(log_group, lowest_B1, axis):
  """Number of groups that may hold tokens as likely as the last one of the result."""
  # A group of probability 0 is padding of a device's shard.
  matters = (log_group >= lowest_B1) & ~jnp.isneginf(log_group)
  count_B = matters.sum(axis=-1, dtype=jnp.int32)
  return lax.psum(count_B, axis) if axis else count_B
