"""Tests of sums of cross-entropies whose gradient is formed in the forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.ops.exact import normals
from vqjax.ops import device, reduced_loss, softmax

N, D, V = 37, 6, 211


def operands(dtype=jnp.float32):
  """hidden, weight, bias, tokens and one uniform number for each token."""
  hidden, weight, bias = normals(0, (N, D), (V, D), (V,))
  bias[40:50] = -np.inf
  rng = np.random.default_rng(1)
  tokens = rng.choice(np.delete(np.arange(V), np.s_[40:50]), N)
  return hidden.astype(dtype), weight.astype(dtype), bias, tokens, rng.random(N, np.float32)


def limits(**changed):
  """A device on which products are so slow that scores are always kept."""
  return device.using(device.current()._replace(balance=0.0, **changed))


def is_formed_in_the_forward_pass(loss, *args):
  """Whether the gradient takes three products of scores instead of four."""
  # A loop's products count once.
  return len(reference.products_of(jax.grad(loss, (0, 1)), *args)) == 3


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_equal_float64_for_a_cotangent_that_is_neither_one_nor_uniform(reduction):
  hidden, weight, bias, tokens, token_weight = operands()
  token_weight[5] = 0
  scale = 0.37

  def loss(h, w, b, token_weight):
    options = {"token_weight": token_weight, "reduction": reduction, "scratch": 4 * V * 16}
    return scale * softmax.linear_cross_entropy(h, w, tokens, b, **options)

  with limits():
    assert is_formed_in_the_forward_pass(loss, hidden, weight, bias, token_weight)
    value, found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(
      hidden, weight, bias, token_weight
    )
  share = np.asarray(token_weight, np.float64)
  total = share.sum() if reduction == "mean" else 1.0
  each = -reference.linear_log_prob(hidden, weight, tokens, bias)
  np.testing.assert_allclose(value, scale * (share * each).sum() / total, rtol=1e-5)
  exact = reference.linear_gradients(hidden, weight, tokens, -scale * share / total, bias)
  for ours, wanted in zip(found, exact):
    np.testing.assert_allclose(ours, wanted, atol=2e-5)
  mean = (share * each).sum() / total if reduction == "mean" else 0.0
  of_weight = scale * (each - mean) / total
  of_weight[5] = 0  # a token without weight is left out
  np.testing.assert_allclose(found[3], of_weight, rtol=1e-4)


@pytest.mark.slow
def test_members_of_a_vmap_have_their_own_cotangents():
  hidden, weight, _, tokens, _ = operands()
  (scales,) = normals(2, (3,))

  def total(w, **options):
    one = lambda h: softmax.linear_cross_entropy(h, w, tokens, **options).sum()
    return (scales * jax.vmap(one)(jnp.stack([hidden, 2 * hidden, -hidden]))).sum()

  with limits():
    found = jax.jit(jax.grad(lambda w: total(w, reduction="sum", scratch=4 * V * 8)))(weight)
  np.testing.assert_allclose(found, jax.jit(jax.grad(total))(weight), atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_term_of_the_loss_has_the_gradient_of_the_tiles(dtype):
  hidden, weight, bias, tokens, token_weight = operands(dtype)
  tokens[3] = 100

  def loss(h, w, b, **given):
    return softmax.linear_cross_entropy(
      h, w, tokens, b, token_weight=token_weight, ignore_index=100, label_smoothing=0.1,
      z_loss=1e-2, softcap=5.0, reduction="mean", **given,
    )  # fmt: skip

  with limits():
    run = jax.jit(jax.value_and_grad(lambda *x: loss(*x, scratch=4 * V * 16), (0, 1, 2)))
    value, found = run(hidden, weight, bias)
  tiled = jax.jit(jax.value_and_grad(lambda *x: loss(*x, tile=(9, 50)), (0, 1, 2)))
  expected, gradients = tiled(hidden, weight, bias)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for ours, other in zip(found, gradients):
    assert ours.dtype == other.dtype
    # bfloat16 rounds each result to 4e-3 of itself.
    tolerance = {"atol": 1e-6} if ours.dtype == jnp.float32 else {"rtol": 8e-3, "atol": 1e-4}
    np.testing.assert_allclose(np.float32(ours), np.float32(other), **tolerance)


@reference.needs_float16
def test_the_mean_over_many_tokens_does_not_underflow_in_float16():
  n, v = 20_000, 512
  hidden, weight = (np.float32(0.3) * x for x in normals(0, (n, D), (v, D)))
  tokens = np.arange(n) % v
  # Products of float16 and arrays of float32, so that the results are not rounded to float16.
  loss = lambda h, w: softmax.linear_cross_entropy(
    h, w, tokens, reduction="mean", dtype=jnp.float16
  )
  with limits():
    assert is_formed_in_the_forward_pass(loss, hidden, weight)
    found = jax.jit(jax.grad(loss, (0, 1)))(hidden, weight)
  exact = reference.linear_gradients(hidden, weight, tokens, np.full(n, -1 / n))
  for ours, wanted in zip(found, exact):
    # A probability of 1/512 over 20,000 tokens is 1e-7, of which float16 keeps two bits at most.
    assert np.linalg.norm(ours - wanted) < 1e-3 * np.linalg.norm(wanted)


def test_a_token_outside_makes_the_sum_nan_unless_its_weight_is_zero():
  hidden, weight, _, tokens, _ = operands()
  tokens[2] = -100
  with limits():
    loss = jax.jit(jax.value_and_grad(
      lambda h, ones: softmax.linear_cross_entropy(
        h, weight, tokens, token_weight=ones, reduction="mean"
      )
    ))  # fmt: skip
    ones = np.ones(N, np.float32)
    assert np.isnan(loss(hidden, ones)[0])
    hidden[2], ones[2] = np.nan, 0
    value, gradient = jax.device_get(loss(hidden, ones))
  assert np.isfinite(value)
  assert np.isfinite(np.delete(gradient, 2, axis=0)).all()
  assert (gradient[2] == 0).all()


def test_memory_is_the_budget_and_no_score_is_computed_twice():
  n, d, v, scratch = 2048, 256, 32_000, 64 * 2**20
  shapes = [((n, d), jnp.float32), ((v, d), jnp.float32), ((n,), jnp.int32)]
  loss = lambda h, w, t: softmax.linear_cross_entropy(h, w, t, reduction="mean", scratch=scratch)
  args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
  # The scores, and a tile's share of the gradient of the weight before it is added.
  assert compiled.memory_analysis().temp_size_in_bytes <= scratch + 4 * v * d + 2**21


@pytest.mark.parametrize(
  ("shape", "scratch", "kept"),
  [
    ((2048, 256, 32_000), 64 * 2**20, True),
    ((2048, 256, 32_000), 2**23, False),  # 64 tokens at a time: the gradient moves too often
    ((2048, 8, 32_000), 64 * 2**20, False),  # the product is cheaper than its scores' way
    ((100, 256, 32_000), 64 * 2**20, True),
  ],
)
def test_scores_are_kept_where_that_moves_less_than_it_computes(shape, scratch, kept):
  n, d, v = shape
  tile = reduced_loss.tile_of_tokens(n, d, v, jnp.float32, scratch, device.of("cpu"))
  assert (tile is not None) == kept
  if kept:
    assert 4 * tile * v <= scratch
    assert tile <= n


def test_an_unknown_reduction_is_refused():
  hidden, weight, _, tokens, _ = operands()
  with pytest.raises(ValueError, match=r"`reduction` must be .* got 'max'"):
    softmax.linear_cross_entropy(hidden, weight, tokens, reduction="max")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
  ("shape", "axis"), [((2, 4), "model"), pytest.param((8, 1), None, marks=pytest.mark.slow)]
)
def test_on_a_mesh_every_device_forms_the_gradient_of_its_rows_and_tokens(shape, axis, masked):
  hidden, weight, bias, tokens, token_weight = operands()
  if masked:
    token_weight[::2] = 0
  options = {"token_weight": token_weight, "reduction": "sum", "label_smoothing": 0.1}

  def loss(h, w, b, **given):
    return softmax.linear_cross_entropy(h, w, tokens, b, **options, **given)

  mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), limits():
    on_mesh = functools.partial(loss, vocab_axis=axis, scratch=4 * V * 2)
    assert is_formed_in_the_forward_pass(on_mesh, hidden, weight, bias)
    value, found = jax.jit(jax.value_and_grad(on_mesh, (0, 1, 2)))(hidden, weight, bias)
  run = jax.jit(jax.value_and_grad(lambda *x: loss(*x, tile=(N, V)), (0, 1, 2)))
  expected, wanted = run(hidden, weight, bias)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for ours, other in zip(found, wanted):
    np.testing.assert_allclose(ours, other, atol=2e-5)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_program_of_a_gpu_rounds_scores_and_nothing_else_to_bfloat16(reduction):
  hidden, weight, bias, tokens, _ = operands(jnp.bfloat16)
  share = np.linspace(0.5, 1.5, N, dtype=np.float32) if reduction == "none" else np.float32(N)

  def total(h, w, b):
    return (share * softmax.linear_cross_entropy(h, w, tokens, b, reduction=reduction)).sum()

  gpu = device.of("gpu")._replace(tokens=16, vocab=64, balance=0.0, scratch=2 * V * 16)
  with device.using(gpu):
    value, found = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(hidden, weight, bias)
  each = -reference.linear_log_prob(hidden, weight, tokens, bias)
  share = np.broadcast_to(share / (1 if reduction == "none" else N), N)
  # Half a unit of 8 bits of scores of up to 8, and 37 tokens.
  np.testing.assert_allclose(value, (share * each).sum(), rtol=2e-3)
  exact = reference.linear_gradients(hidden, weight, tokens, -np.float64(share), bias)
  for ours, wanted in zip(found, exact):
    assert np.linalg.norm(np.float64(ours) - wanted) < 8e-3 * np.linalg.norm(wanted)
