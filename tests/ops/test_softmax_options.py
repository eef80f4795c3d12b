"""Tests of entropy, mean, best tokens, softcap and losses against float64."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from tests import reference
from tests.ops.exact import compare, float64, normals
from vqjax.ops import device
from vqjax.ops.scores import OutputFunction, ScoreOptions
from vqjax.ops.softmax import (
  linear_cross_entropy,
  linear_log_prob,
  linear_scores,
  linear_softmax,
)

EVERYTHING = {
  "log_prob": {},
  "log_z": {},
  "entropy": {"entropy": True},
  "mean_log_prob": {"mean": True},
  "top_log_probs": {"top_k": 5},
  "collision": {"collision": True},
}


def arrays(n, v, bias, d=6):
  """hidden, weight, bias, tokens and the rows in the distribution; a bias may remove others."""
  hidden, weight, bias_V = normals(0, (n, d), (v, d), (v,))
  kept = np.arange(v, dtype=np.int32)
  if bias == "removes rows":  # whole tiles of them, and single ones
    kept = kept[(kept >= v // 4) & (kept % 7 != 3)]
    bias_V[np.setdiff1d(np.arange(v), kept)] = -np.inf
  tokens = np.random.default_rng(1).choice(kept, n)
  return hidden, weight, None if bias is None else bias_V, tokens, kept


def floats(found):
  """The statistics in the order of `reference.linear_softmax`."""
  return (*found[:5], found.collision)


# Sums of a hundred terms and scores up to 10: some hundred roundings of 6e-8 each.
ATOL = 5e-5


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
  ("n", "v", "tile", "k"),
  [(1, 1, None, 1), (5, 3, (2, 2), 1), (13, 101, (4, 10), 5), (3, 157, (2, 50), 128)],
)
@pytest.mark.parametrize(
  ("softcap", "temperature", "bias"),
  [
    (None, 1, None),
    (None, 1.7, "removes rows"),
    (3, 1, "plain"),
    (2.5, 1, "removes rows"),
    (3, 0.6, "plain"),
  ],
)
def test_all_results_and_their_gradients_together_equal_float64(
  n, v, tile, k, softcap, temperature, bias
):
  *operands, tokens, kept = arrays(n, v, bias)
  outputs = {"entropy": True, "mean": True, "top_k": k, "collision": True}
  options = {"softcap": softcap, "tile": tile, "temperature": temperature}
  ours = lambda h, w, b: floats(linear_softmax(h, w, tokens, b, **outputs, **options))
  whole = lambda h, w, b: reference.linear_softmax(
    h, w, b, tokens, kept, softcap, k, temperature=temperature
  )
  compare(ours, whole, operands, atol=ATOL)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize(("softcap", "bias"), [(None, None), (3, "removes rows")])
def test_each_result_alone_and_its_gradients_equal_float64(name, softcap, bias):
  *operands, tokens, kept = arrays(13, 101, bias)
  index, outputs = list(EVERYTHING).index(name), EVERYTHING[name]

  def ours(h, w, b):
    found = linear_softmax(h, w, tokens, b, softcap=softcap, tile=(4, 10), **outputs)
    return (getattr(found, name),)

  whole = lambda h, w, b: reference.linear_softmax(h, w, b, tokens, kept, softcap, 5)
  compare(ours, lambda h, w, b: whole(h, w, b)[index : index + 1], operands, atol=ATOL)


def test_second_derivatives_of_all_outputs_equal_float64_on_tiles_that_overlap():
  *operands, tokens, kept = arrays(13, 101, "removes rows")

  def second(outputs, operands):
    def total(h, w, b):
      _, _, entropy, mean, best, collision = outputs(h, w, b)
      return (entropy + mean + best.sum(-1) ** 2 + collision).sum()

    slope = lambda *x: sum((d**2).sum() for d in jax.grad(total, (0, 1, 2))(*x))
    return jax.jit(jax.grad(slope, (0, 1, 2)))(*operands)

  options = {"entropy": True, "mean": True, "top_k": 5, "collision": True, "tile": (4, 10)}
  found = second(lambda h, w, b: floats(linear_softmax(h, w, tokens, b, **options)), operands)
  with jax.enable_x64(True):
    whole = lambda h, w, b: reference.linear_softmax(h, w, b, tokens, kept, k=5)
    exact = second(whole, float64(operands))
  for ours, wanted in zip(found, exact, strict=True):
    # Products of sums whose parts are rounded to 1e-6 of themselves.
    np.testing.assert_allclose(ours, wanted, atol=2e-5 * np.abs(wanted).max())


def test_outputs_that_are_not_requested_are_none():
  hidden, weight, bias, tokens, _ = arrays(3, 11, "plain")
  found = jax.eval_shape(linear_softmax, hidden, weight, tokens, bias)
  assert {name for name, x in found._asdict().items() if x is None} == found._asdict().keys() - {
    "log_prob", "log_z", "is_best",
  }  # fmt: skip


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("k", [1, 5, 128])
@pytest.mark.parametrize(("softcap", "bias"), [(None, "plain"), (3, "removes rows")])
def test_the_best_tokens_are_those_of_sorting_and_minus_one_where_there_are_none(k, softcap, bias):
  hidden, weight, bias, tokens, _ = arrays(7, 157, bias)

  @jax.jit
  def run(h, w, b):
    found = linear_softmax(h, w, tokens, b, softcap=softcap, top_k=k, tile=(4, 50))
    return found, linear_scores(h, w, b, softcap=softcap)

  found, scores = jax.device_get(run(hidden, weight, bias))
  expected = np.argsort(-scores, kind="stable")[:, :k]
  expected = np.where(np.isneginf(np.take_along_axis(scores, expected, -1)), -1, expected)
  assert found.top_tokens.dtype == jnp.int32
  np.testing.assert_array_equal(found.top_tokens, expected)


@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_the_rank_of_a_token_and_whether_it_is_the_best_are_those_of_sorting(shape):
  hidden, weight, bias, tokens, kept = arrays(13, 101, "removes rows")
  # Tokens of equal scores: none of them is above another.
  bias[kept[::2]], weight[kept[::2]] = 0.3, weight[kept[0]]
  best = (hidden @ weight.T + bias).argmax(axis=-1)
  tokens = np.where(np.arange(13) % 2, tokens, best)
  tokens[5] = 101
  options = {"rank": True, "softcap": 5.0, "tile": (4, 10)}
  run = lambda h, w, b: linear_softmax(h, w, tokens, b, **options, vocab_axis="model")
  with meshes(shape):
    found = jax.device_get(jax.jit(run)(hidden, weight, bias))
  exact = np.float64(hidden) @ np.float64(weight).T + bias
  # Equal rows have equal scores, whatever the order of their sums is.
  exact[:, kept[::2]] = exact[:, kept[:1]]
  own = np.take_along_axis(exact, np.minimum(tokens, 100)[:, None], axis=-1)
  expected = np.where(tokens < 101, 1 + (exact > own).sum(axis=-1), -1)
  np.testing.assert_array_equal(found.rank, expected)
  np.testing.assert_array_equal(found.is_best, expected == 1)


def meshes(shape):
  """The context of a mesh of rows of this shape, or of one device."""
  if shape is None:
    return contextlib.nullcontext()
  return jax.set_mesh(jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2))


def test_equal_scores_come_in_the_order_of_their_rows():
  hidden, weight, _, tokens, _ = arrays(3, 40, None)
  run = jax.jit(lambda h, w: linear_softmax(h, w, tokens, top_k=20, tile=(2, 7)).top_tokens)
  np.testing.assert_array_equal(run(hidden, 0 * weight), np.tile(np.arange(20), (3, 1)))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_smoothing_and_z_loss_equal_those_of_optax_with_their_gradients(softcap):
  *operands, tokens, _ = arrays(13, 101, "plain")
  options = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": softcap, "tile": (4, 10)}
  weight_N = np.random.default_rng(5).random(13, np.float32)
  ours = lambda h, w, b: (linear_cross_entropy(h, w, tokens, b, token_weight=weight_N, **options),)

  def whole(h, w, b):
    scores = h @ w.T + b
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    target = optax.smooth_labels(jax.nn.one_hot(tokens, 101, dtype=scores.dtype), 0.1)
    loss = optax.softmax_cross_entropy(scores, target)
    loss = loss + 0.02 * jax.nn.logsumexp(scores, axis=-1) ** 2
    return (weight_N * loss,)

  compare(ours, whole, operands, atol=ATOL)


def test_without_options_the_loss_is_minus_log_prob():
  hidden, weight, bias, tokens, _ = arrays(5, 31, "plain")
  run = jax.jit(lambda *a: (linear_cross_entropy(*a), -linear_softmax(*a).log_prob))
  np.testing.assert_array_equal(*run(hidden, weight, tokens, bias))


@pytest.mark.slow
def test_padding_of_weight_zero_has_no_loss_and_no_gradient_whatever_its_token():
  hidden, weight, bias, tokens, _ = arrays(9, 31, "plain")
  real = np.arange(9) % 3 > 0
  mask = np.float32(real)
  padded = np.where(real, tokens, -100)

  @jax.jit
  def loss(operands, tokens, token_weight):
    h, w, b = operands
    return linear_cross_entropy(
      *(h, w, tokens, b), token_weight=token_weight, label_smoothing=0.1, z_loss=1e-2, tile=(4, 10)
    )

  assert not np.asarray(loss((hidden, weight, bias), padded, mask))[~real].any()
  total = lambda *args: loss(*args).sum()
  gradient = jax.jit(jax.grad(total))
  found = jax.device_get(gradient((hidden, weight, bias), padded, mask))
  assert (found[0][~real] == 0).all()
  alone = gradient((hidden[real], weight, bias), tokens[real], np.ones(6, np.float32))
  np.testing.assert_allclose(found[0][real], alone[0], atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[1:], alone[1:])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"softcap": 0.0}, "`softcap` must be positive .* got 0.0"),
    ({"softcap": float("nan")}, "`softcap` .* got nan"),
    ({"softcap": float("inf")}, "`softcap` .* got inf"),
    ({"temperature": 0}, "`temperature` must be positive .* got 0"),
    ({"temperature": float("inf")}, "`temperature` .* got inf"),
    ({"top_k": -1}, r"`top_k` must be in \[0, 128\] .* got -1"),
    ({"top_k": 129}, "`top_k` .* got 129"),
  ],
)
def test_options_without_a_meaning_are_refused(options, message):
  hidden, weight, bias, tokens, _ = arrays(3, 200, "plain")
  with pytest.raises(ValueError, match=message):
    linear_softmax(hidden, weight, tokens, bias, **options)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"label_smoothing": 1.0}, r"`label_smoothing` must be in \[0, 1\); got 1.0"),
    ({"label_smoothing": -0.1}, "`label_smoothing` .* got -0.1"),
    ({"scratch": -1, "reduction": "mean"}, "`scratch` must be .* got -1"),
    pytest.param({"scratch": 1.5}, "`scratch` must be .* got 1.5", marks=pytest.mark.untyped),
    pytest.param({"scratch": True}, "`scratch` must be .* got True", marks=pytest.mark.untyped),
    ({"z_loss": -1e-4}, "`z_loss` must be finite .* got -0.0001"),
  ],
)
def test_losses_without_a_meaning_are_refused(options, message):
  hidden, weight, bias, tokens, _ = arrays(3, 20, "plain")
  with pytest.raises(ValueError, match=message):
    inspect.unwrap(linear_cross_entropy)(hidden, weight, tokens, bias, **options)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(("shape", "tile"), [(None, None), (None, (4, 10)), ((2, 4), None)])
def test_weights_of_classes_are_those_of_their_targets(shape, tile, reduction):
  *operands, tokens, _ = arrays(13, 101, "plain")
  # The losses of classes without weight are not finite where they are scored, nan elsewhere.
  operands[2][0] = -np.inf
  tokens = np.where(np.arange(13) % 3 == 2, 0, np.maximum(tokens, 1))
  class_weight, token_weight = np.random.default_rng(5).random((2, 101), np.float32)
  class_weight[0], token_weight, padded = 0, token_weight[:13], tokens.copy()
  padded[[4, 9]] = -100
  weights = {"ignore_index": -100, "vocab_axis": "model", "tile": tile}

  def ours(h, w, b, classes, token_weight):
    given = {"class_weight": classes, "token_weight": token_weight, "reduction": reduction}
    return (linear_cross_entropy(h, w, padded, b, **given, **weights),)

  def whole(h, w, b, classes, token_weight):
    log_prob = jax.nn.log_softmax(h @ w.T + b)[np.arange(13), tokens]
    # A weight of 0 leaves a token out, and has no gradient itself.
    share = jnp.where((padded < 0) | (classes[tokens] == 0), 0, classes[tokens] * token_weight)
    each = -share * jnp.where(share == 0, 0, log_prob)
    return ({"none": each, "sum": each.sum(), "mean": each.sum() / share.sum()}[reduction],)

  with meshes(shape):
    compare(ours, whole, (*operands, class_weight, token_weight), atol=ATOL)


def test_weights_of_classes_that_have_no_meaning_are_refused():
  hidden, weight, _, tokens, _ = arrays(3, 20, "plain")
  loss = functools.partial(inspect.unwrap(linear_cross_entropy), hidden, weight, tokens)
  with pytest.raises(ValueError, match=r"`class_weight` must be \[20\].* got \(3,\)"):
    loss(class_weight=np.ones(3, np.float32))
  with pytest.raises(ValueError, match="`label_smoothing` must be 0 where `class_weight`"):
    loss(class_weight=np.ones(20, np.float32), label_smoothing=0.1)


def test_weights_and_masks_of_another_shape_than_the_tokens_are_refused():
  hidden, weight, tokens = np.ones((5, 4)), np.ones((31, 4)), np.zeros(5, np.int32)
  with pytest.raises(ValueError, match=r"`mask` must be bool of shape \(5,\)"):
    inspect.unwrap(linear_softmax)(hidden, weight, tokens, mask=np.ones(5))
  with pytest.raises(TypeError, match="`mask` must be an array; got list"):
    inspect.unwrap(linear_softmax)(hidden, weight, tokens, mask=[True] * 5)
  with pytest.raises(ValueError, match=r"`token_weight` must .*\(5,\) .* got \(5, 1\)"):
    inspect.unwrap(linear_cross_entropy)(hidden, weight, tokens, token_weight=np.ones((5, 1)))


def test_padding_may_have_a_hidden_vector_that_is_no_number():
  hidden, weight = np.ones((3, 4), np.float32), normals(0, (31, 4))[0]
  hidden[1] = np.nan
  tokens = np.array([3, -100, 5])

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def run(h, w, token_weight, mask):
    options = {"token_weight": token_weight}, {"mask": mask}, {"ignore_index": -100}
    return sum(linear_cross_entropy(h, w, tokens, **option).sum() for option in options)

  found = run(hidden, weight, np.float32([1, 0, 1]), np.array([True, False, True]))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_results_of_tokens_that_a_mask_leaves_out_are_zero_without_a_gradient():
  hidden, weight, bias, tokens, _ = arrays(13, 101, "plain")
  mask = np.arange(13) % 3 != 1
  broken, odd = np.where(mask[:, None], hidden, np.nan), np.where(mask, tokens, -100)

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
  def run(h, w, b, tokens, mask):
    options = {"entropy": True, "mean": True, "top_k": 3, "temperature": 0.7, "tile": (4, 10)}
    options |= {"collision": True, "rank": True}
    found = linear_softmax(h, w, tokens, b, mask=mask, **options)
    return sum(x.sum() for x in floats(found)), found

  (value, found), gradients = jax.device_get(run(broken, weight, bias, odd, mask))
  (expected, _), alone = run(hidden[mask], weight, bias, tokens[mask], None)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for statistic in (*floats(found), found.is_best):
    assert not statistic[~mask].any()
  for numbers in (found.top_tokens, found.rank):
    assert (numbers[~mask] == -1).all()
  assert not gradients[0][~mask].any()
  np.testing.assert_allclose(gradients[0][mask], alone[0], atol=1e-5)
  for ours, wanted in zip(gradients[1:], alone[1:]):
    np.testing.assert_allclose(ours, wanted, atol=5e-5)


def test_a_batch_without_tokens_may_have_a_mask():
  run = functools.partial(linear_softmax, mask=np.zeros(0, bool))
  found = jax.eval_shape(run, np.zeros((0, 4)), np.ones((31, 4)), np.zeros(0, np.int32))
  assert found.log_prob.shape == (0,)


def test_a_score_beyond_all_numbers_is_capped_and_not_removed():
  weight = np.float32([[-1e20], [0], [1e20]])
  run = jax.jit(lambda h, w: linear_softmax(h, w, np.array([0]), softcap=5.0).log_prob)
  expected = -5 - np.log(np.exp(-5) + 1 + np.exp(5))
  np.testing.assert_allclose(run(np.full((1, 1), 1e20, np.float32), weight), expected, rtol=1e-5)


@pytest.mark.parametrize("tile", [(4,), (2.0, 4), (1, 2, 3)])
@pytest.mark.untyped
def test_a_tile_must_be_two_ints(tile):
  with pytest.raises(ValueError, match=r"`tile` must be .* got"):
    ScoreOptions(tile=tile)


def test_narrow_tokens_do_not_wrap_to_the_index_that_is_ignored():
  @jax.jit
  def run(narrow, wide):
    hidden, weight = jnp.ones((3, 4)), jnp.ones((300, 4))
    # -156 is 100 in eight bits; -100 in 32 bits without a sign is what it was cast from.
    return (
      linear_cross_entropy(hidden, weight, narrow, ignore_index=-156),
      linear_cross_entropy(hidden, weight, wide, ignore_index=-100),
    )

  narrow, wide = run(np.uint8([1, 100, 2]), np.array([1, 2**32 - 100, 2], np.uint32))
  np.testing.assert_allclose(narrow, np.full(3, np.log(300)), rtol=1e-6)
  np.testing.assert_allclose(wide, np.log(300) * np.array([1, 0, 1]), rtol=1e-6)


@pytest.mark.parametrize("scratch", [0, 3 * 4 * 13 * 64, 2**20])
def test_kept_scores_of_some_or_all_rows_change_nothing(scratch):
  n, v = 13, 211
  hidden, weight, bias, cotangent = *normals(0, (n, 6), (v, 6), (v,)), *normals(7, (n,))
  bias[70:80] = -np.inf
  tokens = np.random.default_rng(1).integers(0, 70, n)

  def run(h, w, b):
    total = lambda *x: linear_log_prob(
      x[0], x[1], tokens, x[2], softcap=5.0, temperature=0.7, scratch=scratch
    )
    value, pull = jax.vjp(total, h, w, b)
    return value, pull(cotangent)

  with device.using(device.current()._replace(tokens=8, vocab=64, kept=0)):
    value, found = jax.jit(run)(hidden, weight, bias)
  scores = 5 * np.tanh((np.float64(hidden) @ np.float64(weight).T + bias) / 5) / 0.7
  scores[:, np.isneginf(bias)] = -np.inf
  expected = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(value, expected[np.arange(n), tokens], atol=1e-5)
  d_scores = cotangent[:, None] * (np.eye(v)[tokens] - np.exp(expected))
  d_raw = d_scores * (1 - (np.where(np.isneginf(scores), 0, scores) * 0.7 / 5) ** 2) / 0.7
  exact = d_raw @ np.float64(weight), d_raw.T @ np.float64(hidden), d_raw.sum(axis=0)
  for ours, wanted in zip(found, exact):
    np.testing.assert_allclose(ours, wanted, atol=2e-5)


class Counted(OutputFunction):
  """The scores, and a count of the tiles that were computed."""

  def __init__(self):
    self.tiles = 0

  def __call__(self, score):
    jax.debug.callback(self.add)
    return score

  def slope(self, result):
    return jnp.ones_like(result)

  def add(self):
    self.tiles += 1


@pytest.mark.parametrize("counted", [0, 1, 64, 65, 256])
def test_tokens_that_are_left_out_are_not_scored(counted):
  n, v, function = 256, 32, Counted()
  hidden, weight = normals(0, (n, 6), (v, 6))
  tokens, mask = np.arange(n) % v, np.zeros(n, bool)
  mask[np.random.default_rng(1).permutation(n)[:counted]] = True
  hidden[~mask] = np.nan

  def run(h, w):
    log_prob = lambda *x: linear_softmax(*x, tokens, mask=mask, output=function).log_prob
    value, pull = jax.vjp(log_prob, h, w)
    return value, pull(jnp.linspace(1, 2, n))

  with device.using(device.current()._replace(tokens=64, vocab=v, kept=0)):
    value, found = jax.block_until_ready(jax.jit(run)(hidden, weight))
  jax.effects_barrier()
  # Tiles of 64 tokens by all rows, forward and backward.
  assert function.tiles == 2 * -(-counted // 64)
  expected = np.zeros(n)
  expected[mask] = reference.linear_log_prob(hidden[mask], weight, tokens[mask])
  np.testing.assert_allclose(value, expected, atol=1e-5)
  cotangent = np.linspace(1, 2, n)[mask]
  exact = reference.linear_gradients(hidden[mask], weight, tokens[mask], cotangent)
  np.testing.assert_allclose(found[0][mask], exact[0], atol=2e-5)
  assert not found[0][~mask].any()
  np.testing.assert_allclose(found[1], exact[1], atol=2e-5)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_precision_is_of_all_products_in_both_directions(reduction):
  hidden, weight, _, tokens, _ = arrays(13, 101, "plain")

  def loss(h, w):
    # Compiled inside, so that the rules of the gradient are traced after the call.
    run = jax.jit(lambda *x: linear_cross_entropy(*x, tokens, reduction=reduction, **options))
    return run(h, w).sum()

  options = {"label_smoothing": 0.1, "precision": "highest"}
  highest = (jax.lax.Precision.HIGHEST,) * 2
  with device.using(device.current()._replace(tokens=8, vocab=64, kept=0, balance=0.0)):
    assert reference.precisions_of(jax.grad(loss, (0, 1)), hidden, weight) == {highest}
  with pytest.raises(ValueError, match=r"`precision` must be .* got 'best'"):
    ScoreOptions(precision="best")
