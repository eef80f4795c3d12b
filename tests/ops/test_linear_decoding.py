"""Top-k and samples from (hidden, weight) against a sort of all float64 scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import reference
from vqjax import linear_sample, linear_top_k
from vqjax.ops import device, sampling
from vqjax.ops.row_factory import columns

V, D = 1009, 12


@functools.lru_cache
def operands(rows=5):
  draw = np.random.default_rng(0)
  hidden = draw.normal(size=(rows, D)).astype(np.float32)
  # Small integers, so that many scores tie exactly.
  weight = draw.integers(-2, 3, (V, D)).astype(np.float32)
  return hidden, weight, np.where(draw.random(V) < 0.2, -np.inf, 0.5).astype(np.float32)


def exact(hidden, weight, bias=None, softcap=None):
  """Log-probabilities in float64."""
  scores = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
  scores = scores if bias is None else scores + np.asarray(bias, np.float64)
  if softcap:
    scores = np.where(np.isneginf(scores), -np.inf, softcap * np.tanh(scores / softcap))
  return reference.log_softmax(scores)


def check_best(found, expected, k):
  """The k highest of `expected`, each token once, and -1 where a row has no more."""
  log_probs, tokens = (np.asarray(x) for x in found)
  np.testing.assert_allclose(log_probs, np.sort(expected)[..., ::-1][..., :k], atol=2e-5)
  real = np.isfinite(log_probs)
  assert (tokens[~real] == -1).all()
  own = np.take_along_axis(expected, np.maximum(tokens, 0), -1)
  np.testing.assert_allclose(own[real], log_probs[real], atol=2e-5)
  assert all(len(set(row[keep])) == keep.sum() for row, keep in zip(tokens, real))


@pytest.fixture(params=["in one block", "in blocks"])
def width(request, monkeypatch):
  """Scores are stored whole, or come in blocks whose last one repeats rows."""
  if request.param == "in blocks":
    limits = device.current()._replace(few=0)
    monkeypatch.setattr(device, "current", lambda: limits)
    monkeypatch.setattr(sampling, "block_width", lambda *_: 400)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize(
  ("k", "options"), [(1, {}), (7, {"softcap": 3.0}), pytest.param(900, {}, marks=pytest.mark.slow)]
)
def test_top_k_equals_a_sort_of_all_scores(k, options):
  hidden, weight, bias = operands()
  found = jax.jit(lambda *a: linear_top_k(*a[:2], k, a[2], **options))(hidden, weight, bias)
  check_best(found, exact(hidden, weight, bias, **options), k)


def test_tokens_of_equal_scores_come_in_the_order_of_their_numbers():
  hidden, weight, _ = operands()
  whole = np.round(hidden)  # integers: equal scores are equal in float32 too
  _, tokens = jax.jit(lambda h, w: linear_top_k(h, w, 6))(whole, weight)
  expected = np.argsort(-(whole @ weight.T), axis=-1, kind="stable")
  np.testing.assert_array_equal(tokens, expected[:, :6])


def test_one_vector_no_vectors_and_one_of_bfloat16():
  hidden, weight, _ = operands()
  low, low_weight = hidden[:1].astype(jnp.bfloat16), weight.astype(jnp.bfloat16)

  @jax.jit
  def run(hidden, weight, low, low_weight):
    return (
      linear_top_k(hidden[0], weight, 5),
      linear_top_k(hidden[:0], weight, 3),
      linear_sample(hidden[:0], jax.random.key(0), weight),
      linear_top_k(low, low_weight, 5),
    )

  one, nothing, no_draws, narrow = jax.device_get(run(hidden, weight, low, low_weight))
  check_best([x[None] for x in one], exact(hidden[:1], weight), 5)
  assert [x.shape for x in nothing] == [(0, 3), (0, 3)]
  assert no_draws.shape == (0,)
  check_best(narrow, exact(low, weight), 5)


@pytest.mark.usefixtures("width")
def test_draws_have_the_distribution_that_their_options_describe():
  hidden, weight, bias = operands()
  rows = np.broadcast_to(hidden[0], (4000, D))
  allowed = np.arange(V) % 3 > 0
  options = {"temperature": 2.0, "allowed": allowed, "top_p": 0.6}
  draw = jax.jit(lambda h, w, b: linear_sample(h, jax.random.key(1), w, b, **options))
  drawn = np.asarray(draw(rows, weight, bias))
  scores = np.where(allowed, exact(hidden[:1], weight, bias)[0] / 2, -np.inf)
  probability = np.exp(reference.log_softmax(scores))
  edge = np.sort(probability)[::-1][np.searchsorted(np.cumsum(np.sort(probability)[::-1]), 0.6)]
  # Ties with the last token stay; a rounding of float32 does not separate them.
  probability = np.where(probability >= edge * (1 - 1e-5), probability, 0)
  share = probability / probability.sum() * len(drawn)
  counts = np.bincount(drawn, minlength=V)
  assert counts[share == 0].sum() == 0
  # Tokens of a few expected draws are counted together.
  some = share >= 5
  counts, share = (np.append(x[some], x[~some].sum()) for x in (counts, share))
  assert scipy.stats.chisquare(counts[share > 0], share[share > 0]).pvalue > 1e-4


def test_a_mask_of_fewer_tokens_than_top_k_and_of_none():
  hidden, weight, _ = operands()
  allowed = np.zeros((5, V), bool)
  allowed[np.arange(4), [3, 1008, 0, 500]] = True

  @jax.jit
  def run(hidden, weight):
    draw = functools.partial(linear_sample, hidden, jax.random.key(0), weight, allowed=allowed)
    return draw(top_k=50), draw(temperature=0)

  drawn, best = run(hidden, weight)
  assert drawn.tolist() == [3, 1008, 0, 500, -1]
  assert best.tolist()[4] == -1


@pytest.mark.untyped
@pytest.mark.parametrize("allowed", [np.full(V, np.nan), np.arange(V), np.ones(V, np.float32)])
def test_a_mask_that_is_not_of_booleans_is_refused(allowed):
  hidden, weight, _ = operands()
  with pytest.raises(TypeError, match=r"`allowed` must be booleans; got (float|int)"):
    linear_sample(hidden, jax.random.key(0), weight, allowed=allowed)


@pytest.mark.usefixtures("width")
def test_where_every_bias_is_minus_infinity_no_token_has_a_probability():
  hidden, weight, bias = operands()
  run = jax.jit(lambda h, w, b: linear_top_k(h, w, 3, b))
  log_probs, tokens = jax.device_get(run(hidden, weight, np.full_like(bias, -np.inf)))
  assert np.isneginf(log_probs).all()
  assert (tokens == -1).all()


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("rows", [1, 5])
def test_columns_of_a_kernel_are_rows(rows):
  hidden, weight, bias = operands(rows)
  found = jax.jit(lambda h, k, b: linear_top_k(h, columns(k), 7, b))(hidden, weight.T, bias)
  check_best(found, exact(hidden, weight, bias), 7)


def test_columns_of_a_kernel_on_eight_devices():
  hidden, weight, bias = operands()
  options = {"bias": bias, "vocab_axis": "model"}

  @jax.jit
  def both(hidden, kernel):
    best = linear_top_k(hidden, columns(kernel), 200, **options)
    key = jax.random.key(0)
    return best, linear_sample(hidden, key, columns(kernel), temperature=0, **options)

  with jax.set_mesh(jax.make_mesh((8,), ("model",), (AxisType.Auto,))):
    best, drawn = jax.device_get(both(hidden, weight.T))
  expected = exact(hidden, weight, bias)
  check_best(best, expected, 200)
  own = np.take_along_axis(expected, drawn[:, None], -1)[:, 0]
  np.testing.assert_allclose(own, expected.max(axis=-1), atol=2e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_shards_the_vocabulary_and_the_tokens(kind):
  hidden, weight, bias = operands(rows=6)
  expected = exact(hidden, weight, bias)
  mesh = jax.make_mesh((2, 4), ("data", "model"), (kind, kind))

  @jax.jit
  def both(hidden, weight, bias):
    best = linear_top_k(hidden, weight, 300, bias, vocab_axis="model")
    draws = [
      linear_sample(hidden, jax.random.key(0), weight, bias, vocab_axis="model", **options)
      for options in ({}, {"temperature": 0}, {"top_p": 1e-3}, {"top_k": 1})
    ]
    return best, draws

  with jax.set_mesh(mesh):
    best, draws = both(jax.device_put(hidden, P("data")), weight, bias)
    if kind == AxisType.Explicit:
      assert jax.typeof(draws[0]).sharding.spec == P("data")
    best, draws = jax.device_get((best, draws))
  # 300 of each device's 253 rows: the lists of the devices are shorter than k.
  check_best(best, expected, 300)
  drawn, *certain = draws
  assert np.isfinite(np.take_along_axis(expected, drawn[:, None], -1)).all()
  for tokens in certain:
    own = np.take_along_axis(expected, tokens[:, None], -1)[:, 0]
    np.testing.assert_allclose(own, expected.max(axis=-1), atol=2e-5)


def test_no_array_of_many_rows_times_the_vocabulary_is_made():
  rows, vocab = 2053, 40_009
  hidden, weight = (jax.ShapeDtypeStruct((n, D), jnp.float32) for n in (rows, vocab))
  key = jax.random.key(0)
  for program in (lambda h, w: linear_top_k(h, w, 9), lambda h, w: linear_sample(h, key, w)):
    assert reference.largest_value(program, hidden, weight) < rows * vocab / 4


def test_k_outside_the_vocabulary_is_refused():
  hidden, weight, _ = operands()
  for k in (0, V + 1):
    with pytest.raises(ValueError, match=rf"`k` must be in \[1, {V}\].*got {k}"):
      linear_top_k(hidden, weight, k)
