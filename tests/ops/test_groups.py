"""Tests of groups, slots and orders of a vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.exact import normals
from vqjax.ops import device, groups


def group_and_slot(tokens, starts):
  return jax.device_get(jax.jit(lambda tokens: groups.group_and_slot(tokens, starts))(tokens))


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (10, 3), (101, 10), (101, 101), (50257, 224)])
def test_group_and_slot_invert_the_bounds(vocab, count):
  starts = groups.group_starts(vocab, count)
  group, slot = group_and_slot(np.arange(vocab), starts)
  np.testing.assert_array_equal(starts[group] + slot, np.arange(vocab))
  assert (slot >= 0).all()
  assert (slot < np.diff(starts)[group]).all()
  assert np.diff(starts).max() == -(-vocab // count)
  assert np.diff(starts).min() >= 1


def test_a_vocabulary_times_groups_beyond_32_bits_is_exact():
  vocab, count = 10**7, 3162
  starts = groups.group_starts(vocab, count)
  tokens = np.array([vocab - 1, 9_999_000])
  group, slot = group_and_slot(tokens, starts)
  np.testing.assert_array_equal(starts[group] + slot, tokens)


def test_sizes_of_any_kind_are_inverted_too():
  sizes = groups.checked_sizes(11, sizes=(1, 7, 1, 2))
  starts = np.concatenate([[0], np.cumsum(sizes)])
  group, slot = group_and_slot(np.arange(11), starts)
  assert group.tolist() == [0] + [1] * 7 + [2, 3, 3]
  np.testing.assert_array_equal(starts[group] + slot, np.arange(11))


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"groups": 0}, r"`groups` must be in \[1, 11\] .* got 0"),
    ({"groups": 12}, r"`groups` must be in \[1, 11\] .* got 12"),
    ({"sizes": (1,) * 12}, "`sizes` must have 1 to 11 entries .* got 12"),
    (
      {"sizes": (5, 0, 6, 0)},
      "`sizes` must be at least 1; got 0 for group 1. Leave out the 2 empty groups",
    ),
    ({"sizes": (12, -1)}, "`sizes` .* got -1 for group 1"),
    ({"sizes": (5, 5)}, "`sizes` must add up to .* 11; got 10"),
    ({"sizes": ()}, "`sizes` must add up to .* got 0"),
    ({"groups": 2, "sizes": (5, 6)}, "`groups` must be None beside `sizes`; got 2"),
  ],
)
def test_groups_that_do_not_hold_the_vocabulary_are_refused(given, message):
  with pytest.raises(ValueError, match=message):
    groups.checked_sizes(11, **given)


@pytest.mark.parametrize(
  ("order", "message"),
  [
    ([0, 1, 1, 3], "`order` must be .* got token 1 at positions 1 and 2, and token 2 at none"),
    ([0, 1, 2, 4], "`order` must be .* got token 4 of 4"),
    ([0, -1, 2, 3], "`order` must be .* got token -1 of 4"),
    ([0, 1, 2], r"`order` must be int\[4\]; got int32\[3\]"),
    ([0.0, 1.0, 2.0, 3.0], r"`order` must be int\[4\]; got float32\[4\]"),
  ],
)
def test_an_order_that_is_no_permutation_is_refused(order, message):
  with pytest.raises(ValueError, match=message):
    groups.check_order(np.array(order, np.int32 if isinstance(order[0], int) else np.float32), 4)


def test_positions_invert_an_order():
  order = np.array([2, 0, 3, 1])
  np.testing.assert_array_equal(order[jax.jit(groups.positions)(order)], np.arange(4))


@pytest.mark.slow
@pytest.mark.parametrize("count", [23, 24])
def test_tiles_of_tokens_change_neither_the_loss_nor_its_gradient(count):
  *tables, hidden = normals(0, (5, 4), (5,), (3, 5), (3, 5), (count, 4))
  slots, sizes = groups.Slots(*tables), jnp.array([5, 1, 4])
  group = jnp.arange(count) * 7 % 3
  slot = jnp.minimum(jnp.arange(count) % 5, sizes[group] - 1)

  def loss(slots, hidden):
    found = groups.slot_log_prob(hidden, slots, sizes, group, slot)
    return (found * jnp.arange(count)).sum(), found

  whole = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(slots, hidden)
  with device.using(device.current()._replace(tokens=7, vocab=5, kept=0)):
    # A function of its own, which has not been traced with other limits.
    tiled = jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1), has_aux=True))(slots, hidden)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), tiled, whole)
