"""The times of a drafter's rounds."""

import dataclasses
import types

import pytest

from tests.lm.drafting.test_medusa import TREE, medusa
from tests.lm.generation.test_speculation import drafter, target
from vqjax.lm.drafting import eagle_training
from vqjax.lm.generation import GREEDY, RoundTimes, Sampling, TreeDraft

TIMES = {True: RoundTimes(0.125, 0.5), False: RoundTimes(0.25, 1.0)}
"""Those of rounds that are greedy and of others: powers of two, so that sums are exact."""

ROUNDS = 8

DRAFTERS = {
  "a chain": lambda: drafter("codebook"),
  "a single token": lambda: dataclasses.replace(drafter("codebook"), length=1),
  "Medusa": medusa,
  "a tree of a decoder": lambda: TreeDraft(drafter("codebook"), TREE),
}


def size_of(each):
  """The draft tokens of a round."""
  return each.tree.size if hasattr(each, "tree") else each.length


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_time_of_a_round_is_that_of_a_clock(name, monkeypatch):
  now = [0.0]

  def generated(*given, max_tokens, drafter=None, **options):
    sampling = given[-1]
    if drafter is None:
      now[0] += max_tokens
      return None
    assert drafter.times(sampling).cost == 0  # always drafts
    cost, overhead = TIMES[sampling.is_greedy]
    now[0] += ROUNDS * (1 + overhead + cost * size_of(drafter))
    return types.SimpleNamespace(passes=[ROUNDS])

  monkeypatch.setattr(eagle_training, "generate", generated)
  monkeypatch.setattr(eagle_training.time, "perf_counter", lambda: now[0])
  given = DRAFTERS[name]()
  found = eagle_training.timed(given, *target(), [1, 2])
  size = size_of(given)
  assert size_of(found) == size
  for sampling in (GREEDY, Sampling(0.8)):
    cost, overhead = TIMES[sampling.is_greedy]
    times = found.times(sampling)
    assert times.overhead + times.cost * size == pytest.approx(overhead + cost * size)
    if name == "a chain":
      assert times == (cost, overhead)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Medusa", "a tree of a decoder"])
def test_rounds_of_trees_are_timed(name):
  found = eagle_training.timed(DRAFTERS[name](), *target(), [1, 2])
  assert 0 < found.cost < 1
  assert 0 < found.drawn.cost < 1
  assert found.tree == TREE
