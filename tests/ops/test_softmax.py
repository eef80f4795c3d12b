"""Tests of the tiled log-probability: exactness at any shape, size of arrays."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.ops.exact import normals
from vqjax.ops import device, softmax


def arrays(n, d, v, dtype=np.float32):
  """hidden, weight, tokens and bias."""
  tokens = np.random.default_rng(1).integers(0, v, n)
  hidden, weight, bias = (x.astype(dtype) for x in normals(0, (n, d), (v, d), (v,)))
  return hidden, weight, tokens, bias


def compiled(run):
  """The results of a program in NumPy."""
  return lambda *args: jax.device_get(jax.jit(run)(*args))


def log_prob(*args, **options):
  return compiled(functools.partial(softmax.linear_log_prob, **options))(*args)


SHAPES = [(1, 1), (1, 7), (5, 3), (13, 101), (16, 128), (37, 1009)]
TILES = [None, (1, 1), (4, 10), (13, 100), (1000, 1000)]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
  ("n", "v", "tile", "with_bias"),
  [
    # Every shape with every tile; every shape and every tile with and without a bias.
    (*shape, tile, bool((i + j) % 2))
    for i, shape in enumerate(SHAPES)
    for j, tile in enumerate(TILES)
  ],
)
def test_values_and_gradients_equal_float64_at_any_shape_and_tile(n, v, tile, with_bias):
  if tile == (1, 1) and n * v > 1500:
    tile = (2, 50)  # tiles of one score are checked on the small shapes
  hidden, weight, tokens, bias = arrays(n, 6, v)
  bias = bias if with_bias else None
  (cotangent,) = normals(7, (n,))

  def run(cotangent, *operands):
    value, pull = jax.vjp(
      lambda h, w, b: softmax.linear_log_prob(h, w, tokens, b, tile=tile), *operands
    )
    return value, pull(cotangent)

  value, found = compiled(run)(cotangent, hidden, weight, bias)
  expected = reference.linear_log_prob(hidden, weight, tokens, bias)
  np.testing.assert_allclose(value, expected, atol=1e-5, rtol=1e-6)
  gradients = reference.linear_gradients(hidden, weight, tokens, cotangent, bias)
  for ours, exact in zip(found, gradients if with_bias else gradients[:2]):
    np.testing.assert_allclose(ours, exact, atol=2e-5)


def test_leading_axes_are_kept():
  hidden, weight, tokens, _ = arrays(12, 4, 11)
  flat = log_prob(hidden, weight, tokens)
  folded = log_prob(hidden.reshape(2, 3, 2, 4), weight, tokens.reshape(2, 3, 2))
  np.testing.assert_array_equal(folded.ravel(), flat)


@pytest.mark.slow
def test_a_large_vocabulary_is_within_a_hundred_thousandth_of_a_nat():
  hidden, weight, tokens, _ = arrays(200, 64, 50257)
  weight = weight / 8
  value = log_prob(hidden, weight, tokens)
  expected = reference.linear_log_prob(hidden, weight, tokens)
  assert np.abs(value - expected).max() < 1e-5


@pytest.mark.slow
def test_bfloat16_accumulates_in_float32():
  hidden, weight, tokens, _ = arrays(64, 128, 8191, jnp.bfloat16)
  weight = (weight / 8).astype(jnp.bfloat16)

  def loss(h, w):
    value = softmax.linear_log_prob(h, w, tokens)
    return value.sum(), value

  (d_hidden, d_weight), value = compiled(jax.grad(loss, (0, 1), has_aux=True))(hidden, weight)
  assert value.dtype == jnp.float32
  assert np.abs(value - reference.linear_log_prob(hidden, weight, tokens)).max() < 2e-3
  assert d_hidden.dtype == d_weight.dtype == jnp.bfloat16
  exact = reference.linear_gradients(hidden, weight, tokens, np.ones(64))
  # bfloat16 keeps 8 bits: the result is off by half a unit in the last place, and the
  # probabilities that enter the product by as much again.
  np.testing.assert_allclose(np.float32(d_hidden), exact[0], atol=2e-2, rtol=1e-2)
  np.testing.assert_allclose(np.float32(d_weight), exact[1], atol=2e-2, rtol=1e-2)


@pytest.mark.slow
def test_gradients_of_bfloat16_add_up_over_many_tiles_in_float32():
  # 128 tiles of tokens and of rows: sums kept in bfloat16 would lose several per cent.
  hidden, weight, tokens, bias = arrays(2048, 16, 1024, jnp.bfloat16)
  loss = lambda h, w, b: softmax.linear_log_prob(h, w, tokens, b, tile=(16, 8)).sum()
  found = compiled(jax.grad(loss, (0, 1, 2)))(hidden, weight, bias)
  exact = reference.linear_gradients(hidden, weight, tokens, np.ones(2048), bias)
  for ours, wanted in zip(found, exact):
    # One rounding of the result to 8 bits, and of each probability, whose errors average out.
    error = np.linalg.norm(np.float64(ours) - wanted) / np.linalg.norm(wanted)
    assert error < 4e-3


@pytest.mark.slow
def test_float32_weights_of_a_bfloat16_product_are_not_copied_and_their_gradient_not_rounded():
  tokens_of = 1051  # too many for their scores to be kept
  hidden, weight, tokens, _ = arrays(tokens_of, 64, 8009)
  loss = lambda w: softmax.linear_log_prob(hidden, w, tokens, dtype=jnp.bfloat16).sum()
  low = [x.astype(jnp.bfloat16).astype(np.float32) for x in (hidden, weight)]
  _, exact, _ = reference.linear_gradients(*low, tokens, np.ones(tokens_of))
  gradient = compiled(jax.grad(loss))(weight)
  error = np.linalg.norm(np.float64(gradient) - exact) / np.linalg.norm(exact)
  assert error < 3e-3
  rounded = gradient.astype(jnp.bfloat16).astype(np.float32)
  assert (gradient != rounded).mean() > 0.9
  shapes = reference.values_of(jax.grad(loss), weight)
  assert ((8009, 64), jnp.dtype("bfloat16")) not in shapes


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint16, jnp.uint32])
def test_tokens_of_any_integer_type_mean_the_same(dtype):
  hidden, weight, tokens, _ = arrays(9, 8, 70_001)
  tokens = tokens % 100
  narrow = log_prob(hidden, weight, tokens.astype(dtype))
  np.testing.assert_array_equal(narrow, log_prob(hidden, weight, tokens))


def test_operands_of_different_dtypes_agree_with_the_promoted_ones():
  hidden, weight, tokens, _ = arrays(9, 8, 31)
  hidden = hidden.astype(jnp.bfloat16)
  same = log_prob(hidden.astype(np.float32), weight, tokens)
  np.testing.assert_allclose(log_prob(hidden, weight, tokens), same, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
def test_no_probability_exceeds_one_however_large_the_scores(scale):
  hidden, weight, _, _ = arrays(512, 64, 1009)
  scores = scale * hidden @ weight.T
  best = scores.argmax(axis=1)
  value = log_prob(scale * hidden, weight, best, tile=(100, 100))
  assert (value <= 0).all()
  # Scores of size s are rounded by up to 64 products, each to 6e-8 of s.
  largest = np.abs(scores).max()
  exact = reference.linear_log_prob(scale * hidden, weight, best)
  np.testing.assert_allclose(value, exact, atol=1e-6 + 4e-7 * largest)


@pytest.mark.slow
def test_a_common_offset_of_all_scores_changes_nothing_but_their_rounding():
  hidden, weight, tokens, _ = arrays(20, 8, 101)
  loss = lambda h, b: softmax.linear_log_prob(h, weight, tokens, b, tile=(7, 30)).sum()
  # Scores of order one vanish beside 1e30: what is left is a uniform distribution.
  value, d_bias = compiled(jax.value_and_grad(loss, 1))(hidden, np.full(101, -1e30, np.float32))
  np.testing.assert_allclose(value, -20 * np.log(101), rtol=1e-6)
  expected = np.bincount(tokens, minlength=101) - 20 / 101
  np.testing.assert_allclose(d_bias, expected, atol=1e-5)


@pytest.mark.slow
def test_a_bias_of_minus_infinity_removes_a_row_even_a_whole_tile_of_them():
  hidden, weight, tokens, bias = arrays(9, 4, 30)
  bias[:12] = bias[20] = -np.inf
  tokens = np.where((tokens < 12) | (tokens == 20), 13, tokens)
  loss = lambda h, w, b: softmax.linear_log_prob(h, w, tokens, b, tile=(4, 5)).sum()
  kept = np.isfinite(bias)
  index = np.cumsum(kept) - 1
  expected = reference.linear_log_prob(hidden, weight[kept], index[tokens], bias[kept])
  run = compiled(jax.value_and_grad(loss, (0, 1, 2)))
  value, (d_hidden, d_weight, d_bias) = run(hidden, weight, bias)
  np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
  assert np.isfinite(d_hidden).all()
  assert (d_weight[~kept] == 0).all()
  assert (d_bias[~kept] == 0).all()


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_is_nan_and_touches_no_other():
  hidden, weight, tokens, _ = arrays(5, 4, 31)
  expected = np.where(np.arange(5) == 2, np.nan, log_prob(hidden, weight, tokens))
  for token in (-1, 31, 2**31 - 1):
    tokens[2] = token
    np.testing.assert_array_equal(log_prob(hidden, weight, tokens), expected)


def test_no_value_of_tokens_times_vocabulary_and_no_copy_of_the_weight():
  n, d, v = 2053, 16, 5003
  hidden, weight, tokens, bias = arrays(n, d, v)
  loss = lambda h, w, b: softmax.linear_log_prob(h, w, tokens, b).sum()
  for function in (loss, jax.grad(loss, (0, 1, 2))):
    shapes = reference.shapes_of(function, hidden, weight, bias)
    tile = softmax.default_tile(n, v)
    largest = max(np.prod(shape, dtype=int) for shape in shapes)
    assert largest <= max(tile.tokens * tile.vocab, v * d, n * d)
    # One row more than V would be a padded copy; [D, V] a transposed one.
    assert not any(len(shape) == 2 and d in shape and max(shape) > v for shape in shapes)
    assert (d, v) not in shapes


def test_vmap_and_jit_agree_with_a_loop():
  hidden, weight, tokens, _ = arrays(12, 4, 17)
  hidden, tokens = hidden.reshape(3, 4, 4), tokens.reshape(3, 4)
  one = lambda h, w, t: softmax.linear_log_prob(h, w, t)
  mapped = compiled(jax.vmap(one, (0, None, 0)))(hidden, weight, tokens)
  looped = compiled(lambda h, w, t: [one(*x) for x in zip(h, [w] * 3, t)])(hidden, weight, tokens)
  np.testing.assert_allclose(mapped, looped, rtol=1e-6)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda h, w, t, b: (h, w, t[:-1], b), r"`hidden` must .* got \(5, 4\)"),
    (lambda h, w, t, b: (h, w.T, t, b), r"`weight` must be \[V, 4\] .* got \(4, 31\)"),
    (lambda h, w, t, b: (h, w[:0], t, b[:0]), r"`weight` must have at least 1 row; got \(0, 4\)"),
    (lambda h, w, t, b: (h, w, t, b[:-1]), r"`bias` must be \[31\] .* got \(30,\)"),
  ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    inspect.unwrap(softmax.linear_softmax)(*change(*arrays(5, 4, 31)))


def test_a_tile_without_extent_is_refused():
  hidden, weight, tokens, _ = arrays(5, 4, 31)
  with pytest.raises(ValueError, match=r"`tile` must be .* got \(0, 8\)"):
    log_prob(hidden, weight, tokens, tile=(0, 8))


@pytest.mark.parametrize(("n", "v"), [(1, 1), (7, 3), (2048, 32000), (1000, 50257), (10**6, 10**6)])
def test_the_default_tile_fits_its_arrays(n, v):
  tile, limits = softmax.default_tile(n, v), device.of("cpu")
  assert 1 <= tile.tokens <= min(n, limits.tokens)
  assert 1 <= tile.vocab <= min(v, limits.vocab)
  # Equal parts: the last tile repeats less than 64 rows for each of the others.
  parts = -(-v // tile.vocab)
  assert parts * tile.vocab - v < 64 * parts
