"""The grouped heads keep the contract for any number, sizes and order of groups."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract
from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import abstract_variables, random_variables, results
from vqjax import GroupedHead, UnsharedGroupedHead


def uneven(vocab):
  """One token alone, then groups of 11, 3, 5, 11, ... ninetieths of the vocabulary."""
  sizes, unit = [1], max(1, vocab // 90)
  while (rest := vocab - sum(sizes)) > 0:
    sizes.append(min(rest, unit * (5, 11, 3)[len(sizes) % 3]))
  return tuple(sizes)


def shuffled(key, shape, dtype):
  """A random order of the tokens."""
  return jax.random.permutation(key, shape[0]).astype(dtype)


def log_groups(head, variables, hidden):
  """float64 log-probabilities of the groups."""
  params = variables["params"]
  scores = hidden @ params["group_weight"].T + params.get("group_bias", 0.0)
  return reference.log_softmax(scores)


def by_group(head, variables, hidden, scores):
  """float64 log-probabilities of the tokens, from scores [*B, V] of the slots."""
  log_group = log_groups(head, variables, hidden)
  group, _, starts = positions(head)
  own = scores - np.logaddexp.reduceat(scores, starts, axis=-1)[..., group]
  found = np.empty_like(scores)
  found[..., variables.get("codes", {}).get("order", np.arange(head.vocab))] = (
    log_group[..., group] + own
  )
  return found


def positions(head):
  """The group and the slot of each position, and the first position of each group."""
  sizes = head.sizes
  if sizes is None:
    groups = head.groups or math.isqrt(head.vocab)
    sizes = np.diff([head.vocab * g // groups for g in range(groups + 1)])
  group, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
  return group, np.arange(head.vocab) - starts[group], starts


class TestGroupedHead(RepresentativeContract):
  cases: ClassVar = {
    "default": GroupedHead,
    "a group each": lambda v, d: GroupedHead(v, d, groups=v),
    "one group": lambda v, d: GroupedHead(v, d, groups=1),
    "in an order": lambda v, d: GroupedHead(
      v, d, sizes=uneven(v), order_init=shuffled, use_bias=True
    ),
  }
  mesh_cases: ClassVar = ("in an order",)

  def reference_logits(self, head, variables, hidden):
    """Section 2.3.2, in float64."""
    params, (group, slot, _) = variables["params"], positions(head)
    shared = hidden @ params["slot_weight"].T + params.get("slot_bias", 0.0)
    scores = shared[..., slot] * params["scale"][group, slot] + params["shift"][group, slot]
    return by_group(head, variables, hidden, scores)

  @pytest.mark.parametrize("vocab", [4099])
  def test_no_value_of_batch_times_vocabulary_is_made(self, case, vocab):
    if case == "one group":  # a softmax over S = V slots: nothing is saved
      assert self.cases[case](vocab, self.dim).groups_and_slots() == (1, vocab)
    else:
      super().test_no_value_of_batch_times_vocabulary_is_made(case, vocab)


class TestUnsharedGroupedHead(HeadContract):
  cases: ClassVar = {
    "default": UnsharedGroupedHead,
    "in an order": lambda v, d: UnsharedGroupedHead(
      v, d, sizes=uneven(v), order_init=shuffled, use_bias=True
    ),
  }
  mesh_cases: ClassVar = ("in an order",)

  def reference_logits(self, head, variables, hidden):
    """Figure 4: a linear layer for each group."""
    params, (group, slot, _) = variables["params"], positions(head)
    scores = hidden @ params["slot_weight"][group, slot].T
    if head.use_bias:
      scores = scores + params["slot_bias"][group, slot]
    return by_group(head, variables, hidden, scores)


@pytest.mark.parametrize("head", [GroupedHead, UnsharedGroupedHead])
def test_an_order_is_kept_with_its_inverse(head):
  assert set(abstract_variables(head(11, 4))) == {"params"}
  order = np.array([3, 0, 10, 2, 1, 4, 9, 8, 7, 6, 5])
  given = head(11, 4, sizes=(2, 9), order_init=lambda key, shape, dtype: jnp.asarray(order))
  variables = random_variables(given)
  np.testing.assert_array_equal(variables["codes"]["order"], order)
  np.testing.assert_array_equal(order[variables["codes"]["position"]], np.arange(11))
  group_of = lambda v, tokens: given.apply(v, tokens, method="group_of")
  group = results(group_of, variables, np.array([3, 0, 10, 5, 11, -1]))
  assert group.tolist() == [0, 0, 1, 1, -1, -1]
  assert given.size().state_bytes == sum(x.nbytes for x in jax.tree.leaves(variables))


def test_groups_sizes_and_orders_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"groups.*12"):
    GroupedHead(11, 4, groups=12).size()
  with pytest.raises(ValueError, match="`sizes` must be at least 1; got 0 for group 1"):
    GroupedHead(11, 4, sizes=(5, 0, 6)).size()
  twice = GroupedHead(4, 4, order_init=lambda key, shape, dtype: jnp.array([0, 1, 1, 3]))
  with pytest.raises(ValueError, match=r"order.*token 1 .*1 and 2.*token 2"):
    twice.init(jax.random.key(0), jnp.zeros((1, 4)))


def test_no_probability_falls_on_a_slot_that_no_token_has():
  head = GroupedHead(10, 4, groups=4)  # sizes 2, 3, 2, 3
  variables = random_variables(head)
  shift = variables["params"]["shift"].copy()
  shift[:, 2] = 50.0  # absent in groups 0 and 2
  variables = {"params": variables["params"] | {"shift": shift}}
  draw = lambda v: head.apply(v, jnp.ones((500, 4)), jax.random.key(1), method="sample")
  seen = set(results(draw, variables).tolist())
  assert seen <= set(range(10))
  assert seen & {0, 1}


def test_many_rows_are_decoded_by_the_best_slot_of_each_group_also_on_a_mesh():
  vocab, rows = 307, 17
  head = GroupedHead(vocab, 8, sizes=uneven(vocab), order_init=shuffled, use_bias=True)
  hidden = 2 * np.random.default_rng(0).standard_normal((rows, 8), np.float32)
  variables = random_variables(head)
  best = lambda head: lambda v, h: head.apply(v, h, 40, method="top_k")
  here, logits = results(lambda *a: (best(head)(*a), head.apply(*a)), variables, hidden)
  with jax.set_mesh(jax.make_mesh((1, 8), ("data", "model"))):
    there = results(best(head.clone(vocab_axis="model")), variables, hidden)
  expected = np.sort(reference.log_softmax(logits))[:, ::-1][:, :40]
  for log_probs, tokens in (here, there):
    np.testing.assert_allclose(log_probs, expected, atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(logits, tokens, -1), log_probs, atol=2e-5)
    assert all(len(set(row)) == 40 for row in tokens)
