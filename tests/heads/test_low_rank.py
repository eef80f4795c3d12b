"""The low-rank head keeps the contract and has the parameters of two factors."""

from typing import ClassVar

from tests.heads.narrow import NarrowContract, exact
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
