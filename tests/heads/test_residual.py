"""The residual codebook head keeps the contract and starts as the codebook head."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract, costly
from tests.contract_on_meshes import as_float64, perturbed
from vqjax import CodebookHead, assign
from vqjax.heads import ResidualCodebookHead


class TestResidualCodebookHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: ResidualCodebookHead(v, d, 17, 2, token_bias=True),
    "capped": lambda v, d: ResidualCodebookHead(v, d, v, 1, assign.FrequentAlone(), softcap=4.0),
  }

  def reference_logits(self, head, variables, hidden):
    params, code = variables["params"], variables["codes"]["assignment"]
    rows = params["codebook"][code] + params["low"] @ params["up"]
    scores = hidden @ rows.T + params.get("token_bias", 0.0)
    return scores if head.softcap is None else head.softcap * np.tanh(scores / head.softcap)

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, case, hidden, tokens):
    """A row is rounded after its two parts are added, not before."""
    head = self.cases[case](self.vocab, self.dim).clone(dtype=jnp.bfloat16)
    variables = perturbed(head.init(jax.random.key(1), hidden))
    params, code = as_float64(variables)["params"], variables["codes"]["assignment"]
    rows = params["codebook"][code] + params["low"] @ params["up"]
    rows = np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float64)
    low = hidden.astype(jnp.bfloat16)
    found = head.apply(variables, low, tokens, method="log_prob")
    scores = np.asarray(low, np.float64) @ rows.T + params["token_bias"]
    expected = np.take_along_axis(reference.log_softmax(scores), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.slow
def test_it_starts_as_the_codebook_head_and_learns_to_distinguish_tokens_of_a_code():
  hidden = jax.random.normal(jax.random.key(0), (5, 6))
  head, plain = ResidualCodebookHead(20, 6, 4, 2), CodebookHead(20, 6, 4)
  variables = head.init(jax.random.key(1), hidden)
  same = {"params": {"codebook": variables["params"]["codebook"]}, "codes": variables["codes"]}
  same["codes"] = {"assignment": same["codes"]["assignment"].astype(jnp.int32)}
  np.testing.assert_allclose(
    head.apply(variables, hidden), plain.apply(same, hidden), rtol=1e-6, atol=1e-6
  )
  tokens = jnp.array([0, 1, 2, 3, 4])
  loss = lambda p: -head.apply(variables | {"params": p}, hidden, tokens, method="log_prob").mean()
  gradient = jax.grad(loss)(variables["params"])
  assert (gradient["low"] != 0).any()


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_outside_the_width_is_refused(rank):
  with pytest.raises(ValueError, match=f"`rank` .*{rank}"):
    ResidualCodebookHead(20, 6, 4, rank).init(jax.random.key(0), jnp.ones((1, 6)))
