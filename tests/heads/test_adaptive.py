"""The adaptive head keeps the contract and agrees with PyTorch's adaptive softmax."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.heads.narrow import NarrowContract, exact
from tests.jitted import abstract_variables, random_variables, results
from vqjax import AdaptiveHead


class TestAdaptiveHead(NarrowContract):
  cases: ClassVar = {
    "two clusters": lambda v, d: AdaptiveHead(v, d, (v // 10, v // 2), factor=2),
    "one cluster": lambda v, d: AdaptiveHead(v, d, (v // 3,)),
    "clusters of one token": lambda v, d: AdaptiveHead(v, d, (1, v // 3, v - 1), factor=2),
  }
  mesh_cases: ClassVar = ("two clusters",)

  def reference_logits(self, head, variables, hidden, rounded=exact):
    """The formula of torch.nn.AdaptiveLogSoftmaxWithLoss, cluster by cluster."""
    params = variables["params"]
    first = head.cutoffs[0]
    log_head = reference.log_softmax(hidden @ params["head"].T)
    found = [log_head[..., :first]]
    for i in range(len(head.cutoffs)):
      scores = rounded(hidden @ params[f"down_{i}"].T) @ params[f"tail_{i}"].T
      found.append(log_head[..., [first + i]] + reference.log_softmax(scores))
    return np.concatenate(found, axis=-1)


def test_the_shapes_are_those_of_pytorch():
  variables = abstract_variables(AdaptiveHead(1001, 100, (20, 200, 1000), factor=4))
  assert {name: x.shape for name, x in variables["params"].items()} == {
    "head": (23, 100),
    "down_0": (25, 100),
    "down_1": (6, 100),
    "down_2": (1, 100),
    "tail_0": (180, 25),
    "tail_1": (800, 6),
    "tail_2": (1, 1),
  }


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("inside", [0, 256, 257, 2003])
def test_any_number_of_tokens_in_a_cluster_is_scored_and_has_its_gradient(inside):
  # A chunk is 256 of 2003 tokens: none, part of one, whole ones and all of them.
  head = AdaptiveHead(60, 8, (7, 30), factor=2)
  rng = np.random.default_rng(0)
  tokens = np.concatenate([rng.integers(30, 60, inside), rng.integers(0, 30, 2003 - inside)])
  tokens = rng.permutation(tokens).astype(np.int32)
  hidden, cotangent = (rng.standard_normal(shape, np.float32) for shape in ((2003, 8), 2003))

  def score(variables, hidden):
    log_prob = head.apply(variables, hidden, tokens, method="log_prob")
    return (log_prob * cotangent).sum(), log_prob

  def plain(variables, hidden):
    logits = head.apply(variables, hidden, method="logits")
    log_prob = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    return (log_prob * cotangent).sum(), log_prob

  found, expected = results(
    lambda *given: [jax.grad(f, (0, 1), has_aux=True)(*given) for f in (score, plain)],
    *(random_variables(head), hidden),
  )
  # Sums over up to 2003 tokens in float32.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), found, expected)


def test_a_cluster_without_tokens_is_not_scored():
  head = AdaptiveHead(50, 8, (10, 30), factor=2)
  hidden = np.random.default_rng(0).standard_normal((5, 8), np.float32)
  params = random_variables(head)["params"]
  # Were it scored, not even a cotangent of zero would keep these out of the gradient.
  params |= {"tail_1": np.full_like(params["tail_1"], np.nan)}
  tokens = np.array([0, 9, 10, 29, 3])
  loss = lambda p: head.apply({"params": p}, hidden, tokens, method="log_prob").sum()
  value, gradient = results(jax.value_and_grad(loss), params)
  assert np.isfinite(value)
  assert not gradient["tail_1"].any()
  assert not gradient["down_1"].any()
  assert gradient["tail_0"].any()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
