"""The gated delta rule in chunks is its recurrence in float64, from any state and in any steps."""

import numpy as np
import pytest

from tests.jitted import results
from vqjax.lm.models.delta_rule import gated_delta_rule

B, H, C, E = 2, 3, 5, 4


def drawn(length):
  rng = np.random.default_rng(length)
  query, key, value = (rng.standard_normal((B, length, H, width)) for width in (C, C, E))
  key /= np.linalg.norm(key, axis=-1, keepdims=True)
  decay = -rng.exponential(size=(B, length, H)) * rng.choice([0.01, 1, 40], (B, length, H))
  rate = rng.uniform(size=(B, length, H))
  return query, key, value, decay, rate, rng.standard_normal((B, H, C, E))


def recurrence(query, key, value, decay, rate, state):
  out, state = np.zeros_like(value), state.copy()
  for b, t, h in np.ndindex(value.shape[:3]):
    state[b, h] *= np.exp(decay[b, t, h])
    unsaid = value[b, t, h] - key[b, t, h] @ state[b, h]
    state[b, h] += rate[b, t, h] * np.outer(key[b, t, h], unsaid)
    out[b, t, h] = query[b, t, h] @ state[b, h]
  return out, state


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31])
def test_chunks_are_the_recurrence(length):
  given = drawn(length)
  found = results(lambda *x: gated_delta_rule(*x, chunk=8), *map(np.float32, given))
  for ours, expected in zip(found, recurrence(*given)):
    # Chains of 31 products of numbers of order one,.
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_text_in_pieces_is_the_text_and_padding_leaves_the_state():
  *given, state = map(np.float32, drawn(23))
  padding = np.arange(23)[:, None] < 17
  query, key, value, decay, rate = given
  given = query, key, value, decay * padding, rate * padding

  def in_pieces(state, *given):
    outs, first = [], 0
    for last in (9, 10, 17):
      out, state = gated_delta_rule(*(x[:, first:last] for x in given), state, chunk=4)
      outs, first = [*outs, out], last
    return outs, state

  outs, pieces = results(in_pieces, state, *given)
  whole, after = results(lambda state, *x: gated_delta_rule(*x, state, chunk=6), state, *given)
  np.testing.assert_allclose(np.concatenate(outs, 1), whole[:, :17], atol=1e-5)
  np.testing.assert_allclose(pieces, after, atol=1e-5)


def test_nothing_is_nan_at_a_decay_to_zero():
  *given, state = map(np.float32, drawn(13))
  given[3][:, 5] = -1e30
  out, _ = results(lambda state, *x: gated_delta_rule(*x, state, chunk=8), state, *given)
  expected, _ = recurrence(*given, state)
  np.testing.assert_allclose(out, expected, atol=1e-5)
