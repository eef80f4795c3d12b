"""The residual codebook head keeps the contract and starts as the codebook head."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tests import reference
from tests.contract import HeadContract
from tests.jitted import initial_variables, results
from vqjax import CodebookHead, assign
from vqjax.heads import ResidualCodebookHead


class TestResidualCodebookHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: ResidualCodebookHead(v, d, 17, 2, token_bias=True),
    "capped": lambda v, d: ResidualCodebookHead(v, d, v, 1, assign.FrequentAlone(), softcap=4.0),
  }

  def reference_logits(self, head, variables, hidden, rounded=lambda rows: rows):
    params, code = variables["params"], variables["codes"]["assignment"]
    rows = rounded(params["codebook"][code] + params["low"] @ params["up"])
    scores = hidden @ rows.T + params.get("token_bias", 0.0)
    return scores if head.softcap is None else head.softcap * np.tanh(scores / head.softcap)

  def bfloat16_logits(self, head, variables, hidden):
    """A row is rounded after its two parts are added, not before."""
    return self.reference_logits(head, variables, hidden, reference.in_bfloat16)


def test_it_starts_as_the_codebook_head_and_learns_to_distinguish_tokens_of_a_code():
  hidden = np.random.default_rng(0).standard_normal((5, 6), np.float32)
  head, plain = ResidualCodebookHead(20, 6, 4, 2), CodebookHead(20, 6, 4)

  def program(variables):
    codes = {"assignment": variables["codes"]["assignment"].astype(jnp.int32)}
    same = {"params": {"codebook": variables["params"]["codebook"]}, "codes": codes}
    loss = lambda v: -head.apply(v, hidden, jnp.arange(5), method="log_prob").mean()
    gradient = jax.grad(loss, allow_int=True)(variables)["params"]["low"]
    return head.apply(variables, hidden), plain.apply(same, hidden), gradient

  logits, expected, gradient = results(program, initial_variables(head))
  np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-6)
  assert (gradient != 0).any()
