"""Tests of the reassignment of tokens to codes: bound, splits and limits."""

import functools

import jax
import numpy as np
import pytest

from experiments.studies.vq_logits import reassignment

VOCAB, CODES, WIDTH, POSITIONS = 53, 7, 5, 600


def problem(seed, codes=CODES, bias=False, scale=1.0):
  """Hidden vectors that say which of ten topics a token is from, and codes that do not know it."""
  rng = np.random.default_rng(seed)
  tokens = np.minimum(rng.zipf(1.3, POSITIONS) - 1, VOCAB - 1).astype(np.int32)
  topic = rng.normal(size=(10, WIDTH))
  hidden = topic[tokens % 10] + 0.3 * rng.normal(size=(POSITIONS, WIDTH))
  codebook = scale * rng.normal(size=(codes, WIDTH))
  table = rng.integers(0, codes, VOCAB).astype(np.int32)
  return {
    "hidden": np.float32(hidden),
    "codebook": np.float32(codebook),
    "assignment": table,
    "tokens": tokens,
    "mask": rng.random(POSITIONS) < 0.9,
    "bias": np.float32(rng.normal(size=VOCAB)) if bias else None,
  }


def log_prob(hidden, codebook, assignment, tokens, mask, bias):
  """[positions in the mask] in nats, by the definition, in float64."""
  h, c = np.asarray(hidden, np.float64)[mask], np.asarray(codebook, np.float64)
  scores = h @ c[assignment].T + (0 if bias is None else np.asarray(bias, np.float64))
  scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
  return scores[np.arange(len(h)), tokens[mask]]


def after(given, found):
  return given | {
    "codebook": found.codebook,
    "assignment": found.assignment,
    "bias": found.bias,
  }


contexts = jax.jit(lambda given: reassignment.contexts(**given))


@functools.partial(jax.jit, static_argnames="chunk")
def reassigned(given, **more):
  arrays = given["codebook"], given["assignment"], given["bias"]
  return reassignment.reassigned(reassignment.contexts(**given), *arrays, **more)


def move(given, **more):
  return jax.device_get(reassigned(given, **more))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [0.1, 4.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_sample_gains_at_least_what_is_promised(seed, scale, bias):
  given = problem(seed, bias=bias, scale=scale)
  found = move(given)
  gained = log_prob(**after(given, found)).sum() - log_prob(**given).sum()
  assert int(found.moved) > 0
  assert float(found.gain) > np.log(CODES) * int(found.moved) * 0.999
  # Of 600 positions' float32 log-probabilities near 10, 600 · 10 · 2^-24.
  assert gained >= float(found.gain) - 4e-4


@pytest.mark.parametrize("bias", [False, True])
def test_the_gain_of_one_move_is_the_brute_force_bound(bias):
  given = problem(1, bias=bias)
  found = move(given)
  h = np.asarray(given["hidden"], np.float64)[given["mask"]]
  c, table = np.asarray(given["codebook"], np.float64), given["assignment"]
  b = np.zeros(VOCAB) if given["bias"] is None else np.asarray(given["bias"], np.float64)
  tokens = given["tokens"][given["mask"]]
  scores = h @ c.T
  z = np.exp(scores[:, table] + b).sum(-1, keepdims=True)
  q = (np.exp(scores) / z).sum(0)
  total, moved = 0.0, 0
  for v in range(VOCAB):
    own, a = h[tokens == v], table[v]
    x = np.exp(b[v])
    gains = [
      (own @ (c[k] - c[a])).sum() + (len(own) * np.log(q[a] / q[k]) if bias else -x * (q[k] - q[a]))
      for k in range(CODES)
    ]
    best = int(np.argmax(gains))
    if gains[best] > np.log(CODES):
      total, moved = total + gains[best], moved + 1
      if found.split == 0:
        assert found.assignment[v] == best
        shift = np.log(q[a] / q[best]) if bias else 0.0
        np.testing.assert_allclose(0.0 if not bias else found.bias[v] - b[v], shift, atol=1e-5)
  assert moved == int(found.moved)
  np.testing.assert_allclose(float(found.gain), total, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_codes_without_tokens_split_others_without_changing_a_probability(bias):
  # Of so few positions and such small scores no token gains log K nats by moving.
  given = problem(2, codes=11, bias=bias, scale=0.1)
  given["assignment"] = np.minimum(given["assignment"], 3)
  given["mask"] = np.arange(POSITIONS) < 12
  found = move(given)
  assert int(found.moved) == 0
  assert int(found.split) > 0
  assert np.unique(found.assignment).size == 4 + int(found.split)
  np.testing.assert_allclose(log_prob(**after(given, found)), log_prob(**given), atol=1e-6)


@pytest.mark.slow
def test_a_token_that_splits_off_is_far_from_its_code_and_not_its_most_frequent():
  given = {
    "hidden": np.float32([[1, 0]] * 6 + [[0, 5]] * 2 + [[1, 0.1]]),
    "codebook": np.zeros((2, 2), np.float32),
    "assignment": np.zeros(4, np.int32),
    "tokens": np.array([0] * 6 + [1] * 2 + [2]),
    "mask": np.ones(9, bool),
    "bias": None,
  }
  assert move(given).assignment.tolist() == [0, 1, 0, 0]


@pytest.mark.slow
def test_one_code_or_a_sample_without_positions_changes_nothing():
  one = problem(0, codes=1)
  one["assignment"] *= 0
  blind = problem(0) | {"mask": np.zeros(POSITIONS, bool)}
  for given in (one, blind):
    found = move(given)
    assert int(found.moved) == int(found.split) == 0
    np.testing.assert_array_equal(found.assignment, given["assignment"])
    np.testing.assert_array_equal(found.codebook, given["codebook"])


@pytest.mark.slow
def test_chunks_and_batches_do_not_change_the_result():
  given = problem(3, bias=True)
  part = lambda at: given | {name: given[name][at] for name in ("hidden", "tokens", "mask")}
  whole, halves = contexts(given), [contexts(part(at)) for at in (np.s_[:201], np.s_[201:])]
  jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, atol=1e-4), whole, *halves)
  by_one, by_all = (move(given, chunk=chunk).assignment for chunk in (1, 53))
  np.testing.assert_array_equal(by_one, by_all)
