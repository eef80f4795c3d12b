"""Encoder and free quantisers follow their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from tests.quantizers.small import D, K, M, N, apply, in_float64, made, trained, vectors
from vqjax import DPQEmbedding
from vqjax.quantizers import EncoderQuantizer, FreeQuantizer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"additive": True}, {"shared": True}, {"hidden": 4}])
def test_the_encoder_is_two_layers_and_a_softplus(options):
  quantizer = EncoderQuantizer(K, M, D, normalize=False, **options)
  variables, found = made(quantizer)
  p = in_float64(variables["params"])
  inner = np.tanh(in_float64(vectors()) @ p["inner_kernel"] + p["inner_bias"])
  assert inner.shape[1] == options.get("hidden", M * K // 2)
  scores = np.log1p(np.exp(inner @ p["outer_kernel"] + p["outer_bias"])).reshape(N, M, K)
  codes = scores.argmax(axis=-1)
  values = np.broadcast_to(p["values"], (M, *p["values"].shape[1:]))
  parts = values[np.arange(M), codes]
  rows = parts.mean(axis=1) if quantizer.additive else parts.reshape(N, D)
  np.testing.assert_array_equal(found.codes, codes)
  np.testing.assert_allclose(found.vectors, rows, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("additive", [False, True])
def test_free_codes_are_the_largest_of_a_tokens_own_numbers(additive):
  quantizer = FreeQuantizer(K, M, M * K, value_dim=D, additive=additive, normalize=False)
  embedding = DPQEmbedding(N, D, quantizer)
  variables = jitted.init(embedding, jax.random.key(0), np.arange(N))
  own = np.asarray(variables["params"]["query"]).reshape(N, M, K)
  values = np.asarray(variables["params"]["quantizer"]["values"])
  parts = values[np.arange(M), own.argmax(axis=-1)]
  rows = parts.mean(axis=1) if additive else parts.reshape(N, D)
  found = apply(embedding, variables, np.arange(N))
  np.testing.assert_allclose(found, rows, rtol=1e-6)
  np.testing.assert_array_equal(embedding.compact(variables)(jnp.arange(N)), found)


@pytest.mark.slow
@pytest.mark.parametrize(
  "quantizer",
  [
    EncoderQuantizer(K, M, D, gumbel=1.0, forward_temperature=1.0),
    FreeQuantizer(K, M, M * K, value_dim=D),
  ],
)
def test_every_parameter_has_a_gradient_and_named_axes(quantizer):
  x = vectors((N, quantizer.dim))
  variables, _ = made(quantizer, x)

  def loss(params, x):
    found, _ = trained(quantizer, variables | {"params": params}, x)
    return (found.vectors * jnp.arange(D)).sum()

  gradient = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(variables["params"], x))
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
  ranks = jax.tree.map(len, quantizer.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
  assert ranks == jax.tree.map(np.ndim, variables)


@pytest.mark.parametrize("fields", [{"dim": M * K + 1}, {"value_dim": None}])
def test_free_codes_of_another_width_are_refused(fields):
  quantizer = FreeQuantizer(**({"dim": M * K, "codes": K, "subspaces": M, "value_dim": D} | fields))
  with pytest.raises(ValueError, match=r"`(dim|subspaces|value_dim)`"):
    made(quantizer, np.zeros((2, quantizer.dim)))
