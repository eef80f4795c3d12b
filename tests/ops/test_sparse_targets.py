"""Tests of losses against a few tokens of each distribution, in float64 from all logits."""

import contextlib
import functools
import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import reference
from tests.ops.exact import compare, float64, normals, scores
from vqjax.lab.plan import collectives, hlo, loops
from vqjax.ops.distillation import linear_divergence
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.sparse_targets import (
  linear_sparse_target_loss,
  linear_token_log_probs,
  linear_top_k_divergence,
)
from vqjax.sharding import MeshShape, make_mesh

V, D, E, K = 101, 6, 9, 5
# Scores up to 20 have an error of 20 · 2^-24 · sqrt(9) = 4e-6 each, and a gradient adds up 101 of
# them, weighted by hidden vectors up to 3.
ATOL = 1e-4
RESTS = ["ignore", "bucket", "renormalize"]


def operands(*batch):
  """Hidden vectors, weight, bias, K distinct tokens, and their probabilities of a teacher."""
  *arrays, chances = normals(0, (*batch, D), (V, D), (V,), (*batch, K + 1))
  order = np.random.default_rng(1).random((*batch, V)).argsort(axis=-1).astype(np.int32)
  return *arrays, order[..., :K], scipy.special.softmax(chances, axis=-1)[..., :K]


def outcomes(rest, log_p, tokens):
  """Log-probabilities of the outcomes that are compared, from those of all tokens."""
  own = jnp.take_along_axis(log_p, tokens, axis=-1)
  if rest == "renormalize":
    return jax.nn.log_softmax(own)
  if rest == "ignore":
    return own
  others = jnp.ones(log_p.shape, bool)
  others = jnp.put_along_axis(others, tokens, False, axis=-1, inplace=False)
  return jnp.concatenate(
    [own, jax.nn.logsumexp(log_p, axis=-1, where=others, keepdims=True)], axis=-1
  )


def whole_loss(
  hidden, weight, bias, probs, *, tokens, rest="ignore", softcap=None, temperature=1.0
):
  """(cross-entropy, KL) from all scores, in the precision of the arguments."""
  log_p = jax.nn.log_softmax(scores(hidden, weight, bias, softcap, temperature))
  log_p = outcomes(rest, log_p, tokens)
  if rest == "bucket":
    probs = jnp.concatenate([probs, 1 - probs.sum(-1, keepdims=True)], axis=-1)
  if rest == "renormalize":
    probs = probs / probs.sum(-1, keepdims=True)
  cross_entropy = -(probs * log_p).sum(-1)
  return cross_entropy, cross_entropy + (probs * jnp.log(probs)).sum(-1)


OPTIONS = [{"temperature": 1.5, "softcap": 3}, {}]


TILE = ScoreOptions(tile=(4, 10))
token_log_probs = jax.jit(functools.partial(linear_token_log_probs, options=TILE))


class TestTokenLogProbs:
  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("options", OPTIONS)
  @pytest.mark.parametrize(("n", "tile"), [(13, (4, 10)), (1, None), (13, (100, V))])
  def test_values_and_gradients_equal_float64(self, n, tile, options):
    *arrays, tokens, _ = operands(n)

    def ours(h, w, b):
      scored = ScoreOptions(tile=tile, **options)
      run = functools.partial(linear_token_log_probs, h, w, tokens, b, options=scored)
      return run(rest=False).log_probs, *run(rest=True)

    def whole(h, w, b):
      found = outcomes("bucket", jax.nn.log_softmax(scores(h, w, b, **options)), tokens)
      return found[..., :K], found[..., :K], found[..., K]

    compare(ours, whole, arrays, atol=ATOL)

  def test_the_rest_keeps_its_digits_where_the_tokens_have_nearly_all_the_mass(self):
    hidden, weight, bias, tokens, _ = operands(7)
    # 60 nats above the others: in float32, 1 minus the probabilities would be 0.
    bias[tokens[0]] += 60
    tokens = np.broadcast_to(tokens[0], tokens.shape)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(b):
      log_rest = linear_token_log_probs(hidden, weight, tokens, b, rest=True, options=TILE).log_rest
      return log_rest.sum(), log_rest

    gradient, log_rest = run(bias)
    wide = float64((hidden, weight, bias))
    log_p = reference.log_softmax(wide[0] @ wide[1].T + wide[2])
    others = np.ones(V, bool)
    others[tokens[0]] = False
    expected = np.log(np.exp(log_p[:, others]).sum(-1))
    np.testing.assert_allclose(log_rest, expected, atol=2e-5)
    share = np.exp(log_p - expected[:, None])
    share[:, ~others] = 0
    np.testing.assert_allclose(gradient, (share - np.exp(log_p)).sum(0), atol=1e-4)

  def test_tokens_that_are_the_whole_vocabulary_leave_no_rest_and_no_nan(self):
    hidden, weight = operands(3)[0], np.ones((4, D), np.float32)
    tokens = np.tile(np.arange(4), (3, 1))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def total(h, w):
      found = linear_token_log_probs(h, w, tokens, rest=True, options=ScoreOptions(tile=(2, 3)))
      return found.log_probs.sum(), found.log_rest

    (value, log_rest), gradients = total(hidden, weight)
    np.testing.assert_allclose(value, -12 * np.log(4), rtol=1e-6)
    assert np.isneginf(log_rest).all()
    for gradient in gradients:
      np.testing.assert_allclose(gradient, 0, atol=1e-5)

  def test_a_token_outside_of_the_vocabulary_is_nan_and_touches_no_other(self):
    hidden, weight, bias, tokens, _ = operands(5)
    good = np.array(token_log_probs(hidden, weight, tokens, bias).log_probs)
    for outside in (-1, V, 2**31 - 1):
      tokens[2, 1], good[2, 1] = outside, np.nan
      found = token_log_probs(hidden, weight, tokens, bias).log_probs
      np.testing.assert_array_equal(found, good)


class TestSparseTargetLoss:
  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("options", OPTIONS)
  @pytest.mark.parametrize(
    ("n", "tile", "with_bias"), [(13, (4, 10), True), (1, None, True), (13, (100, V), False)]
  )
  def test_losses_and_all_gradients_equal_float64(self, options, n, tile, with_bias):
    hidden, weight, bias, tokens, probs = operands(n)
    bias = bias if with_bias else None

    def ours(h, w, b, q):
      scored = ScoreOptions(tile=tile, **options)
      run = functools.partial(linear_sparse_target_loss, h, w, tokens, q, b, options=scored)
      return sum((tuple(run(rest=rest)) for rest in RESTS), ())

    def whole(*arrays):
      run = functools.partial(whole_loss, *arrays, tokens=tokens, **options)
      return sum((run(rest=rest) for rest in RESTS), ())

    compare(ours, whole, (hidden, weight, bias, probs), atol=ATOL)

  def test_probabilities_of_all_tokens_give_the_losses_of_the_whole_distribution(self):
    hidden, weight, bias, _, _ = operands(4)
    (teacher,) = normals(8, (V, D))
    tokens = np.tile(np.arange(V), (4, 1))

    @jax.jit
    def run(h, w, t, b):
      probs = jax.nn.softmax(h @ t.T)
      loss = functools.partial(linear_sparse_target_loss, h, w, tokens, probs, b)
      return linear_divergence(h, w, h, t, b, mixture=0), [loss(rest=x).kl for x in RESTS]

    expected, found = run(hidden, weight, teacher, bias)
    for kl in found:
      np.testing.assert_allclose(kl, expected, atol=2e-5)

  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("rest", RESTS)
  def test_unused_entries_and_tokens_left_out_contribute_exactly_zero(self, rest):
    hidden, weight, bias, tokens, probs = operands(13)
    keep = np.arange(13) % 3 != 1
    factor = np.where(np.arange(13) % 5 == 4, 0, np.linspace(0.5, 2, 13)).astype(np.float32)
    counts = keep & (factor != 0)
    broken = lambda x: np.where(counts[:, None], x, np.nan)
    odd = np.where(counts[:, None], tokens, -100)
    # Three more entries that no token uses: a repeated token, another token, and none.
    wider = np.concatenate([odd[:, :1], np.full((13, 1), 7), np.full((13, 1), -1), odd], axis=-1)
    more = np.pad(broken(probs), ((0, 0), (3, 0)))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def run(h, w, b, tokens, probs, mask, factor):
      options = {"mask": mask, "token_weight": factor, "rest": rest, "options": TILE}
      both = linear_sparse_target_loss(h, w, tokens, probs, b, **options)
      return both.kl.sum() + both.cross_entropy.sum(), both

    given = broken(hidden), weight, bias, wider, more, keep, factor
    (value, each), found = jax.device_get(run(*given))
    given = hidden[counts], weight, bias, tokens[counts], probs[counts], None, factor[counts]
    (expected, _), alone = run(*given)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for losses in each:
      assert (losses[~counts] == 0).all()
    assert not found[0][~counts].any()
    chex.assert_trees_all_close((found[0][counts], *found[1:]), alone, atol=ATOL, rtol=0)

  @pytest.mark.parametrize("shape", [None, MeshShape(2, 1, 4)])
  def test_shifted_targets_of_one_hidden_vector_are_the_sum_of_their_losses(self, shape):
    arrays = normals(0, (13, D), (V, D), (V,))
    text = np.random.default_rng(1).integers(0, V, 13)
    text[4:7] = 7  # the targets of a hidden vector may repeat
    shifted = np.stack([np.pad(text[k:], (0, k), constant_values=-100) for k in range(4)], axis=-1)
    share = np.where(shifted < 0, 0, np.float32([1, 0.5, 0.25, 0.1]))
    options = ScoreOptions(tile=(4, 10), vocab_axis="model")

    def ours(h, w, b):
      return (linear_sparse_target_loss(h, w, shifted, share, b, options=options).cross_entropy,)

    def whole(h, w, b):
      log_p = jax.nn.log_softmax(scores(h, w, b))
      return (-sum(share[:, k] * log_p[np.arange(13), shifted[:, k]] for k in range(4)),)

    with jax.set_mesh(make_mesh(shape)) if shape else contextlib.nullcontext():
      compare(ours, whole, arrays, atol=ATOL)

  def test_mass_on_a_token_outside_of_the_vocabulary_makes_the_loss_nan(self):
    *arrays, bias, tokens, probs = operands(3)
    tokens[1, 2] = V
    run = jax.jit(lambda *a: [linear_sparse_target_loss(*a, rest=x).kl for x in RESTS])
    for kl in run(*arrays, tokens, probs, bias):
      np.testing.assert_array_equal(np.isnan(kl), [False, True, False])

  def test_rows_that_a_bias_removes_have_no_probability_and_no_gradient(self):
    hidden, weight, bias, tokens, probs = operands(5)
    removed = np.setdiff1d(np.arange(10, 60), tokens)
    kept = np.setdiff1d(np.arange(V), removed)
    inside = np.searchsorted(kept, tokens).astype(np.int32)
    gone = np.where(np.isin(np.arange(V), removed), -np.inf, bias)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def total(h, w, b, tokens):
      return linear_sparse_target_loss(
        h, w, tokens, probs, b, rest="bucket", options=ScoreOptions(tile=(4, 10), softcap=5.0)
      ).kl.sum()

    value, (d_hidden, d_weight) = jax.device_get(total(hidden, weight, gone, tokens))
    expected = total(hidden, weight[kept], bias[kept], inside)
    chex.assert_trees_all_close((value, (d_hidden, d_weight[kept])), expected, atol=ATOL, rtol=0)
    assert not d_weight[removed].any()

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      ({"probs": np.ones((3, K - 1))}, r"`probs` must have the shape \(3, 5\) .* got \(3, 4\)"),
      ({"tokens": np.ones((3,), int)}, r"`probs` must have the shape \(3,\)"),
      ({"rest": "drop"}, r"`rest` must be .* got 'drop'"),
      ({"token_weight": np.ones(4)}, r"`token_weight` must have the shape \(3,\)"),
    ],
  )
  def test_what_does_not_fit_is_refused(self, change, message):
    hidden, weight, _, tokens, probs = operands(3)
    arguments = {"hidden": hidden, "weight": weight, "tokens": tokens, "probs": probs} | change
    with pytest.raises(ValueError, match=message):
      inspect.unwrap(linear_sparse_target_loss)(**arguments)


def teacher_operands(*batch):
  return normals(3, (*batch, E), (V, E), (V,))


class TestTopKDivergence:
  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("mixture", [0.3, 0, 1, None])
  @pytest.mark.parametrize("options", OPTIONS)
  def test_values_and_all_gradients_equal_float64(self, mixture, options):
    hidden, weight, bias, _, _ = operands(13)
    softcap, temperature = options.get("softcap"), options.get("temperature", 1.0)

    def ours(h, w, b, th, tw, tb):
      scored = ScoreOptions(tile=(4, 10), softcap=softcap, temperature=temperature)
      run = functools.partial(linear_top_k_divergence, h, w, th, tw, b, tb, k=K, mixture=mixture)
      return [run(rest=rest, teacher_softcap=softcap, options=scored) for rest in RESTS]

    def whole(h, w, b, th, tw, tb):
      student = jax.nn.log_softmax(scores(h, w, b, softcap, temperature))
      teacher = jax.nn.log_softmax(scores(th, tw, tb, softcap, temperature))
      tokens = jax.lax.stop_gradient(teacher).argsort(axis=-1, descending=True)[..., :K]
      return [
        divergence(*(outcomes(rest, x, tokens) for x in (student, teacher))) for rest in RESTS
      ]

    def divergence(log_p, log_q):
      if mixture == 1:
        log_p, log_q = log_q, log_p
      p, q = jnp.exp(log_p), jnp.exp(log_q)
      if mixture is None:
        return jnp.abs(p - q).sum(-1) / 2
      if mixture in (0, 1):
        return (q * (log_q - log_p)).sum(-1)
      log_m = jnp.log(mixture * q + (1 - mixture) * p)
      terms = mixture * q * (log_q - log_m) + (1 - mixture) * p * (log_p - log_m)
      return terms.sum(-1)

    compare(ours, whole, (hidden, weight, bias, *teacher_operands(13)), atol=ATOL)

  def test_a_bucket_of_the_rest_bounds_the_whole_divergence_from_below(self):
    hidden, weight, bias, _, _ = operands(13)
    teacher, teacher_weight, teacher_bias = teacher_operands(13)

    @jax.jit
    def run(*arrays):
      parts = lambda **options: [
        *(linear_top_k_divergence(*arrays, k=k, rest="bucket", **options) for k in (1, 81)),
        linear_divergence(*arrays, **options),
      ]
      return parts(mixture=0), parts(mixture=0.5)

    for parts in run(hidden, weight, teacher, teacher_weight, bias, teacher_bias):
      for less, more in itertools.pairwise(parts):
        assert (np.asarray(less) <= np.asarray(more) + 1e-5).all()

  def test_fewer_tokens_than_k_have_no_nan(self):
    hidden, weight, bias, _, _ = operands(3)
    teacher, teacher_weight, teacher_bias = teacher_operands(3)
    only = np.where(np.isin(np.arange(V), [3, 50]), teacher_bias, -np.inf)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
    def total(h, w, th, tw):
      losses = [
        linear_top_k_divergence(h, w, th, tw, bias, only, k=K, **options).sum()
        for options in (
          {"rest": "ignore", "mixture": 0},
          {"rest": "bucket", "mixture": 0.5},
          {"rest": "renormalize", "mixture": 0.5},
        )
      ]
      return sum(losses)

    value, gradients = total(hidden, weight, teacher, teacher_weight)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in gradients)

  @pytest.mark.parametrize(
    ("options", "message"),
    [
      ({"k": 0}, r"`k` must be in \[1, 101\] .* got 0"),
      ({"k": 129}, r"`k` must be in \[1, .* got 129"),
      ({"k": 2, "mixture": 2}, "`mixture` must be"),
    ],
  )
  def test_options_without_a_meaning_are_refused(self, options, message):
    hidden, weight, _, _, _ = operands(3)
    teacher, teacher_weight, _ = teacher_operands(3)
    with pytest.raises(ValueError, match=message):
      linear_top_k_divergence(hidden, weight, teacher, teacher_weight, **options)


# The policies differ in arithmetic on [N, k] numbers alone, after what a mesh takes part in.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", [MeshShape(1, 1, 8), MeshShape(2, 2, 2)])
@pytest.mark.parametrize("name", ["sparse", "top_k"])
def test_a_mesh_changes_neither_losses_nor_gradients(name, shape):
  hidden, weight, bias, tokens, probs = operands(3, 5)
  scored = ScoreOptions(tile=(4, 10), softcap=5.0, vocab_axis="model")
  options = {"rest": "bucket", "options": scored}

  def sparse(h, w, b):
    return linear_sparse_target_loss(h, w, tokens, probs, b, **options).kl.mean()

  def top_k(h, w, th, tw, tb):
    return linear_top_k_divergence(h, w, th, tw, bias, tb, k=K, mixture=0.3, **options).mean()

  loss = {"sparse": sparse, "top_k": top_k}[name]
  arrays = (hidden, weight, *([bias] if name == "sparse" else teacher_operands(3, 5)))
  run = jax.value_and_grad(loss, range(len(arrays)))
  wanted = jax.jit(run)(*arrays)
  with jax.set_mesh(make_mesh(shape)):
    found = jax.device_get(jax.jit(run)(*arrays))
  chex.assert_trees_all_close(found, wanted, atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("rest", RESTS)
def test_bfloat16_operands_are_scored_and_summed_in_float32(rest):
  hidden, weight, _, tokens, probs = operands(64)
  arrays = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
  total = lambda h, w: linear_sparse_target_loss(h, w, tokens, probs, rest=rest).kl.mean()
  value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(*arrays)
  with jax.enable_x64(True):
    exact = lambda h, w: whole_loss(h, w, None, float64(probs), tokens=tokens, rest=rest)[1].mean()
    expected = jax.jit(jax.value_and_grad(exact, (0, 1)))(*float64(arrays))
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  for ours, wanted in zip(gradients, expected[1]):
    # bfloat16 keeps 8 bits of probabilities and results.
    assert ours.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float64(ours) - wanted) / np.linalg.norm(wanted) < 1e-2


def test_between_devices_travel_rows_and_sums_and_no_scores():
  n, v, d, k = 256, 512, 8, 50
  mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
  places = [NamedSharding(mesh, P(axis)) for axis in ("data", "model", "data", "data")]
  shapes = [((n, d), "float32"), ((v, d), "float32"), ((n, k), "int32"), ((n, k), "float32")]
  arrays = [jax.ShapeDtypeStruct(*s, sharding=place) for s, place in zip(shapes, places)]

  def loss(h, w, tokens, probs):
    options = {"rest": "bucket", "options": ScoreOptions(vocab_axis="model")}
    return linear_sparse_target_loss(h, w, tokens, probs, **options).kl.mean()

  with jax.set_mesh(mesh):
    gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=tuple(places[:2]))
    program = hlo.parse_hlo(gradient.lower(*arrays).compile().as_text())
  sent = collectives.collectives(program, loops.runs(program), dict(mesh.shape))
  # A device reduces its 64 x 50 scores of tokens and a few sums; a tile would have 64 x 256.
  assert max(x.bytes for x in sent) <= 4 * 64 * (k + 4)


def test_neither_scores_of_all_tokens_nor_rows_of_the_k_tokens_exist():
  n, v, d, k = 2053, 4099, 64, 33
  abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  tokens = jax.ShapeDtypeStruct((n, k), jnp.int32)

  def loss(h, w, q, tokens):
    return linear_sparse_target_loss(h, w, tokens, q, rest="bucket").kl.mean()

  arrays = abstract(n, d), abstract(v, d), abstract(n, k), tokens
  largest = reference.largest_value(jax.grad(loss, (0, 1, 2)), *arrays)
  assert largest < min(n * v, n * k * d) / 4
  top = lambda h, w, t, u: linear_top_k_divergence(h, w, t, u, k=k).mean()
  arrays = abstract(n, d), abstract(v, d), abstract(n, d), abstract(v, d)
  assert reference.largest_value(jax.grad(top, (0, 1)), *arrays) < min(n * v, n * k * d) / 4
