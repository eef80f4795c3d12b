"""Tests of beam search against an exhaustive search."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.dpq.models.beam import beam_search

V, EOS = 4, 0


def model(seed, length):
  """Log-probabilities [T, V, V] of the next token, given the position and the token before."""
  scores = np.random.default_rng(seed).normal(size=(length, V, V)) * 2
  return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def step_of(table):
  def step(tokens, at):
    """The state counts a sequence's tokens: it is reordered with the sequences."""
    log_prob = jnp.asarray(table, jnp.float32)[at, tokens]
    best, token = jax.lax.top_k(log_prob, V)
    return best, token, at + 1

  return step


def search(table, starts, **options):
  """`beam_search` in one program; each sequence begins at an index of the table."""
  run = functools.partial(beam_search, step_of(table), eos=EOS, **options)
  return jax.device_get(jax.jit(run)(np.int32(starts)))


def exhaustive(table, length, penalty):
  """The best of all sequences that end within the length: (rank, tokens, log p)."""
  found = []
  for n in range(1, length + 1):
    for words in itertools.product(range(1, V), repeat=n - 1):
      sequence = (*words, EOS)
      before = (EOS, *sequence)
      log_prob = sum(table[t, before[t], sequence[t]] for t in range(n))
      found.append((log_prob / ((5 + n) / 6) ** penalty, words, log_prob))
  return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_the_best_of_all_sequences(penalty):
  length, beams = 4, V**4
  tables = [model(seed, length) for seed in range(5)]
  for table in tables:
    options = {"rows": 2, "beams": beams, "length": length, "penalty": penalty}
    found = search(table, [0] * 2 * beams, **options)
    _, words, log_prob = exhaustive(table, length, penalty)
    for row in range(2):
      assert tuple(t for t in found.tokens[row].tolist() if t >= 0) == words
      np.testing.assert_allclose(found.log_prob[row], log_prob, rtol=1e-5)
    assert found.ended.all()


def test_one_beam_is_greedy_while_nothing_ends():
  length = 5
  table = model(3, length)
  table[..., EOS] = -50.0
  found = search(table, [0], rows=1, beams=1, length=length)
  greedy, token = [], EOS
  for t in range(length):
    token = int(np.argmax(table[t, token]))
    greedy.append(token)
  assert found.tokens[0].tolist() == greedy
  assert not found.ended[0]


def test_rows_have_beams_of_their_own():
  """Each row starts at another index of the table, which its state holds."""
  table = model(4, 8)
  both = search(table, [0] * 6 + [3] * 6, rows=2, beams=6, length=4)
  for row, start in enumerate((0, 3)):
    alone = search(table, [start] * 6, rows=1, beams=6, length=4)
    np.testing.assert_array_equal(both.tokens[row], alone.tokens[0])
    np.testing.assert_allclose(both.log_prob[row], alone.log_prob[0], rtol=1e-6)


def test_a_sequence_that_ends_at_once_is_empty():
  table = np.full((3, V, V), -20.0)
  table[..., EOS] = -1e-6
  found = search(table, [0, 0], rows=1, beams=2, length=3)
  assert found.tokens[0].tolist() == [-1, -1, -1]
  assert found.ended[0]


@pytest.mark.parametrize("wrong", [{"beams": 0}, {"length": 0}, {"penalty": -1.0}])
def test_wrong_numbers_are_refused(wrong):
  with pytest.raises(ValueError, match="must be at least 1"):
    search(model(0, 3), [0, 0], **{"rows": 1, "beams": 2, "length": 3, "penalty": 0.6} | wrong)
