"""Which tokens are best, or in the nucleus, without scoring every group of the vocabulary?

A token is at most as likely as its group, p(v) <= p(group of v): groups are visited in order of
falling probability, some at a time, until no group that is left can change the result. Where each
device of a mesh axis has groups of its own, each visits those.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vqjax.ops import sampling, topk, vocab_parallel

WIDTH = 32
"""Groups of a row that are scored at once."""

MOST = 64
"""Groups of a row among which a nucleus is looked for before everything is scored."""

ScoreGroups = Callable[[Int[Array, "*B W"], Float[Array, "*B W"]], tuple[Array, Array]]
"""(groups, their log-probabilities) -> (log-probabilities, positions) [*B, W, S] of their tokens.

A group of log-probability -inf, and a slot that no token has, give -inf.
"""


class Groups(NamedTuple):
  """What there is to visit.

  Attributes:
    log_group: log-probabilities of the groups.
    score_groups: those of their tokens.
    token_at: the tokens at positions, of any shape; -1 stays -1.
  """

  log_group: Float[Array, "*B G"]
  score_groups: ScoreGroups
  token_at: Callable[[Array], Array]


class Visits(NamedTuple):
  """In which order groups are visited, W at a time: C steps.

  Attributes:
    group: [C, *B, W].
    log_group: [C, *B, W], their log-probabilities; -inf where the last step has no more groups.
    bound: [C + 1, *B], the highest of a step; -inf beyond the last.
  """

  group: Int[Array, "C *B W"]
  log_group: Float[Array, "C *B W"]
  bound: Float[Array, "n *B"]


def step_width(rows: int, groups: int, slots: int) -> int:
  """Groups a step: `WIDTH`, or fewer where the scores of all rows would be more than 4 Mi."""
  return max(1, min(WIDTH, groups, 2**22 // max(1, rows * slots)))


def visits(log_group: Float[Array, "*B G"], width: int) -> Visits:
  """The groups by falling probability, in steps of `width`."""
  missing = -log_group.shape[-1] % width
  fill = [(0, 0)] * (log_group.ndim - 1) + [(0, missing)]
  number = jnp.broadcast_to(jnp.arange(log_group.shape[-1], dtype=jnp.int32), log_group.shape)
  falling, group = lax.sort((-log_group, number), num_keys=2)
  falling = jnp.pad(falling, fill, constant_values=jnp.inf)
  group = jnp.pad(group, fill)
  steps = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], x.shape[-1] // width, width), -2, 0)
  group, falling = steps(group), steps(falling)
  beyond = jnp.full((1, *falling.shape[1:-1]), -jnp.inf, jnp.float32)
  bound = jnp.concatenate([-falling[..., 0], beyond])
  return Visits(group, -falling, bound)


def best_first_top_k(
  log_group: Float[Array, "*B G"],
  score_groups: ScoreGroups,
  k: int,
  width: int = WIDTH,
  axis: str | None = None,
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
  """The k most likely tokens: log-probabilities in descending order, positions, groups visited.

  Exact: the same as scoring every group, equal scores in the order of their positions, -inf and -1
  where there is no token left. The last result is how many groups each row needed: those at least
  as likely as its k-th best token (of each device, where the groups lie on several).
  """
  axis = vocab_parallel.inside(axis)
  plan = visits(log_group, width)
  batch, count = log_group.shape[:-1], plan.group.shape[0]

  def matters(state):
    index, found = state
    some = (plan.bound[index] >= found.scores[..., -1]).any()
    return (index == 0) | ((index < count) & _anywhere(some, axis))

  def step(state):
    index, found = state
    # In the order of their numbers: so tokens that tie come in the order of their positions.
    groups = lax.sort((plan.group[index], plan.log_group[index]), num_keys=1)
    score_BWS, position_BWS = score_groups(*groups)
    return index + 1, _merged(found, _flat(score_BWS), _flat(position_BWS))

  start = vocab_parallel.varying(
    topk.empty(batch, k), *vocab_parallel.varies_over(jax.typeof(log_group))
  )
  _, found = lax.while_loop(matters, step, (jnp.int32(0), start))
  needed_B = _needed(log_group, found.scores[..., -1:], axis)
  found = topk.across_devices(found, axis)
  return found.scores, found.tokens, needed_B


def _flat(array):
  """[..., a, b] -> [..., a·b]."""
  *batch, a, b = array.shape
  return array.reshape(*batch, a * b)


def _anywhere(some, axis):
  """Devices that are done go on with the others: a loop that sends must be as long on all."""
  return lax.pmax(some.astype(jnp.int32), axis) > 0 if axis else some


def _summed(number, axis):
  return lax.psum(number, axis) if axis else number


def _merged(found, scores, positions):
  """The best of both, ties by position: `topk.merge` would keep them as they came."""
  k = found.scores.shape[-1]
  new = topk.merge(topk.empty(scores.shape[:-1], k), scores, positions)
  score, position = (jnp.concatenate(pair, axis=-1) for pair in zip(found, new))
  falling = jnp.where(jnp.isnan(score), -jnp.inf, -score)
  _, position, score = lax.sort((falling, position, score), num_keys=2)
  return topk.TopK(score[..., :k], position[..., :k])


class Nucleus(NamedTuple):
  """What visiting found of a nucleus.

  Attributes:
    position: a fair draw from it, where it was found.
    found: whether all of it lies in the groups that were visited.
    visited: how many groups that took.
  """

  position: Int[Array, "*B"]
  found: Bool[Array, "*B"]
  visited: Int[Array, "*B"]


def best_first_nucleus(
  log_group: Float[Array, "*B G"],
  score_groups: ScoreGroups,
  top_p: float,
  key: PRNGKeyArray,
  slots: int,
  steps: int,
  width: int = WIDTH,
  axis: str | None = None,
) -> Nucleus:
  """A draw from the smallest set of best tokens whose mass reaches `top_p`, and their ties.

  At most `steps` steps of `width` groups: the set is found where the tokens above the next group's
  probability have that mass.
  """
  axis = vocab_parallel.inside(axis)
  plan = visits(log_group, width)
  # A mass that rounds to zero is there before any group is visited.
  top_p = max(top_p, float(jnp.finfo(jnp.float32).tiny))
  batch, count = log_group.shape[:-1], min(steps, plan.group.shape[0])
  everything = count == plan.group.shape[0]

  def found(state):
    index, score_CBw, _ = state
    bound_B = plan.bound[index]
    bound_B = lax.pmax(bound_B, axis) if axis else bound_B
    sure_CBw = jnp.where(score_CBw > bound_B[..., None], jnp.exp(score_CBw), 0.0)
    return _summed(sure_CBw.sum(axis=(0, -1)), axis) >= top_p

  def step(state):
    index, score_CBw, position_CBw = state
    score_BWS, position_BWS = score_groups(plan.group[index], plan.log_group[index])
    scores, positions = score_CBw.at[index].set(_flat(score_BWS)), _flat(position_BWS)
    return index + 1, scores, position_CBw.at[index].set(positions)

  shape = count, *batch, width * slots
  start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
  start = vocab_parallel.varying(start, *vocab_parallel.varies_over(jax.typeof(log_group)))
  state = lax.while_loop(
    lambda state: (state[0] < count) & ~found(state).all(), step, (jnp.int32(0), *start)
  )
  score_Bw, position_Bw = (_flat(jnp.moveaxis(x, 0, -2)) for x in state[1:])
  blocks = sampling.Blocks(1, lambda _: (score_Bw, jnp.arange(score_Bw.shape[-1])), batch, axis)
  edge_B1 = sampling.nucleus_edge(blocks, top_p, jnp.zeros(batch, jnp.float32))[..., None]
  kept_Bw = jnp.where(score_Bw >= edge_B1, score_Bw, -jnp.inf)
  drawn_B = sampling.draw_among(kept_Bw, position_Bw, key, None, axis)
  return Nucleus(drawn_B, found(state) | everything, _needed(log_group, edge_B1, axis))


def _needed(log_group, worst_B1, axis):
  """How many groups hold tokens as likely as the last that was wanted."""
  # A group that is impossible only fills up a device's part.
  matters = (log_group >= worst_B1) & ~jnp.isneginf(log_group)
  return _summed(matters.sum(axis=-1, dtype=jnp.int32), axis)
