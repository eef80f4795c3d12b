"""Heads with fixed codes have the distribution of the heads that were trained."""

import jax
import numpy as np
import pytest

from tests import jitted
from vqjax import (
  CentroidQuantizer,
  CompactEmbedding,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  SoftmaxQuantizer,
)
from vqjax import nnx as vqjax_nnx
from vqjax.convert import head_of, to_head
from vqjax.lm.models import Transformer

V, D, K, M = 53, 12, 6, 3


@pytest.mark.programs(80)  # `to_head` runs operation by operation
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
  ("quantizer", "use_bias"),
  [
    (SoftmaxQuantizer(K, M, shared=True), True),
    (SoftmaxQuantizer(K, M), False),
    (CentroidQuantizer(K, M), True),
    (CentroidQuantizer(K, M, shared=True), False),
  ],
)
def test_the_head_of_a_compact_embedding_has_the_distribution_of_the_tied_head(
  quantizer, use_bias, tmp_path
):
  embedding = DPQEmbedding(V, D, quantizer)
  trained = DenseHead(V, D, use_bias=use_bias, embedding=embedding)
  rng = np.random.default_rng(4)
  hidden, tokens = rng.normal(size=(2, 9, D)).astype(np.float32), np.arange(18).reshape(2, 9)
  variables = jitted.init(trained, jax.random.key(0), hidden, tokens, method="log_prob")
  bias = rng.normal(size=V).astype(np.float32) if use_bias else None
  if use_bias:
    variables["params"]["bias"] = bias
  own = {name: trees["embedding"] for name, trees in variables.items()}
  embedding.compact(own).save(tmp_path / "small.safetensors")
  head, converted = to_head(CompactEmbedding.load(tmp_path / "small.safetensors"), bias)
  fresh = jax.eval_shape(head.init, jax.random.key(0), hidden)
  assert jax.tree.map(lambda x: x.shape, converted) == jax.tree.map(lambda x: x.shape, fresh)
  found = jitted.apply(head, converted, hidden, tokens, method="log_prob")
  expected = jitted.apply(trained, variables, hidden, tokens, method="log_prob")
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_additive_codes_are_refused():
  embedding = DPQEmbedding(V, D, SoftmaxQuantizer(K, M, additive=True))
  small = embedding.compact(jitted.init(embedding, jax.random.key(0), np.zeros(1, int)))
  with pytest.raises(ValueError, match=r"`small.additive` must be False"):
    to_head(small)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_of_a_model_stands_by_itself_in_linen_and_nnx(is_tied):
  embedding = DenseEmbedding(V, D)
  head = DenseHead(V, D, use_bias=True, embedding=embedding if is_tied else None)
  options = {"dim": D, "layers": 1, "heads": 2, "context": 8}
  model = Transformer(embedding=embedding, head=head, **options)
  tokens = np.arange(16).reshape(2, 8)
  variables = jitted.init(model, jax.random.key(0), tokens)
  alone, own = head_of(model, variables)

  @jax.jit
  def both(variables, own, tokens):
    hidden = model.apply(variables, tokens, method="hidden")
    layer = vqjax_nnx.from_linen(alone, own)
    expected = model.apply(variables, tokens)
    return expected, alone.apply(own, hidden), layer.logits(hidden)

  expected, *found = both(variables, own, tokens)
  for logits in found:
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
  with pytest.raises(TypeError, match=r"got a Transformer.*convert.head_of"):
    vqjax_nnx.from_linen(model, variables)
