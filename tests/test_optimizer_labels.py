"""Labels tell optimisers which arrays are matrices, in Linen and NNX models alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from vqjax import CodebookHead, DenseEmbedding, GroupedHead, LowRankHead, optimizer_labels
from vqjax import nnx as layers

V, D = 31, 8


class LinenModel(nn.Module):
  head: nn.Module

  def setup(self):
    self.embedding = DenseEmbedding(V, D)
    self.norm = nn.LayerNorm()
    self.body = nn.Dense(D)

  def __call__(self, tokens):
    hidden = self.norm(self.body(self.embedding(tokens)))
    return -self.head.log_prob(hidden, tokens).mean()


class NNXModel(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(V, D, rngs=rngs)
    self.body = nnx.Linear(D, D, rngs=rngs)
    self.head = layers.CodebookHead(V, D, 7, token_bias=True, rngs=rngs)

  def __call__(self, tokens):
    return -self.head.log_prob(self.body(self.embed(tokens)), tokens).mean()


def linen_variables(head):
  shapes = jax.eval_shape(LinenModel(head).init, jax.random.key(0), np.arange(3))
  return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)


def test_kernels_are_matrices_and_what_has_rows_of_tokens_or_codes_is_not():
  labels = optimizer_labels(linen_variables(CodebookHead(V, D, 7, token_bias=True)))
  assert labels == {
    "params": {
      "body": {"bias": "vector", "kernel": "matrix"},
      "embedding": {"weight": "table"},
      "head": {"codebook": "table", "token_bias": "vector"},
      "norm": {"bias": "vector", "scale": "vector"},
    },
    "codes": {"head": {"assignment": "codes"}},
  }
  own = lambda head: optimizer_labels(linen_variables(head))["params"]["head"]
  assert set(own(LowRankHead(V, D, 2)).values()) == {"table"}
  grouped = own(GroupedHead(V, D))
  assert {name for name, label in grouped.items() if label == "vector"} == {"scale", "shift"}


def test_biases_and_gains_of_scanned_blocks_are_vectors():
  stacked = {"blocks": {"norm": {"scale": np.ones((3, D))}, "mlp": {"kernel": np.ones((3, D, D))}}}
  labels = {"norm": {"scale": "vector"}, "mlp": {"kernel": "matrix"}}
  assert optimizer_labels(stacked) == {"blocks": labels}


RULES = {
  "matrix": optax.contrib.muon(1e-2),
  "table": optax.adam(1e-3),
  "vector": optax.sgd(1e-1),
  "codes": optax.set_to_zero(),
}


def test_muon_moves_the_kernels_and_adam_the_tables():
  params = linen_variables(CodebookHead(V, D, 7))["params"]
  rule, gradient = optax.multi_transform(RULES, optimizer_labels), jax.tree.map(np.copy, params)
  gradient["body"]["kernel"] = np.random.default_rng(0).normal(size=(D, D)).astype(np.float32)

  @jax.jit
  def step(params, gradient):
    return rule.update(gradient, rule.init(params), params)[0]

  updates = jax.device_get(step(params, gradient))
  for table in (updates["embedding"]["weight"], updates["head"]["codebook"]):
    # The first step of Adam is its rate.
    np.testing.assert_allclose(table, -1e-3, rtol=1e-3)
  np.testing.assert_allclose(updates["norm"]["scale"], -0.1, rtol=1e-6)
  singular = np.linalg.svd(updates["body"]["kernel"] / 1e-2, compute_uv=False)
  # Muon's polynomial brings singular values near 1.
  assert 0.5 < singular.min() <= singular.max() < 1.5


@pytest.mark.programs(40)  # NNX creates its variables operation by operation
def test_an_nnx_optimizer_takes_labels_and_masks_of_weight_decay():
  model = NNXModel(nnx.Rngs(0))
  decayed = lambda params: jax.tree.map("matrix".__eq__, optimizer_labels(params))
  assert sorted(jax.tree.leaves(optimizer_labels(nnx.state(model)))) == [
    *["codes"], "matrix", *["table"] * 2, *["vector"] * 2,
  ]  # fmt: skip
  before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  rule = optax.chain(optax.add_decayed_weights(0.5, decayed), optax.scale(-1.0))
  optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)
  labelled = optax.multi_transform(RULES, optimizer_labels)

  @nnx.jit
  def step(model, optimizer):
    params = nnx.state(model, nnx.Param)
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer.update(model, zero)
    labelled.update(zero, labelled.init(params), params)

  step(model, optimizer)
  after = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  np.testing.assert_allclose(after["body"]["kernel"], before["body"]["kernel"] / 2, rtol=1e-6)
  np.testing.assert_array_equal(after["head"]["codebook"], before["head"]["codebook"])
  np.testing.assert_array_equal(after["embed"]["embedding"], before["embed"]["embedding"])
