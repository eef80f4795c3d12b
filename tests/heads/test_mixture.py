"""The mixture of softmaxes keeps the contract, and its rank is above that of a linear head."""

from typing import ClassVar

import jax
import numpy as np

from tests import reference
from tests.heads.narrow import NarrowContract, exact
from tests.jitted import random_variables, results, run
from vqjax import MixtureHead


class TestMixtureHead(NarrowContract):
  cases: ClassVar = {
    "bias": lambda v, d: MixtureHead(v, d, 3, use_bias=True),
    "one component": lambda v, d: MixtureHead(v, d, 1),
    "narrow": lambda v, d: MixtureHead(v, d, 2, width=5),
  }
  mesh_cases: ClassVar = ("bias",)

  def reference_logits(self, head, variables, hidden, rounded=exact):
    params = variables["params"]
    prior = reference.log_softmax(hidden @ params["prior"].T)
    vectors = np.tanh(hidden @ params["project"].T + params["offset"])
    vectors = vectors.reshape(*hidden.shape[:-1], head.components, head.width or head.dim)
    scores = rounded(vectors) @ params["weight"].T + params.get("bias", 0.0)
    return np.log(np.exp(prior[..., None] + reference.log_softmax(scores)).sum(axis=-2))


def rank(head):
  hidden = 3 * np.random.default_rng(0).standard_normal((60, 4), np.float32)
  logits = results(head.apply, random_variables(head), hidden)
  values = np.linalg.svd(reference.log_softmax(logits), compute_uv=False)
  return (values > 1e-4 * values[0]).sum()


def test_a_removed_token_has_no_part_in_the_logits_and_their_gradient():
  head = MixtureHead(9, 4, 3, use_bias=True)
  variables = random_variables(head)
  variables["params"]["bias"][4] = -np.inf

  def program(own, hidden):
    return own.logits(hidden), jax.grad(lambda h: own.logits(h)[:, 0].sum())(hidden)

  logits, gradient = run(head, variables, program, np.ones((2, 4), np.float32))
  np.testing.assert_allclose(np.exp(logits).sum(-1), 1, rtol=1e-6)
  assert np.isneginf(logits[:, 4]).all()
  assert np.isfinite(gradient).all()
