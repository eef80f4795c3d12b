"""Heads with fixed codes have the distribution of the heads that were trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import CentroidQuantizer, CompactEmbedding, DenseHead, DPQEmbedding, SoftmaxQuantizer
from vqjax.convert import to_head

V, D, K, M = 53, 12, 6, 3


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", [SoftmaxQuantizer, CentroidQuantizer])
def test_the_head_of_a_compact_embedding_has_the_distribution_of_the_tied_head(
  kind, shared, use_bias, tmp_path
):
  embedding = DPQEmbedding(V, D, kind(K, M, shared=shared))
  trained = DenseHead(V, D, use_bias=use_bias, embedding=embedding)
  hidden, tokens = jax.random.normal(jax.random.key(4), (2, 9, D)), jnp.arange(18).reshape(2, 9)
  variables = trained.init(jax.random.key(0), hidden, tokens, method="log_prob")
  bias = jax.random.normal(jax.random.key(1), (V,)) if use_bias else None
  if use_bias:
    variables["params"]["bias"] = bias
  own = {name: trees["embedding"] for name, trees in variables.items()}
  embedding.compact(own).save(tmp_path / "small.safetensors")
  head, converted = to_head(CompactEmbedding.load(tmp_path / "small.safetensors"), bias)
  fresh = jax.eval_shape(head.init, jax.random.key(0), hidden)
  assert jax.tree.map(lambda x: x.shape, converted) == jax.tree.map(lambda x: x.shape, fresh)
  found = head.apply(converted, hidden, tokens, method="log_prob")
  expected = trained.apply(variables, hidden, tokens, method="log_prob")
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_additive_codes_are_refused():
  embedding = DPQEmbedding(V, D, SoftmaxQuantizer(K, M, additive=True))
  small = embedding.compact(embedding.init(jax.random.key(0), jnp.zeros(1, int)))
  with pytest.raises(ValueError, match=r"`small.additive` must be False"):
    to_head(small)
