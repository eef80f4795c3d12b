"""Tests of the tiled softmax on scores that are hard to sum, in every form of its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import reference
from tests.ops.exact import normals
from vqjax.ops import device, softmax

N, D, V, TILE = 13, 5, 211, (4, 32)


def normal(seed, *shape):
  return normals(seed, shape)[0]


def with_bias(bias):
  return normal(0, N, D), normal(1, V, D), np.broadcast_to(np.float32(bias), (V,))


def maximum_in_the_last_tile():
  return with_bias(np.where(np.arange(V) == V - 3, 500, 0))


def removed_rows():
  bias = normal(2, V)
  bias[: TILE[1] + 9] = bias[100:170] = -np.inf
  return with_bias(bias)


def maximum_that_rises_by_59_nats_in_each_tile():
  return with_bias(59 * (np.arange(V) // TILE[1]))


def scores_of_ten_thousand():
  hidden, *rest = with_bias(0)
  return 10_000 * hidden, *rest


def scores_far_below_zero():
  return with_bias(-1e4)


def one_token():
  return normal(0, 1, D), 10 * normal(1, V, D), normal(2, V)


def bfloat16():
  hidden, weight, bias = with_bias(0)
  return hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), bias


CASES = [
  maximum_in_the_last_tile,
  removed_rows,
  maximum_that_rises_by_59_nats_in_each_tile,
  scores_of_ten_thousand,
  scores_far_below_zero,
  one_token,
  bfloat16,
]
FORMS = {
  "exact maximum of a tile": {"fuses": False, "tile": TILE},
  "maximum of earlier tiles": {"fuses": True, "tile": TILE},
  "kept scores": {"fuses": False, "tile": None},
  "masses below the maximum of some rows": {"fuses": True, "tile": None, "in_forward": True},
}


def value_and_gradients(form, hidden, weight, bias, tokens, cotangent):
  """Log-probabilities and the gradients of their weighted sum."""

  def weighted_sum(h, w, b, token_weight):
    options = {"token_weight": token_weight, "reduction": "sum", "scratch": 4 * V * TILE[0]}
    return softmax.linear_cross_entropy(h, w, tokens, b, **options)

  def run(hidden, weight, bias, cotangent):
    if "in_forward" in form:
      *gradients, loss = jax.grad(weighted_sum, (0, 1, 2, 3))(hidden, weight, bias, -cotangent)
      return -loss, gradients
    value = lambda *x: softmax.linear_log_prob(*x[:2], tokens, x[2], tile=form["tile"])
    found, pull = jax.vjp(value, hidden, weight, bias)
    return found, pull(cotangent)

  # Products so slow that what they make is always kept, where the form allows it.
  with device.using(device.current()._replace(fuses=form["fuses"], balance=0.0)):
    return jax.device_get(jax.jit(run)(hidden, weight, bias, cotangent))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_float64(case, form):
  hidden, weight, bias = case()
  kept = np.flatnonzero(np.isfinite(bias))
  token = kept[np.arange(len(hidden)) * 31 % len(kept)]
  exact = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T + bias
  # Half of the tokens are the most likely ones, whose probability is near 1 in most cases.
  token[::2] = exact.argmax(axis=1)[::2]
  cotangent = normal(5, len(hidden))
  found, gradients = value_and_gradients(FORMS[form], hidden, weight, bias, token, cotangent)
  # A score is rounded to 6e-8 of itself, by each of its D products.
  size = np.abs(exact[:, kept]).max()
  unit = D * 6e-8 * size
  assert (found <= 0).all()
  wanted = reference.linear_log_prob(hidden, weight, token, bias)
  np.testing.assert_allclose(found, wanted, atol=1e-5 + 2 * unit)
  # A probability is off by a factor of exp(unit); a bfloat16 cotangent is rounded to 4e-3 of it.
  relative = 1e-5 + 4 * unit + (8e-3 if hidden.dtype == jnp.bfloat16 else 0)
  for ours, right in zip(
    gradients, reference.linear_gradients(hidden, weight, token, cotangent, bias), strict=True
  ):
    right = np.where(np.isfinite(right), right, 0)
    np.testing.assert_allclose(
      np.float64(ours), right, atol=relative * max(1.0, np.abs(right).max())
    )


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_probabilities_sum_to_one(form):
  _, weight, bias = removed_rows()
  hidden, ones = np.broadcast_to(30 * normal(3, D), (V, D)), np.ones(V, np.float32)
  log_prob, _ = value_and_gradients(FORMS[form], hidden, weight, bias, np.arange(V), ones)
  np.testing.assert_allclose(np.exp(np.float64(log_prob)).sum(), 1, atol=1e-5)


@pytest.mark.slow
def test_kept_masses_have_every_term_of_the_loss():
  hidden, weight, bias = removed_rows()
  tokens, token_weight = 50 + np.arange(N) * 3, np.random.default_rng(7).random(N, np.float32)
  terms = {"label_smoothing": 0.1, "z_loss": 1e-2, "temperature": 0.7, "reduction": "mean"}

  def loss(h, w, b, **options):
    return softmax.linear_cross_entropy(
      h, w, tokens, b, token_weight=token_weight, **terms, **options
    )

  def value_and_gradients(**options):
    return jax.jit(jax.value_and_grad(lambda *x: loss(*x, **options), (0, 1, 2)))(
      hidden, weight, bias
    )

  with device.using(device.current()._replace(fuses=True, balance=0.0)):
    found = value_and_gradients(scratch=4 * V * TILE[0])
  expected = value_and_gradients(tile=TILE)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize(
  ("limits", "options", "rtol"),
  [
    # Rounded to 8 bits, a score of 16 is off by up to 0.06, and 1 - p by a factor of exp(0.06).
    ({"rounds": True}, {"reduction": "sum"}, 0.07),
    # A mass in bfloat16 would be 1 or 0.996; cotangents of other rows are.
    ({"fuses": True}, {"reduction": "sum"}, 1e-2),
    # To 1 float32 adds 1.2e-7 or 2.4e-7 for the 1.9e-7 of each tile; in the token's own it does.
    ({}, {"tile": (1, 2), "dtype": jnp.float32}, 5e-4),
  ],
)
def test_a_nearly_certain_token_keeps_the_digits_of_its_gradient(limits, options, rtol):
  hidden, weight = jnp.ones((1, 2), jnp.bfloat16), np.zeros((1024, 2), np.float32)
  weight[5] = 8.0625, 8.125
  loss = lambda w: softmax.linear_cross_entropy(hidden, w, jnp.array([5]), **options).sum()
  weight = weight.astype(options.get("dtype", jnp.bfloat16))
  with device.using(device.current()._replace(balance=0.0, **limits)):
    found = jax.jit(jax.grad(loss))(weight)
  (_, exact, _) = reference.linear_gradients(hidden, weight, [5], -np.ones(1))
  assert 5e-5 < -exact[5, 0] < 2e-4
  np.testing.assert_allclose(np.float64(found[5]), exact[5], rtol=rtol)


def test_scores_are_rounded_on_the_devices_that_round_them_alone():
  hidden, weight, _ = bfloat16()
  found = []
  for rounds in (False, True):
    # Other arguments are equal, so that a compiled pass might serve both.
    with device.using(device.current()._replace(rounds=rounds)):
      run = jax.jit(lambda h, w: softmax.linear_log_prob(h, w, np.arange(N)))
      found.append(run(hidden, weight))
  error = np.abs(found - reference.linear_log_prob(hidden, weight, np.arange(N))).max(axis=1)
  assert error[0] < 1e-5
  assert 1e-4 < error[1] < 0.05


@pytest.mark.slow
def test_all_statistics_are_equal_in_both_forms_of_the_loop():
  hidden, weight, bias = maximum_that_rises_by_59_nats_in_each_tile()
  tokens = np.arange(N) * 7
  outputs = {"entropy": True, "mean": True, "top_k": 3, "softcap": 300.0, "tile": TILE}
  outputs |= {"collision": True, "rank": True}

  def gradients(h, w, b):
    found = softmax.linear_softmax(h, w, tokens, b, **outputs)
    total = sum(x.sum() for x in found if jnp.issubdtype(x.dtype, jnp.floating))
    return total, found

  both = []
  for fuses in (False, True):
    with device.using(device.current()._replace(fuses=fuses)):
      run = jax.jit(jax.value_and_grad(lambda *x: gradients(*x), (0, 1, 2), has_aux=True))
      both.append(run(hidden, weight, bias))
  # Scores of up to 300 are rounded to 6e-8 of themselves.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-4), *both)


@pytest.mark.slow
def test_each_device_of_a_mesh_repairs_its_own_tiles():
  hidden, weight, bias = maximum_in_the_last_tile()
  tokens, cotangent = np.arange(N) * 16, normal(5, N)

  def loss(h, w, b):
    found = softmax.linear_log_prob(h, w, tokens, b, tile=(3, 11), vocab_axis="model")
    return (cotangent * found).sum(), found

  mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), device.using(device.current()._replace(fuses=True)):
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, found), gradients = run(hidden, weight, bias)
  np.testing.assert_allclose(
    found, reference.linear_log_prob(hidden, weight, tokens, bias), rtol=1e-6
  )
  exact = reference.linear_gradients(hidden, weight, tokens, cotangent, bias)
  for ours, wanted in zip(gradients, exact, strict=True):
    # Scores of 500 are rounded to 3e-5.
    np.testing.assert_allclose(ours, wanted, atol=5e-4)
