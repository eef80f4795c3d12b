"""Does the grouped head keep the contract at any number of groups?"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract, OneDeviceContract
from vqjax import GroupedHead


class TestGroupedHead(HeadContract):
  cases: ClassVar = {
    "default": GroupedHead,
    "bias": lambda v, d: GroupedHead(v, d, use_bias=True),
    "a group each": lambda v, d: GroupedHead(v, d, groups=v),
    "ragged": lambda v, d: GroupedHead(v, d, groups=7, use_bias=True),
  }
  mesh_cases: ClassVar = ("default", "ragged")

  def reference_logits(self, head, variables, hidden):
    """Section 2.3.2, group by group."""
    params = variables["params"]
    groups = params["group_weight"].shape[0]
    log_group = reference.log_softmax(
      hidden @ params["group_weight"].T + params.get("group_bias", 0.0)
    )
    shared = hidden @ params["slot_weight"].T + params.get("slot_bias", 0.0)
    parts = []
    for g in range(groups):
      size = head.vocab * (g + 1) // groups - head.vocab * g // groups
      scores = (shared * params["scale"][g] + params["shift"][g])[..., :size]
      parts.append(log_group[..., g : g + 1] + reference.log_softmax(scores))
    return np.concatenate(parts, axis=-1)


class TestOneGroup(OneDeviceContract):
  """One group is the whole vocabulary: a softmax over S = V slots, and nothing is saved."""

  cases: ClassVar = {"one group": lambda v, d: GroupedHead(v, d, groups=1)}
  reference_logits = TestGroupedHead.reference_logits

  @pytest.mark.parametrize("vocab", [4099])
  def test_no_value_of_batch_times_vocabulary_is_made(self, case, vocab):
    assert self.cases[case](vocab, self.dim).groups_and_slots() == (1, vocab)


def test_the_bounds_are_those_of_the_paper():
  vocab, groups = 50257, 224
  starts = GroupedHead(vocab, 8).starts
  assert starts[0] == 0
  assert starts[-1] == vocab
  assert len(starts) == groups + 1
  assert [starts[g] for g in (1, 100, 223)] == [vocab * g // groups for g in (1, 100, 223)]


def test_the_parameters_are_those_of_the_papers_classifier():
  # 9,531,392 parameters are the convolutions'; 10,340,999 is the paper's total (Appendix C).
  head = GroupedHead(184_320, 512, use_bias=True)
  assert head.groups_and_slots() == (429, 430)
  assert head.size().params == 10_340_999 - 9_531_392


@pytest.mark.parametrize("groups", [0, 12])
def test_groups_outside_the_vocabulary_are_refused(groups):
  with pytest.raises(ValueError, match=f"groups {groups} for a vocabulary of 11; give 1 to 11"):
    GroupedHead(11, 4, groups=groups).init(jax.random.key(0), jnp.zeros((1, 4)))


def test_no_probability_falls_on_a_slot_that_no_token_has():
  head = GroupedHead(10, 4, groups=4)  # sizes 2, 3, 2, 3
  variables = head.init(jax.random.key(0), jnp.zeros((1, 4)))
  shift = variables["params"]["shift"].at[:, 2].set(50.0)  # absent in groups 0 and 2
  variables = {"params": variables["params"] | {"shift": shift}}
  draws = head.apply(variables, jnp.ones((500, 4)), jax.random.key(1), method="sample")
  seen = set(np.asarray(draws).tolist())
  assert seen <= set(range(10))
  assert seen & {0, 1}
