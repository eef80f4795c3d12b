"""Counts become biases and proposals; invalid counts are refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import initial_variables, results, run
from vqjax import CodebookHead, assign
from vqjax.heads.unigram import UnigramBias, UnigramProposal
from vqjax.ops import codes as code_ops

COUNTS = np.array([50, 0, 3, 0, 0, 7, 1])
TABLE = np.array([2, 2, 0, 0, 4, 4, 4])  # codes 1 and 3 have no token


def head():
  init = UnigramBias(COUNTS, TABLE)
  return CodebookHead(7, 4, 5, assign.Given(TABLE), token_bias=True, bias_init=init)


def test_tokens_on_a_code_start_with_their_smoothed_unigram():
  hidden = np.tile(np.random.default_rng(0).standard_normal(4, np.float32), (7, 1))
  log_prob = lambda own, h: own.log_prob(h, jnp.arange(7))
  log_prob = run(head(), initial_variables(head()), log_prob, hidden)
  for code in (0, 2, 4):
    on = code == TABLE
    found = np.exp(np.asarray(log_prob, np.float64)[on])
    expected = (COUNTS[on] + 1) / (COUNTS[on] + 1).sum()
    np.testing.assert_allclose(found / found.sum(), expected, rtol=1e-5)


def test_the_probability_of_a_code_is_what_it_is_without_a_bias():
  bias = UnigramBias(COUNTS, TABLE, smoothing=0.5)(None, (7,))
  mass = lambda bias: [code_ops.log_mass(jnp.asarray(TABLE), 5, b) for b in (bias, None)]
  np.testing.assert_allclose(*results(mass, bias), atol=1e-6)
  assert np.isfinite(bias).all()


@pytest.mark.parametrize(
  ("counts", "message"),
  [
    (np.ones(6, int), "counts.*6"),
    (np.array([1, 2, 3, -4, 5, 6, 7]), "count.*-4"),
    (np.zeros(7, int), "counts.*7"),
    (np.ones(7), "counts.*float64"),
  ],
)
def test_invalid_counts_are_refused(counts, message):
  for make in (lambda: UnigramBias(counts, TABLE)(None, (7,)), lambda: UnigramProposal(counts)(7)):
    with pytest.raises(ValueError, match=message):
      make()


def test_a_smoothing_and_an_assignment_that_do_not_fit_are_refused():
  for smoothing in (0.0, -1.0, float("nan")):
    with pytest.raises(ValueError, match=f"`smoothing` .*{smoothing}"):
      UnigramProposal(COUNTS, smoothing)(7)
  for table in (TABLE[:6], TABLE - 1, TABLE.astype(float)):
    with pytest.raises(ValueError, match="assign"):
      UnigramBias(COUNTS, table)(None, (7,))
