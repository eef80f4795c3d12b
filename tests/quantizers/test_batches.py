"""Quantisers keep the statistics of their training batches, on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quantizers.small import (
  D,
  K,
  M,
  N,
  apply,
  in_float64,
  made,
  normal,
  trained,
  training_call,
  vectors,
)
from vqjax.ops import quantize
from vqjax.quantizers import CentroidQuantizer, SoftmaxQuantizer


@pytest.mark.slow
def test_running_statistics_follow_the_batches_and_are_used_afterwards():
  quantizer = SoftmaxQuantizer(K, M, D, momentum=0.9)
  variables, before = made(quantizer)
  _, written = trained(quantizer, variables, vectors())
  query = in_float64(vectors()).reshape(N, M, -1)
  scores = np.einsum("nmc,mkc->nmk", query, in_float64(variables["params"]["keys"]))
  stats = written["batch_stats"]
  np.testing.assert_allclose(stats["mean"], 0.1 * scores.mean(axis=(0, 1)), atol=1e-6)
  np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * scores.var(axis=(0, 1)), atol=1e-6)
  # Outside training nothing is written, and each vector is on its own.
  alone = apply(quantizer, variables, vectors()[:1])
  np.testing.assert_array_equal(alone, before.vectors[:1])


MASKED = [
  SoftmaxQuantizer(K, M, D),
  CentroidQuantizer(K, M, D, commitment=0.25),
  SoftmaxQuantizer(K, M, D, shared=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", MASKED)
def test_masked_vectors_contribute_nothing(quantizer):
  variables, _ = made(quantizer)
  x, mask = vectors(), np.arange(N) < 8
  far = np.where(mask[:, None], x, np.float32(1e6))
  found, written = jax.device_get(trained(quantizer, variables, far, mask))
  expected, wanted = jax.device_get(trained(quantizer, variables, x[:8]))
  np.testing.assert_allclose(found.vectors[:8], expected.vectors, atol=1e-6)
  assert not np.any(found.vectors[8:])
  for a, b in zip(jax.tree.leaves(found.terms), jax.tree.leaves(expected.terms), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), written, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", MASKED)
def test_masked_vectors_may_be_nan(quantizer):
  variables, _ = made(quantizer)
  mask = np.arange(N) < 8

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def run(params, x):
    found, written = trained(quantizer, variables | {"params": params}, x, mask)
    return (found.vectors**2).sum() + sum(found.terms.values(), 0.0), written

  params, fill = variables.get("params", {}), lambda x: np.where(mask[:, None], vectors(), x)
  found, expected = (run(params, fill(np.float32(x))) for x in (np.nan, 0))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", MASKED)
def test_a_batch_without_a_token_changes_nothing(quantizer):
  variables, _ = made(quantizer)
  nobody = np.zeros(N, bool)
  found, written = trained(quantizer, variables, vectors(), nobody)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, written)))
  jax.tree.map(np.testing.assert_array_equal, written, {name: variables[name] for name in written})
  loss = lambda p: sum(
    jax.tree.leaves(trained(quantizer, variables | {"params": p}, vectors(), nobody)[0].terms),
    jnp.zeros(()),
  )
  gradient = jax.device_get(jax.jit(jax.grad(loss))(variables.get("params", {})))
  assert all(not np.any(x) for x in jax.tree.leaves(gradient))


CUT = [
  SoftmaxQuantizer(K, M, D, gumbel=0.3),
  SoftmaxQuantizer(K, M, D, shared=True, forward_temperature=0.5),
  CentroidQuantizer(K, M, D, commitment=0.25),
  CentroidQuantizer(K, 4, D, additive=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("quantizer", "most"), [*((quantizer, 40) for quantizer in CUT), (CUT[0], K * M), (CUT[-1], 100)]
)
def test_chunks_of_tokens_equal_all_tokens_at_once(quantizer, most, monkeypatch):
  """Chunks of one token, of a divisor of the tokens and of another size; masked."""
  variables, _ = made(quantizer)
  weight = normal(8, N, D)

  def both(x):
    def loss(params, x):
      given = {**variables, "params": params}
      found, written = training_call(quantizer, given, x, jnp.arange(N) != 4)
      return (found.vectors * weight).sum() + sum(found.terms.values(), 0.0), (found, written)

    codes = quantizer.apply(variables, x, method="encode")
    return codes, jax.value_and_grad(loss, (0, 1), has_aux=True)(variables.get("params", {}), x)

  # A function of its own for each: one that is compiled is not traced again.
  whole, expected = jax.jit(lambda x: both(x))(vectors())
  monkeypatch.setattr(quantize.tiles, "most_scores", lambda: most)
  codes, found = jax.jit(lambda x: both(x))(vectors())
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), found, expected)
  np.testing.assert_array_equal(codes, whole)


def test_memory_of_training_does_not_grow_with_tokens_times_codes():
  quantizer = SoftmaxQuantizer(256, 32, 64)
  x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
  variables = jax.eval_shape(quantizer.init, jax.random.key(0), x)

  def loss(params, rest, x):
    found, _ = trained(quantizer, {**rest, "params": params}, x)
    return (found.vectors**2).sum()

  rest = {"batch_stats": variables["batch_stats"]}
  lowered = jax.jit(jax.grad(loss, (0, 2))).lower(variables["params"], rest, x)
  scores = 4 * 4096 * 256 * 32
  assert lowered.compile().memory_analysis().temp_size_in_bytes < scores / 4


def test_statistics_far_from_zero_lose_no_digits():
  """Distances near 1e4 differ by a few, which float32 mean squares would lose."""
  draw = np.random.default_rng(0)
  x = (50 + 0.02 * draw.normal(size=(N, D))).astype(np.float32)
  keys = np.float32(0.1 * draw.normal(size=(M, K, D // M)))
  respond = lambda query: quantize.euclidean_response(query, keys)
  run = jax.jit(lambda query: quantize.response_moments(respond, query, None, M * K))
  mean, var = run(x.reshape(N, M, -1))
  exact = -((in_float64(x).reshape(N, M, 1, -1) - in_float64(keys)) ** 2).sum(-1)
  np.testing.assert_allclose(mean, exact.mean(axis=(0, 1)), rtol=1e-6)
  np.testing.assert_allclose(var, exact.var(axis=(0, 1)), rtol=1e-2)
