"""Tests of best-first search over groups against a search of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.ops.exact import normals
from vqjax.ops import group_search

GROUPS, SLOTS = 13, 5


def vocabulary(scale, seed=0, rows=4):
  """Log-probabilities [B, G] of groups, what visits them, and log-probabilities of tokens."""
  log_group, scores = normals(seed, (rows, GROUPS), (rows, GROUPS, SLOTS))
  log_group = scipy.special.log_softmax(scale * log_group, axis=-1)
  size = 1 + np.arange(GROUPS) % SLOTS
  present = np.arange(SLOTS) < size[:, None]
  log_slot = scipy.special.log_softmax(np.where(present, scale * scores, -np.inf), axis=-1)
  log_slot = np.float32(log_slot)
  first = np.cumsum(size) - size
  position = np.where(present, first[:, None] + np.arange(SLOTS), 0).astype(np.int32)

  def score_groups(group, log_group):
    own = jnp.take_along_axis(jnp.asarray(log_slot), group[..., None], axis=1)
    return log_group[..., None] + own, jnp.asarray(position)[group]

  log_prob = (log_group[..., None] + log_slot).reshape(rows, -1)[:, present.ravel()]
  return log_group, score_groups, log_prob


def sorted_positions(log_prob, k):
  """The k best positions by brute force, ties in order."""
  return np.argsort(-log_prob, axis=-1, kind="stable")[:, :k]


def best(log_group, score_groups, k, width):
  """`best_first_top_k`, compiled at once: one after another its operations take longer."""
  run = lambda log_group: group_search.best_first_top_k(log_group, score_groups, k, width)
  return jax.device_get(jax.jit(run)(log_group))


def drawn(log_group, score_groups, top_p, slots, steps, width):
  run = functools.partial(group_search.best_first_nucleus, slots=slots, steps=steps, width=width)
  draw = jax.jit(lambda log_group: run(log_group, score_groups, top_p, jax.random.key(1)))
  return jax.device_get(draw(log_group))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "k"), [(1, 6), (4, 1), (4, 36), (13, 6)])
def test_the_best_are_those_of_all_groups(width, k):
  log_group, score_groups, log_prob = vocabulary(2.0)
  found, positions, visited = best(log_group, score_groups, k, width)
  expected = sorted_positions(log_prob, k)
  np.testing.assert_array_equal(positions, expected)
  # Compiled, a sum may be rounded otherwise.
  np.testing.assert_allclose(found, np.take_along_axis(log_prob, expected, -1), rtol=1e-6)
  least = found[:, -1:]
  np.testing.assert_array_equal(visited, (log_group >= least).sum(-1))


@pytest.mark.parametrize("width", [1, 4])
def test_tokens_that_tie_come_in_the_order_of_their_positions(width):
  flat = np.float32(np.log([[1 / 6] * 6, [0.1, 0.2, 0.1, 0.2, 0.2, 0.2]]))

  def score_groups(group, log_group):
    scores = jnp.broadcast_to(log_group[..., None] - jnp.log(2.0), (*group.shape, 2))
    return scores, 2 * group[..., None] + jnp.arange(2)

  _, positions, _ = best(flat, score_groups, 5, width)
  assert positions.tolist() == [[0, 1, 2, 3, 4], [2, 3, 6, 7, 8]]


def test_a_peaked_distribution_takes_few_groups_and_no_more_are_scored():
  log_group, score_groups, log_prob = vocabulary(8.0)
  scored = []

  def counted(group, log_group):
    jax.debug.callback(lambda: scored.append(1))
    return score_groups(group, log_group)

  _, positions, visited = best(log_group, counted, 2, 1)
  jax.effects_barrier()
  np.testing.assert_array_equal(positions, sorted_positions(log_prob, 2))
  assert visited.max() < GROUPS / 2
  assert len(scored) == visited.max()


def test_beyond_the_vocabulary_there_is_no_token():
  log_group, score_groups, log_prob = vocabulary(1.0)
  found, positions, visited = best(log_group, score_groups, 40, 13)
  assert (positions[:, log_prob.shape[1] :] == -1).all()
  assert np.isneginf(found[:, log_prob.shape[1] :]).all()
  assert (visited == GROUPS).all()


def test_a_row_without_numbers_ends_and_leaves_the_others_alone():
  log_group, score_groups, log_prob = vocabulary(2.0)
  log_group[1] = np.nan
  found, positions, _ = best(log_group, score_groups, 3, 4)
  others = [0, 2, 3]
  np.testing.assert_array_equal(positions[others], sorted_positions(log_prob, 3)[others])
  assert np.isnan(found[1]).all()


def nucleus(log_prob, top_p):
  """The smallest set of best positions whose float64 mass reaches top_p."""
  order = np.argsort(-log_prob)
  mass = np.cumsum(np.exp(np.asarray(log_prob, np.float64)[order]))
  return set(order[: 1 + np.searchsorted(mass, top_p)].tolist())


# Less than float32 can hold is there before any group is visited: the best token alone.
@pytest.mark.slow
@pytest.mark.parametrize(("width", "top_p"), [(4, 0.8), (13, 0.99), (1, 1e-50)])
def test_draws_are_of_the_nucleus_and_of_all_of_it(width, top_p):
  log_group, score_groups, log_prob = vocabulary(3.0, rows=1)
  many = np.broadcast_to(log_group, (1000, GROUPS))
  same = for_equal_rows(score_groups)
  found = drawn(many, same, top_p, SLOTS, 13, width)
  wanted = nucleus(log_prob[0], top_p)
  assert found.complete.all()
  seen, count = np.unique(found.position, return_counts=True)
  assert set(seen.tolist()) <= wanted
  share = np.exp(log_prob[0][sorted(wanted)])
  share /= share.sum()
  shares = np.zeros(log_prob.shape[1])
  shares[seen] = count / 1000
  # Four standard deviations of a share of 1000 draws.
  np.testing.assert_allclose(shares[sorted(wanted)], share, atol=0.064)


def for_equal_rows(score_groups):
  """What `score_groups` gives for one row, for many rows that are equal to it."""

  def of_one(group, log_group):
    log_slot, position = score_groups(jnp.arange(GROUPS)[None], jnp.zeros((1, GROUPS)))
    return log_group[..., None] + log_slot[0][group], position[0][group]

  return of_one


def test_a_nucleus_beyond_the_steps_is_said_not_to_be_found():
  log_group, score_groups, _ = vocabulary(0.1)
  found = drawn(log_group, score_groups, 0.9, SLOTS, 2, 4)
  assert not found.complete.any()


def test_of_what_ties_at_the_edge_of_the_nucleus_the_first_stays():
  # Groups of one token: 0.4, 0.2, 0.2, 0.2; the mass 0.5 ends at 0.2, of which there are three.
  many = np.broadcast_to(np.float32(np.log([0.4, 0.2, 0.2, 0.2])), (300, 4))
  score_groups = lambda group, log: (log[..., None], group[..., None])
  found = drawn(many, score_groups, 0.5, 1, 4, 1)
  assert set(found.position.tolist()) == {0, 1}
  assert (found.visited == 4).all()
