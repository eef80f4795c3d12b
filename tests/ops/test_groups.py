"""Do group and slot name each token exactly once?"""

import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.ops import groups


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (10, 3), (101, 10), (101, 101), (50257, 224)])
def test_group_and_slot_invert_the_bounds(vocab, count):
  starts = groups.group_starts(vocab, count)
  group, slot = (np.asarray(x) for x in groups.group_and_slot(jnp.arange(vocab), starts))
  np.testing.assert_array_equal(starts[group] + slot, np.arange(vocab))
  assert (slot >= 0).all()
  assert (slot < np.diff(starts)[group]).all()
  assert np.diff(starts).max() == -(-vocab // count)
  assert np.diff(starts).min() >= 1


def test_a_vocabulary_times_groups_beyond_32_bits_is_exact():
  vocab, count = 10**7, 3162
  starts = groups.group_starts(vocab, count)
  group, slot = groups.group_and_slot(jnp.array([vocab - 1, 9_999_000]), starts)
  np.testing.assert_array_equal(
    starts[np.asarray(group)] + np.asarray(slot), [vocab - 1, 9_999_000]
  )
