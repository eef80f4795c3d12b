"""Tests of best-first search over groups against a search of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.ops import group_search

GROUPS, SLOTS = 13, 5


def vocabulary(scale, seed=0, rows=4):
  """Log-probabilities [B, G] of groups, [B, G, S] of tokens, and what visits them."""
  keys = jax.random.split(jax.random.key(seed), 2)
  log_group = jax.nn.log_softmax(scale * jax.random.normal(keys[0], (rows, GROUPS)))
  scores = scale * jax.random.normal(keys[1], (rows, GROUPS, SLOTS))
  size = 1 + jnp.arange(GROUPS) % SLOTS
  present = jnp.arange(SLOTS) < size[:, None]
  log_slot = jax.nn.log_softmax(jnp.where(present, scores, -jnp.inf))
  first = jnp.cumsum(size) - size
  position = jnp.where(present, first[:, None] + jnp.arange(SLOTS), 0).astype(jnp.int32)

  def score_groups(group, log_group):
    own = jnp.take_along_axis(log_slot, group[..., None], axis=1)
    return log_group[..., None] + own, position[group]

  log_prob = (log_group[..., None] + log_slot).reshape(rows, -1)[:, present.ravel()]
  return log_group, score_groups, np.asarray(log_prob)


def sorted_positions(log_prob, k):
  """The k best positions by brute force, ties in order."""
  return np.argsort(-log_prob, axis=-1, kind="stable")[:, :k]


def best(log_group, score_groups, k, width):
  """`best_first_top_k`, compiled at once: one after another its operations take longer."""
  return jax.jit(
    lambda log_group: group_search.best_first_top_k(log_group, score_groups, k, width)
  )(log_group)


def drawn(log_group, score_groups, top_p, slots, steps, width):
  run = functools.partial(group_search.best_first_nucleus, slots=slots, steps=steps, width=width)
  return jax.jit(lambda log_group, key: run(log_group, score_groups, top_p, key))(
    log_group, jax.random.key(1)
  )


@pytest.mark.slow
@pytest.mark.parametrize(("width", "k"), [(1, 6), (4, 1), (4, 36), (13, 6)])
def test_the_best_are_those_of_all_groups(width, k):
  log_group, score_groups, log_prob = vocabulary(2.0)
  found, positions, visited = best(log_group, score_groups, k, width)
  expected = sorted_positions(log_prob, k)
  np.testing.assert_array_equal(positions, expected)
  # Compiled, a sum may be rounded otherwise.
  np.testing.assert_allclose(found, np.take_along_axis(log_prob, expected, -1), rtol=1e-6)
  least = np.asarray(found)[:, -1:]
  np.testing.assert_array_equal(visited, (np.asarray(log_group) >= least).sum(-1))


@pytest.mark.parametrize("width", [1, 4])
def test_tokens_that_tie_come_in_the_order_of_their_positions(width):
  flat = jnp.full((2, 6), -jnp.log(6.0)).at[1].set(jnp.log(jnp.array([1, 2, 1, 2, 2, 2]) / 10))
  first = jnp.arange(6)[:, None] * 2

  def score_groups(group, log_group):
    return jnp.broadcast_to(log_group[..., None] - jnp.log(2.0), (*group.shape, 2)), (
      first[group] + jnp.arange(2)
    )

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
  found, positions, _ = best(log_group.at[1].set(jnp.nan), score_groups, 3, 4)
  others = [0, 2, 3]
  np.testing.assert_array_equal(
    np.asarray(positions)[others], sorted_positions(log_prob, 3)[others]
  )
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
  many = jnp.broadcast_to(log_group, (1000, GROUPS))
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
  log_slot, position = score_groups(jnp.arange(GROUPS)[None], jnp.zeros((1, GROUPS)))
  return lambda group, log_group: (log_group[..., None] + log_slot[0][group], position[0][group])


def test_a_nucleus_beyond_the_steps_is_said_not_to_be_found():
  log_group, score_groups, _ = vocabulary(0.1)
  found = drawn(log_group, score_groups, 0.9, SLOTS, 2, 4)
  assert not found.complete.any()


def test_what_ties_at_the_edge_of_the_nucleus_is_visited():
  # Groups of one token: 0.4, 0.2, 0.2, 0.2; the mass 0.5 ends at 0.2, of which there are three.
  log_group = jnp.log(jnp.array([0.4, 0.2, 0.2, 0.2]))
  many = jnp.broadcast_to(log_group, (300, 4))
  score_groups = lambda group, log: (log[..., None], group[..., None])
  found = drawn(many, score_groups, 0.5, 1, 4, 1)
  assert set(np.asarray(found.position).tolist()) == {0, 1, 2, 3}
  assert (found.visited == 4).all()
