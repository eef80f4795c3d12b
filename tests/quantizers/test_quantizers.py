"""Quantisers follow the papers' algorithms and gradients."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import softmax

from tests import reference
from tests.quantizers.small import D, K, M, N, apply, in_float64, made, normal, trained, vectors
from vqjax.ops import quantize
from vqjax.quantizers import CentroidQuantizer, SoftmaxQuantizer

EPSILON = 1e-3


def algorithm_1(query, keys, values, distance, normalize):
  """Algorithms 1 and 2 by a loop over tokens and subspaces, normalised."""
  response = np.array([[[-distance(q, k) for k in keys[m % len(keys)]] for m, q in enumerate(row)]
                       for row in query])  # fmt: skip
  if normalize:
    mean, var = response.mean(axis=(0, 1)), response.var(axis=(0, 1))
    response = (response - mean) / np.sqrt(var + EPSILON)
  codes = np.zeros(query.shape[:2], int)
  rows = []
  for i in range(len(query)):
    parts = []
    for m in range(query.shape[1]):
      codes[i, m] = np.argmax(response[i, m])
      parts.append(values[m % len(values)][codes[i, m]])
    rows.append(np.concatenate(parts))
  return response, codes, np.array(rows)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_dpq_sx_is_algorithm_1_and_its_gradient_that_of_equation_5(shared, normalize):
  quantizer = SoftmaxQuantizer(K, M, D, shared=shared, normalize=normalize)
  variables, _ = made(quantizer)
  x, cotangent = vectors(), normal(3, N, D)
  keys, values = (in_float64(variables["params"][name]) for name in ("keys", "values"))
  query = in_float64(x).reshape(N, M, D // M)
  scores, codes, rows = algorithm_1(query, keys, values, lambda q, k: -(q @ k), normalize)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(params, scores):
    found, _ = trained(quantizer, variables | {"params": params}, x)
    by_scores = lambda s: (quantize.softmax_quantized(s, params["values"])[0] * cotangent).sum()
    return (found.vectors * cotangent).sum(), (found, jax.grad(by_scores)(scores))

  gradient, (found, found_d) = run(variables["params"], np.float32(scores))
  np.testing.assert_array_equal(found.codes, codes)
  np.testing.assert_allclose(found.vectors, rows, atol=1e-6)
  # Eq. 5 in the values: the gradient of the one-hot choice.
  expected = np.zeros_like(values)
  parts = in_float64(cotangent).reshape(N, M, -1)
  for i in range(N):
    for m in range(M):
      expected[m % len(values), codes[i, m]] += parts[i, m]
  np.testing.assert_allclose(gradient["values"], expected, atol=1e-5)
  # ... and in the scores: that of softmax(scores) · values.
  share = softmax(scores, axis=-1)
  table = np.broadcast_to(values, (M, K, D // M))
  d_share = np.einsum("nmc,mkc->nmk", parts, table)
  d_scores = share * (d_share - (share * d_share).sum(axis=-1, keepdims=True))
  np.testing.assert_allclose(found_d, d_scores, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_dpq_vq_is_the_nearest_centroid_with_the_gradient_of_equation_7(shared):
  quantizer = CentroidQuantizer(K, M, D, shared=shared, normalize=False)
  variables, _ = made(quantizer)
  x = vectors()
  table = in_float64(variables["params"]["centroids"])
  query = in_float64(x).reshape(N, M, D // M)
  _, codes, rows = algorithm_1(query, table, table, lambda q, k: ((q - k) ** 2).sum(), False)
  cotangent = normal(3, N, D)

  @jax.jit
  def run(params, x):
    def task(params, x):
      found, _ = trained(quantizer, variables | {"params": params}, x)
      return (found.vectors * cotangent).sum(), found

    term = lambda *args: task(*args)[1].terms["regularizer"]
    own, found = jax.grad(task, (0, 1), has_aux=True)(params, x)
    return own, found, jax.value_and_grad(term, (0, 1))(params, x)

  (d_params, d_x), found, (value, d_term) = run(variables["params"], x)
  np.testing.assert_array_equal(found.codes, codes)
  # Exactly the centroids: nothing of x is left in the forward pass.
  np.testing.assert_array_equal(found.vectors, apply(quantizer, variables, x))
  np.testing.assert_allclose(found.vectors, rows, atol=1e-7)
  np.testing.assert_array_equal(d_x, cotangent)
  assert not np.any(np.asarray(d_params["centroids"]))
  # The regulariser: the mean over tokens, subspaces and their numbers, in the centroids alone.
  np.testing.assert_allclose(value, ((rows - in_float64(x)) ** 2).mean(), rtol=1e-5)
  assert not np.any(np.asarray(d_term[1]))
  expected = np.zeros_like(table)
  for i in range(N):
    for m in range(M):
      t = m % len(table)
      expected[t, codes[i, m]] += 2 * (table[t, codes[i, m]] - query[i, m]) / (N * D)
  np.testing.assert_allclose(d_term[0]["centroids"], expected, atol=1e-6)


def test_the_commitment_pulls_only_the_vectors():
  quantizer = CentroidQuantizer(K, M, D, commitment=0.25)
  variables, _ = made(quantizer)

  def term(params, x):
    found, _ = trained(quantizer, variables | {"params": params}, x)
    return found.terms["commitment"], found.vectors

  run = jax.jit(jax.grad(term, (0, 1), has_aux=True))
  (d_params, d_x), row = jax.device_get(run(variables["params"], vectors()))
  assert not np.any(d_params["centroids"])
  np.testing.assert_allclose(d_x, 0.25 * 2 * (vectors() - row) / (N * D), atol=1e-6)


def test_a_forward_temperature_averages_values_only_in_training():
  quantizer = SoftmaxQuantizer(K, M, D, forward_temperature=0.7, normalize=False)
  variables, evaluated = made(quantizer)
  keys, values = (in_float64(variables["params"][name]) for name in ("keys", "values"))
  query = in_float64(vectors()).reshape(N, M, -1)
  share = softmax(np.einsum("nmc,mkc->nmk", query, keys) / 0.7, axis=-1)
  found, _ = trained(quantizer, variables, vectors())
  expected = np.einsum("nmk,mkc->nmc", share, values).reshape(N, D)
  np.testing.assert_allclose(found.vectors, expected, atol=1e-6)
  hard, _ = trained(quantizer.clone(forward_temperature=0.0), variables, vectors())
  np.testing.assert_array_equal(evaluated.vectors, hard.vectors)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", [SoftmaxQuantizer, CentroidQuantizer])
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"additive": True}])
def test_codes_decode_to_the_vectors_bit_for_bit(kind, options):
  quantizer = kind(K, M, D, **options)
  variables, _ = made(quantizer, vectors((2, 7, D)))
  found = apply(quantizer, variables, vectors((2, 7, D)), method="quantized")
  codes = apply(quantizer, variables, vectors((2, 7, D)), method="encode")
  np.testing.assert_array_equal(codes, found.codes)
  np.testing.assert_array_equal(apply(quantizer, variables, codes, method="decode"), found.vectors)


def test_additive_codes_are_the_mean_of_whole_vectors():
  quantizer = SoftmaxQuantizer(K, 5, D, additive=True, normalize=False)
  variables, found = made(quantizer)
  keys, values = (in_float64(variables["params"][name]) for name in ("keys", "values"))
  codes = np.einsum("nd,mkd->nmk", in_float64(vectors()), keys).argmax(axis=-1)
  np.testing.assert_array_equal(found.codes, codes)
  expected = np.mean([values[m][codes[:, m]] for m in range(5)], axis=0)
  np.testing.assert_allclose(found.vectors, expected, atol=1e-6)


def test_values_may_have_another_width_than_keys():
  variables, found = made(SoftmaxQuantizer(K, M, D, value_dim=21))
  assert found.vectors.shape == (N, 21)
  assert variables["params"]["values"].shape == (M, K, 7)


def test_tied_keys_are_the_values():
  variables, _ = made(SoftmaxQuantizer(K, M, D, tied=True))
  assert variables["params"].keys() == {"keys"}


@reference.needs_float16
def test_half_precision_distances_do_not_overflow():
  x = np.full((2, D), 300, np.float16)
  quantizer = CentroidQuantizer(K, M, D)
  variables, found = made(quantizer, x)
  assert found.vectors.dtype == np.float16
  assert np.isfinite(apply(quantizer, variables, x, method="responses")).all()


def test_gumbel_noise_is_drawn_only_in_training():
  quantizer = SoftmaxQuantizer(K, M, D, gumbel=5.0)
  variables, found = made(quantizer)
  again = apply(quantizer, variables, vectors(), method="quantized")
  np.testing.assert_array_equal(found.codes, again.codes)
  noisy, _ = trained(quantizer, variables, vectors())
  quiet, _ = trained(quantizer.clone(gumbel=0.0), variables, vectors())
  assert (np.asarray(noisy.codes) != np.asarray(quiet.codes)).any()


@pytest.mark.parametrize(
  ("quantizer", "message"),
  [
    (lambda: SoftmaxQuantizer(4, 3, 10), "`subspaces` .*10.*3"),
    (lambda: SoftmaxQuantizer(2**31, 1, 12), "`codes` .*2147483648"),
    (lambda: SoftmaxQuantizer(4, 0, 12), "`subspaces` .*0"),
    (lambda: SoftmaxQuantizer(4, 3, 12, gumbel=-1.0), "`gumbel` .*-1.0"),
    (lambda: SoftmaxQuantizer(4, 3, 12, momentum=2.0), "`momentum` .*2.0"),
    (lambda: SoftmaxQuantizer(4, 3, 12, temperature=np.nan), "`temperature` .*nan"),
    (lambda: CentroidQuantizer(4, 3, 12, weight=np.nan), "`weight` .*nan"),
    (lambda: CentroidQuantizer(4, 3, 12, additive=True, shared=True), "`shared` .*True"),
    (lambda: SoftmaxQuantizer(1, 3, 12), "`codes` .*1"),
    (lambda: SoftmaxQuantizer(4, 3, 12, tied=True, value_dim=9), "`value_dim` .*9"),
    (lambda: SoftmaxQuantizer(4, 3, 12, value_dim=10), "`value_dim` .*10"),
    (lambda: SoftmaxQuantizer(4, 3, 12, temperature=0.0), "`temperature` .*0.0"),
  ],
)
def test_fields_outside_their_range_are_refused(quantizer, message):
  own = quantizer()
  with pytest.raises(ValueError, match=message):
    made(own, np.zeros((2, own.dim)))


def test_vectors_and_masks_of_another_shape_and_a_quantiser_without_a_width_are_refused():
  quantizer = SoftmaxQuantizer(K, M, D)
  with pytest.raises(ValueError, match="`dim` of SoftmaxQuantizer"):
    made(SoftmaxQuantizer(K, M))
  with pytest.raises(ValueError, match=r"`vectors` .*12.*13"):
    made(quantizer, np.zeros((2, 13)))
  with pytest.raises(ValueError, match=r"`mask` .*\(13,\).*\(3,\)"):
    trained(quantizer, made(quantizer)[0], vectors(), np.ones(3, bool))
