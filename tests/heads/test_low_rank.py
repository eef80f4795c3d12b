"""The low-rank head keeps the contract and has the parameters of two factors."""

from typing import ClassVar

import numpy as np
import pytest

from tests.heads.narrow import NarrowContract, exact
from tests.jitted import random_variables, results
from vqjax import LowRankHead


class TestLowRankHead(NarrowContract):
  cases: ClassVar = {
    "bias": lambda v, d: LowRankHead(v, d, 5, use_bias=True),
    "rank one": lambda v, d: LowRankHead(v, d, 1),
    "full rank": lambda v, d: LowRankHead(v, d, d),
  }
  mesh_cases: ClassVar = ("bias",)

  def reference_logits(self, head, variables, hidden, rounded=exact):
    params = variables["params"]
    return rounded(hidden @ params["down"].T) @ params["weight"].T + params.get("bias", 0.0)


def test_the_logits_have_no_higher_rank():
  head = LowRankHead(31, 12, 4)
  hidden = np.random.default_rng(0).standard_normal((50, 12), np.float32)
  logits = results(head.apply, random_variables(head), hidden)
  assert np.linalg.matrix_rank(logits.astype(np.float64), tol=1e-3) == 4


def test_the_parameters_are_those_of_the_two_factors():
  assert LowRankHead(267_735, 768, 512).size().params == 137_473_536


@pytest.mark.parametrize(("rank", "vocab", "most"), [(0, 31, 12), (13, 31, 12), (8, 7, 7)])
def test_ranks_outside_their_range_are_refused(rank, vocab, most):
  with pytest.raises(ValueError, match=rf"`rank` .*\[1, {most}\].*{rank}"):
    LowRankHead(vocab, 12, rank).size()
