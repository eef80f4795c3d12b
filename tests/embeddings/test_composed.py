"""Composed and guided embeddings: vectors, sizes and gradients."""

import jax
import numpy as np
import pytest

from tests import jitted
from vqjax import (
  ComposedEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  Embedding,
  FreeQuantizer,
  GuidedEmbedding,
  SoftmaxQuantizer,
)

V, D = 23, 6


def kd_codes():
  free = FreeQuantizer(4, 3, 12, value_dim=5, additive=True, normalize=False)
  return DPQEmbedding(V, 5, free)


CASES = {
  "composed": ComposedEmbedding(V, D, kd_codes(), hidden=7),
  "guided": GuidedEmbedding(V, D, DenseEmbedding(V, D)),
  "guided, composed": GuidedEmbedding(V, D, ComposedEmbedding(V, D, kd_codes(), hidden=7)),
}


def made(embedding: Embedding):
  return jitted.init(embedding, jax.random.key(0), np.zeros(1, np.int32))


def test_the_inference_size_is_codes_values_and_layers():
  layers = 7 * (5 + 1) + D * (7 + 1)
  values, codes = 3 * 4 * 5, -(-V * 3 * 2 // 8)
  for name in ("composed", "guided, composed"):
    shipped = CASES[name].inference_size()
    assert shipped.params == values + layers
    assert shipped.state_bytes == 4 * (values + layers) + codes
  assert CASES["guided"].inference_size() == DenseEmbedding(V, D).size()


@pytest.mark.slow
def test_the_composer_is_two_layers():
  embedding = CASES["composed"]
  variables = made(embedding)
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
  tokens = np.arange(V)
  inner = jitted.apply(embedding.inner, {"params": variables["params"]["inner"]}, tokens)
  first, second = params["first"], params["second"]
  hidden = np.tanh(np.asarray(inner, np.float64) @ first["kernel"] + first["bias"])
  expected = hidden @ second["kernel"] + second["bias"]
  np.testing.assert_allclose(jitted.apply(embedding, variables, tokens), expected, atol=1e-6)


def test_the_guide_moves_the_student_and_padding_contributes_nothing():
  embedding = GuidedEmbedding(V, D, DenseEmbedding(V, D), weight=0.5)
  variables = made(embedding)
  guide = np.random.default_rng(1).normal(size=(V, D)).astype(np.float32)
  variables = {**variables, "guide": {"table": guide}}
  tokens = np.array([4, 9, 4, -1])

  def term(params):
    given = {**variables, "params": params}
    return embedding.apply(given, tokens, False, method="loss_terms")[1]["guide"]

  value, gradient = jax.jit(jax.value_and_grad(term))(variables["params"])
  weight = np.asarray(variables["params"]["student"]["weight"])
  apart = weight - guide
  expected = 0.5 * (apart[[4, 9, 4]] ** 2).sum() / 3
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  found = np.asarray(gradient["student"]["weight"])
  np.testing.assert_allclose(found[4], 2 * 0.5 * 2 * apart[4] / 3, rtol=1e-4)
  np.testing.assert_allclose(found[9], 0.5 * 2 * apart[9] / 3, rtol=1e-4)
  assert not np.any(np.delete(found, [4, 9], axis=0))


def test_an_embedding_sets_the_width_of_its_quantiser():
  for quantizer in (SoftmaxQuantizer(4, 3), FreeQuantizer(4, 3, additive=True)):
    embedding = DPQEmbedding(V, D, quantizer)
    assert embedding.quantizer.width == D
    vectors, _ = jax.eval_shape(embedding.init_with_output, jax.random.key(0), np.arange(3))
    assert vectors.shape == (3, D)
