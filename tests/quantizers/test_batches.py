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
from vqjax.quantizers import CentroidQuantizer, MovingAverage, Revival, SoftmaxQuantizer


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
  CentroidQuantizer(K, M, D, moving_average=MovingAverage(), revival=Revival(0.2)),
  SoftmaxQuantizer(K, M, D, shared=True, revival=Revival(0.9, decay=0.1)),
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
  # Which vectors are drawn depends on how many there are.
  place = written.get("revival", {}).pop("offset", None)
  if place is not None:
    wanted["revival"].pop("offset")
    assert np.abs(place).max() < 100
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


def test_moving_averages_are_those_of_van_den_oord():
  how = MovingAverage(decay=0.8, epsilon=0.1)
  quantizer = CentroidQuantizer(K, M, D, normalize=False, moving_average=how)
  variables, found = made(quantizer)
  _, written = trained(quantizer, variables, vectors())
  count, total = np.ones((M, K)), in_float64(variables["centroids"]["total"])
  one_hot = np.eye(K)[np.asarray(found.codes)]
  query = in_float64(vectors()).reshape(N, M, -1)
  count = 0.8 * count + 0.2 * one_hot.sum(axis=0)
  total = 0.8 * total + 0.2 * np.einsum("nmk,nmc->mkc", one_hot, query)
  np.testing.assert_allclose(written["centroids"]["count"], count, atol=1e-5)
  np.testing.assert_allclose(written["centroids"]["total"], total, atol=1e-5)
  n = count.sum(axis=1, keepdims=True)
  smooth = (count + 0.1) / (n + K * 0.1) * n
  centroids = apply(quantizer, variables | written, method="values")
  np.testing.assert_allclose(centroids, total / smooth[..., None], atol=1e-5)


REVIVED = [
  SoftmaxQuantizer(8, M, D, response=quantize.euclidean_response),
  SoftmaxQuantizer(8, M, D, response=quantize.euclidean_response, tied=True, shared=True),
  CentroidQuantizer(8, M, D),
  CentroidQuantizer(8, M, D, additive=True),
  CentroidQuantizer(8, M, D, moving_average=MovingAverage(epsilon=0.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", REVIVED)
def test_keys_that_no_vector_chooses_move_to_vectors_of_the_batch(quantizer):
  """All of eight keys but the first are far from every vector."""
  quantizer = quantizer.clone(normalize=False, revival=Revival(0.6, decay=0.5))
  variables, _ = made(quantizer)

  def away(table):
    table = np.full(table.shape, 50, np.float32)
    table[:, 0] = 0
    return table

  if "centroids" in variables:
    variables["centroids"]["total"] = away(variables["centroids"]["total"])
  else:
    name = "centroids" if isinstance(quantizer, CentroidQuantizer) else "keys"
    variables["params"][name] = away(variables["params"][name])
  found, written = jax.device_get(trained(quantizer, variables, vectors()))
  assert not np.any(found.codes)
  keys = np.asarray(apply(quantizer, variables | written, method="keys"))
  lead = 1 if quantizer.additive else M
  parts = vectors().reshape(N, lead, -1)
  for m, table in enumerate(keys):
    near = parts.reshape(N * lead, -1) if quantizer.shared else parts[:, m % lead]
    np.testing.assert_array_less(np.abs(table[1:, None] - near).max(axis=-1).min(axis=-1), 1e-5)
  assert len(np.unique(apply(quantizer, variables | written, vectors(), method="encode"))) > 2
  again = trained(quantizer, variables | written, vectors())[1]
  assert (np.asarray(again["revival"]["chosen"]) >= 0.6).all()


@pytest.mark.slow
def test_a_revived_key_is_trained_from_its_new_value():
  """The gradient goes to the parameter, and a later batch does not undo the revival."""
  quantizer = CentroidQuantizer(K, M, D, normalize=False, revival=Revival(0.9, decay=0.0))
  variables, _ = made(quantizer)
  _, written = trained(quantizer, variables, vectors())
  moved = variables | written
  at = np.asarray(apply(quantizer, moved, method="values"))
  assert np.abs(at - np.asarray(variables["params"]["centroids"])).max() > 0.1

  def loss(params):
    return trained(quantizer, moved | {"params": params}, vectors())[0].terms["regularizer"]

  plain = quantizer.clone(revival=None)
  term = lambda p: trained(plain, {"params": p}, vectors())[0].terms["regularizer"]
  gradient = jax.jit(jax.grad(loss))(moved["params"])["centroids"]
  expected = jax.jit(jax.grad(term))({"centroids": at})["centroids"]
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


CUT = [
  SoftmaxQuantizer(K, M, D, gumbel=0.3, response=quantize.euclidean_response),
  SoftmaxQuantizer(K, M, D, shared=True, forward_temperature=0.5, learned_temperature=True),
  CentroidQuantizer(K, M, D, commitment=0.25),
  CentroidQuantizer(K, 4, D, additive=True, moving_average=MovingAverage()),
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
  ("kind", "fields"),
  [
    (MovingAverage, {"decay": 1.0}),
    (MovingAverage, {"epsilon": -1.0}),
    (Revival, {"below": 0.0}),
    (Revival, {"below": 1.5}),
    (Revival, {"decay": -0.1, "below": 0.1}),
  ],
)
def test_numbers_outside_their_range_are_refused(kind, fields):
  name, value = next(iter(fields.items()))
  with pytest.raises(ValueError, match=f"`{name}` .*{value}"):
    kind(**fields)
