"""Does the dense head keep the contract, free and tied?"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.contract import HeadContract
from vqjax import DenseEmbedding, DenseHead


class TestDenseHead(HeadContract):
  cases: ClassVar = {
    "plain": DenseHead,
    "bias": lambda v, d: DenseHead(v, d, use_bias=True),
    "tied": lambda v, d: DenseHead(v, d, use_bias=True, embedding=DenseEmbedding(v, d)),
  }
  mesh_cases: ClassVar = ("tied",)

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
    return hidden @ weight.T + params.get("bias", 0.0)


def test_tying_shares_one_table_and_its_gradient_has_both_parts():
  class Model(nn.Module):
    embedding: nn.Module
    head: nn.Module

    def __call__(self, tokens, targets):
      return self.head.log_prob(self.embedding(tokens), targets)

  embedding = DenseEmbedding(7, 4)
  model = Model(embedding, DenseHead(7, 4, embedding=embedding))
  tokens, targets = jnp.array([1, 2]), jnp.array([3, 3])
  variables = model.init(jax.random.key(0), tokens, targets)
  assert jax.tree.map(jnp.shape, variables) == {"params": {"embedding": {"weight": (7, 4)}}}
  gradient = jax.grad(lambda v: model.apply(v, tokens, targets).sum())(variables)
  weight = np.asarray(variables["params"]["embedding"]["weight"], np.float64)

  def loss(table):
    logits = table[np.asarray(tokens)] @ table.T
    return (logits[:, 3] - np.log(np.exp(logits).sum(-1))).sum()

  expected = np.zeros_like(weight)
  for place in np.ndindex(weight.shape):
    step = np.zeros_like(weight)
    step[place] = 1e-5
    expected[place] = (loss(weight + step) - loss(weight - step)) / 2e-5
  np.testing.assert_allclose(gradient["params"]["embedding"]["weight"], expected, atol=1e-5)


def test_a_tied_embedding_of_another_size_is_refused():
  head = DenseHead(7, 4, embedding=DenseEmbedding(8, 4))
  with pytest.raises(ValueError, match="vocab 7 and dim 4 is tied to an embedding of vocab 8"):
    head.init(jax.random.key(0), jnp.zeros((1, 4)))


def test_the_initialiser_may_carry_partitioning():
  init = nn.with_partitioning(nn.initializers.normal(0.02), ("model", None))
  variables = DenseHead(7, 4, weight_init=init).init(jax.random.key(0), jnp.zeros((1, 4)))
  assert variables["params"]["weight"].names == ("model", None)
