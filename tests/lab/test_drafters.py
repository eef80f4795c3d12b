"""The times of a drafter's rounds."""

import dataclasses
import types

import pytest

from tests.inference.test_medusa import TREE, medusa
from tests.inference.test_speculation import drafter, target
from vqjax.inference import TreeDraft
from vqjax.lab import drafters

OVERHEAD, COST, ROUNDS = 0.5, 0.125, 8
"""Powers of two, so that sums of times are exact."""

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
    if drafter is None:
      now[0] += max_tokens
      return None
    assert drafter.cost == 0  # always drafts
    now[0] += ROUNDS * (1 + OVERHEAD + COST * size_of(drafter))
    return types.SimpleNamespace(passes=[ROUNDS])

  monkeypatch.setattr(drafters, "generate", generated)
  monkeypatch.setattr(drafters.time, "perf_counter", lambda: now[0])
  given = DRAFTERS[name]()
  found = drafters.timed(given, *target(), [1, 2])
  size = size_of(given)
  assert size_of(found) == size
  assert found.overhead + found.cost * size == pytest.approx(OVERHEAD + COST * size)
  if name == "a chain":
    assert (found.overhead, found.cost) == (OVERHEAD, COST)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Medusa", "a tree of a decoder"])
def test_rounds_of_trees_are_timed(name):
  found = drafters.timed(DRAFTERS[name](), *target(), [1, 2])
  assert 0 < found.cost < 1
  assert found.tree == TREE
