"""Numbers over seeds: spreads, paired intervals against SciPy, and verdicts."""

import numpy as np
import pytest
import scipy.stats

from vqjax.lab.study.seeds import (
  Interval,
  Spread,
  finished_results,
  origins,
  paired,
  results_by_seed,
)


def test_an_interval_is_that_of_students_t_in_per_cent():
  nats = [0.01, 0.03, 0.02, 0.05]
  found = Interval.of(nats)
  half = scipy.stats.sem(nats) * scipy.stats.t.ppf(0.975, 3)
  np.testing.assert_allclose(found, 100 * np.expm1(np.mean(nats) + half * np.array([0, -1, 1])))


def test_losses_too_far_apart_for_a_perplexity_have_an_interval():
  found = Interval.of([800.0, 900.0, 850.0])
  assert found.low <= found.mean <= found.high < np.inf
  assert found.verdict(1.0) == "worse"
  assert len(str(found)) < 40
  assert len(Spread.of([1e304, 2e304]).show(2)) < 20


@pytest.mark.parametrize(
  ("commits", "named"),
  [
    (["abc", "abc+"], "2 results of 1 commit, "),
    (["abc", "def"], "2 results of 2 commits, "),
    ([None, None], "2 results of an installed vqjax, "),
  ],
)
def test_results_name_their_commits(commits, named):
  kept = {"date": "2026-01-02T03:04", "device": "CPU"}
  results = {str(i): {"result": kept | {"commit": each}} for i, each in enumerate(commits)}
  assert named in origins(results)


@pytest.mark.parametrize(
  ("nats", "verdict"),
  [
    ([0.001, -0.002, 0.0, 0.001], "equal"),
    ([-0.05, -0.06, -0.04], "better"),
    ([0.05, 0.06, 0.04], "worse"),
    ([-0.1, 0.1, 0.05], None),
    ([0.2], None),
  ],
)
def test_a_verdict_needs_an_interval(nats, verdict):
  assert Interval.of(nats).verdict(1.0) == verdict


def test_the_paired_interval_is_that_of_a_paired_t_test_over_common_seeds():
  draw = np.random.default_rng(0)
  other = dict(enumerate(draw.normal(4, 0.3, 5)))
  own = {seed: x + d for (seed, x), d in zip(other.items(), draw.normal(0.02, 0.01, 5))}
  found = paired(own | {7: 9.0}, other | {9: 1.0})
  expected = scipy.stats.ttest_rel([*own.values()], [*other.values()]).confidence_interval(0.95)
  np.testing.assert_allclose([found.low, found.high], 100 * np.expm1([*expected]))
  assert paired(own, {9: 1.0}) is None


def test_seeds_are_the_suffixes_of_a_row():
  result = lambda status: {"result": {"status": status}}
  results = {
    "ptb/full": result("finished"),
    "ptb/full-s1": result("failed"),
    "ptb/full-s12": result("finished"),
    "ptb/full-s1-more": result("finished"),
    "ptb/full-x": result("finished"),
  }
  assert results_by_seed(results, "ptb/full").keys() == {0, 1, 12}
  assert finished_results(results, "ptb/full").keys() == {0, 12}


def test_a_spread_is_the_mean_and_the_sample_deviation():
  assert Spread.of([]) is None
  assert Spread.of([1234.5]).show(1) == "1,234.5"
  assert Spread.of([100.0, 120.0]).show(1, "+") == "+110.0 ± 14.1"  # 20 / sqrt 2
