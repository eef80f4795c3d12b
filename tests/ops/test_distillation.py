"""Tests of the distillation losses against float64 computations from all logits."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted, reference
from tests.ops.exact import compare, float64, normals, scores
from vqjax import GroupedHead
from vqjax.ops import sampling
from vqjax.ops.distillation import (
  block_soft_target_loss,
  linear_divergence,
  linear_soft_target_loss,
)
from vqjax.ops.scores import ScoreOptions
from vqjax.sharding import MeshShape, make_mesh

V, D, E = 101, 6, 9
# Scores up to 20 have an error of 20 · 2^-24 · sqrt(9) = 4e-6 each, and a gradient adds up 101 of
# them, weighted by hidden vectors up to 3.
ATOL = 1e-4


def operands(*batch):
  """Student's hidden, weight; teacher's hidden, weight; student's bias; teacher's bias."""
  return normals(0, (*batch, D), (V, D), (*batch, E), (V, E), (V,), (V,))


def from_logits(logits, teacher_logits):
  """(cross-entropy, KL) from all scores, in the precision of its arguments."""
  log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher_logits)
  q = jnp.exp(log_q)
  return -(q * log_p).sum(-1), (q * (log_q - log_p)).sum(-1)


def materialised(
  h, w, th, tw, b=None, tb=None, temperature=1.0, softcap=None, teacher_softcap=None
):
  return from_logits(
    scores(h, w, b, softcap, temperature), scores(th, tw, tb, teacher_softcap, temperature)
  )


OPTIONS = [{"temperature": 1.5, "softcap": 3, "teacher_softcap": 2.0}, {"temperature": 2.0}, {}]
SHAPES = [(13, (4, 10), True), (13, (100, V), False), (1, None, True)]
"""Tokens, tile, and whether there is a bias."""


TILE = ScoreOptions(tile=(4, 10))
soft_target_loss = jax.jit(functools.partial(linear_soft_target_loss, options=TILE))


def scored(teacher_softcap=None, **options):
  """The keywords of a loss."""
  return {"teacher_softcap": teacher_softcap, "options": ScoreOptions(**options)}


class TestLinearStudent:
  @pytest.mark.fast_cases(2)
  @pytest.mark.parametrize("options", OPTIONS)
  @pytest.mark.parametrize(("n", "tile", "bias"), SHAPES)
  def test_losses_and_all_gradients_equal_float64(self, options, n, tile, bias):
    ours = functools.partial(linear_soft_target_loss, **scored(tile=tile, **options))
    whole = functools.partial(materialised, **options)
    compare(ours, whole, operands(n)[: 6 if bias else 4], atol=ATOL)

  def test_a_teacher_equal_to_the_student_has_no_divergence_from_it(self):
    hidden, weight, *_ = operands(13)
    result = soft_target_loss(hidden, weight, hidden, weight)
    np.testing.assert_allclose(result.kl, 0, atol=4e-6)
    log_prob = reference.log_softmax(hidden @ weight.T)
    entropy = -(np.exp(log_prob) * log_prob).sum(-1)
    np.testing.assert_allclose(result.cross_entropy, entropy, atol=1e-5)

  def test_a_common_offset_of_all_scores_changes_only_their_rounding(self):
    *rest, bias, teacher_bias = operands(13)
    plain = soft_target_loss(*rest, bias, teacher_bias)
    moved = soft_target_loss(*rest, bias + 1000, teacher_bias - 1000)
    # The spacing of float32 numbers near 1000 is 6e-5; three roundings of scores meet in a loss.
    chex.assert_trees_all_close(plain, moved, atol=2e-4, rtol=0)

  def test_rows_removed_from_both_have_no_gradient_and_from_the_student_alone_infinite_loss(self):
    *rest, bias, teacher_bias = operands(13)
    whole = teacher_bias.copy()
    bias[5:30] = teacher_bias[5:30] = -np.inf
    loss = lambda w: soft_target_loss(rest[0], w, *rest[2:], bias, teacher_bias).kl.sum()
    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(rest[1]))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert (gradient[5:30] == 0).all()
    assert np.isposinf(soft_target_loss(*rest, bias, whole).cross_entropy).all()

  def test_a_row_that_the_student_lacks_costs_nothing_once_the_teacher_gives_it_no_mass(self):
    *rest, bias, teacher_bias = operands(13)
    # The first tile holds the removed row, the last one the maximum, 500 nats above: its mass is 0.
    bias[5], teacher_bias[V - 3] = -np.inf, 500
    found = soft_target_loss(*rest, bias, teacher_bias)
    kept = np.arange(V) != 5
    h, w, th, tw, b, tb = float64((*rest, bias, teacher_bias))
    log_p = reference.log_softmax(h @ w[kept].T + b[kept])
    log_q = reference.log_softmax(th @ tw[kept].T + tb[kept])
    exact = (-(np.exp(log_q) * log_p).sum(-1), (np.exp(log_q) * (log_q - log_p)).sum(-1))
    # A score of 500 is rounded to 3e-5.
    chex.assert_trees_all_close(tuple(found), exact, atol=1e-4, rtol=0)

  @pytest.mark.slow
  def test_no_array_of_tokens_times_vocabulary_exists_and_a_frozen_teacher_costs_only_scores(self):
    n, d, e, v = 2053, 8, 16, 4099
    shapes = (n, d), (v, d), (n, e), (v, e)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = lambda *a: linear_soft_target_loss(*a).kl.mean()
    trained = jax.grad(loss, (0, 1, 2, 3))
    frozen = jax.grad(
      lambda h, w, *teacher: loss(h, w, *map(jax.lax.stop_gradient, teacher)), (0, 1)
    )
    assert reference.largest_value(trained, *arrays) < n * v / 4
    flops = lambda f: jax.jit(f).lower(*arrays).compile().cost_analysis()["flops"]
    assert flops(frozen) < 0.7 * flops(trained)

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      (lambda a: (a[0].tolist(), *a[1:]), "`hidden` must be an array; got list"),
      (lambda a: (*a[:3], "rows", *a[4:]), "`teacher_weight` must be an array; got str"),
      (lambda a: (a[0][:5], *a[1:]), r"`teacher_hidden` must have .* got \(13, 9\)"),
      (
        lambda a: (a[0], a[1][:9], *a[2:4], a[4][:9], a[5]),
        r"`teacher_weight` must .* got \(101, 9\)",
      ),
      (lambda a: (a[0][:, :3], *a[1:]), r"`weight` must be \[V, 3\] .* got \(101, 6\)"),
      (lambda a: (*a[:4], a[4][:9], a[5]), r"`bias` must be \[101\] .* got \(9,\)"),
    ],
  )
  def test_operands_that_do_not_fit_are_refused(self, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
      inspect.unwrap(linear_soft_target_loss)(*change(operands(13)))

  @pytest.mark.parametrize("name", ["temperature", "softcap", "teacher_softcap"])
  @pytest.mark.untyped
  def test_options_must_be_positive_finite_numbers(self, name):
    for value in (0, float("inf")):
      with pytest.raises(ValueError, match=f"`{name}` must be positive and finite; got {value}"):
        linear_soft_target_loss(*operands(13), **scored(**{name: value}))
    loss = inspect.unwrap(linear_soft_target_loss)
    traced = jax.jit(lambda x: loss(*operands(13), **scored(**{name: x})))
    with pytest.raises(TypeError, match=f"`{name}` must be a Python number.* traced"):
      traced(2.0)


def divergence_from_logits(mixture, logits, teacher_logits):
  """Divergence as its definition has it, over the rows that a side has, to be differentiated."""
  log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher_logits)
  if mixture is None:
    return jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1) / 2
  if mixture == 1:
    log_p, log_q = log_q, log_p
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  kl = lambda a, log_a, log_b: jnp.where(a > 0, a * (log_a - log_b), 0.0).sum(-1)
  if mixture in (0, 1):
    return kl(q, log_q, log_p)
  log_m = jnp.log(mixture * q + (1 - mixture) * p)
  return mixture * kl(q, log_q, log_m) + (1 - mixture) * kl(p, log_p, log_m)


def materialised_divergence(h, w, th, tw, b=None, tb=None, *, mixture, **options):
  """The divergence from all scores, in the precision of its arguments."""
  temperature = options.get("temperature", 1.0)
  student = scores(h, w, b, options.get("softcap"), temperature)
  teacher = scores(th, tw, tb, options.get("teacher_softcap"), temperature)
  return divergence_from_logits(mixture, student, teacher)


class TestDivergence:
  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("options", OPTIONS)
  @pytest.mark.parametrize(("n", "tile", "bias"), SHAPES)
  def test_values_and_all_gradients_equal_float64(self, options, n, tile, bias):
    each = lambda function, **options: (
      lambda *arrays: [
        function(*arrays, mixture=mixture, **options) for mixture in (0, 0.1, 0.5, 1, None)
      ]
    )
    ours = each(linear_divergence, **scored(tile=tile, **options))
    whole = each(materialised_divergence, **options)
    compare(ours, whole, operands(n)[: 6 if bias else 4], atol=ATOL)

  def test_a_mixture_of_distributions_that_are_nearly_equal_keeps_its_digits(self):
    hidden, weight, *_ = operands(13)
    teacher = weight + 1e-3 * normals(5, weight.shape)[0]
    mixtures = 0.1, 0.7

    @jax.jit
    def run(h, w, t):
      return [linear_divergence(h, w, h, t, mixture=m, options=TILE) for m in mixtures]

    h, w, t = float64((hidden, weight, teacher))
    log_p, log_q = reference.log_softmax(h @ w.T), reference.log_softmax(h @ t.T)
    p, q = np.exp(log_p), np.exp(log_q)
    for mixture, found in zip(mixtures, run(hidden, weight, teacher)):
      log_m = np.log(mixture * q + (1 - mixture) * p)
      exact = (mixture * q * (log_q - log_m) + (1 - mixture) * p * (log_p - log_m)).sum(-1)
      # Of order 1e-6; the scores, of order ten, have errors of 1e-6 that meet gaps of 1e-3.
      np.testing.assert_allclose(found, exact, atol=2e-8)

  def test_rows_that_one_side_lacks_leave_a_mixture_finite_with_exact_gradients(self):
    mixture = 0.3
    *rest, bias, teacher_bias = operands(13)
    kept = np.ones(V, bool), np.ones(V, bool)
    kept[0][5:30] = kept[1][20:45] = False
    both = [np.where(k, b, -np.inf) for k, b in zip(kept, (bias, teacher_bias))]
    total = lambda *a: linear_divergence(*a, *both, mixture=mixture, options=TILE).sum()
    run = lambda function: jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))
    value, gradients = jax.device_get(run(total)(*rest))

    def exact(h, w, th, tw):
      # 1e4 nats below the others, a row has probability 0 in float64 as well.
      far = lambda k, b: np.where(k, float64(b), -1e4)
      score = h @ w.T + far(kept[0], bias)
      other = th @ tw.T + far(kept[1], teacher_bias)
      p, q = jax.nn.softmax(score), jax.nn.softmax(other)
      m = mixture * q + (1 - mixture) * p
      log = lambda x, present: jnp.log(jnp.where(present, x, 1.0))
      some = kept[0] | kept[1]
      of_q = (q * (log(q, kept[1]) - log(m, some))).sum()
      return mixture * of_q + (1 - mixture) * (p * (log(p, kept[0]) - log(m, some))).sum()

    with jax.enable_x64(True):
      expected = run(exact)(*float64(rest))
    chex.assert_trees_all_close((value, gradients), expected, atol=13 * ATOL, rtol=0)
    assert (gradients[1][5:30] == 0).all()
    assert (gradients[3][20:45] == 0).all()
    bound = -(mixture * np.log(mixture) + (1 - mixture) * np.log(1 - mixture))
    assert value < 13 * bound

  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("mixture", [0, 0.3, None])
  def test_second_derivatives_equal_float64_on_tiles_that_overlap(self, mixture):
    arrays = operands(7)
    # A row that both sides lack.
    arrays[4][3] = arrays[5][3] = -np.inf
    kept = np.arange(V) != 3

    def second(function, *operands):
      total = lambda h, *rest: function(h, *rest).sum()
      along = lambda *a: sum((x**2).sum() for x in jax.grad(total, (0, 1, 2, 3))(*a))
      return jax.device_get(jax.jit(jax.grad(along, (0, 1, 2, 3)))(*operands))

    found = second(lambda *a: linear_divergence(*a, mixture=mixture, options=TILE), *arrays)
    rows = [x[kept] if x.shape[0] == V else x for x in arrays]
    with jax.enable_x64(True):
      exact = functools.partial(materialised_divergence, mixture=mixture)
      expected = second(exact, *float64(rows))
    found = [x[kept] if x.shape[0] == V else x for x in found]
    for ours, wanted in zip(found, expected, strict=True):
      np.testing.assert_allclose(ours, wanted, atol=ATOL * max(1, np.abs(wanted).max()))

  def test_scores_of_ten_thousand_stay_finite_and_exact(self):
    hidden, weight, teacher_hidden, teacher_weight, *_ = operands(7)
    arrays = 2000 * hidden, weight, 2000 * teacher_hidden, teacher_weight
    mixtures = lambda f, *a, **options: [f(*a, mixture=m, **options) for m in (0.3, 1)]

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
    def run(*arrays):
      values = mixtures(linear_divergence, *arrays, options=TILE)
      return sum(x.sum() for x in values), values

    gradients, values = run(*arrays)
    with jax.enable_x64(True):
      expected = jax.jit(lambda *a: mixtures(materialised_divergence, *a))(*float64(arrays))
    # Scores up to 2e4 have an error of 2e4 · 2^-24 · sqrt(9) = 4e-3 each.
    chex.assert_trees_all_close(values, expected, atol=1e-2, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients)

  def test_the_reverse_divergence_is_infinite_where_the_teacher_lacks_a_row(self):
    arrays = operands(3)
    arrays[-1][7] = -np.inf
    run = jax.jit(lambda *a: [linear_divergence(*a, mixture=m) for m in (0, 1)])
    forward, reverse = run(*arrays)
    assert np.isposinf(reverse).all()
    assert np.isfinite(forward).all()

  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("mixture", [0.5, 0])
  def test_weights_scale_and_tokens_left_out_contribute_exactly_zero(self, mixture):
    hidden, weight, teacher, teacher_weight, *_ = operands(13)
    kept = np.arange(13) % 3 != 1
    token_weight = np.where(np.arange(13) % 5 == 4, 0, np.linspace(0.5, 2, 13)).astype(np.float32)
    counts = kept & (token_weight != 0)
    broken = [np.where(counts[:, None], x, np.nan) for x in (hidden, teacher)]

    def total(h, w, t, tw, mask, token_weight):
      options = {"mask": mask, "token_weight": token_weight, "options": TILE}
      each = linear_divergence(h, w, t, tw, mixture=mixture, **options)
      return each.sum(), each

    run = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    given = broken[0], weight, broken[1], teacher_weight, kept, token_weight
    found, each = jax.device_get(run(*given))
    alone, wanted = run(
      hidden[counts], weight, teacher[counts], teacher_weight, None, token_weight[counts]
    )
    assert (each[~counts] == 0).all()
    assert not found[0][~counts].any()
    assert not found[2][~counts].any()
    chex.assert_trees_all_close(
      (each[counts], found[0][counts], found[1], found[2][counts], found[3]),
      (wanted, *alone),
      atol=ATOL,
      rtol=0,
    )

  # bfloat16 keeps 8 bits of hidden vectors, rows and probabilities; the values stay float32.
  @pytest.mark.slow
  @pytest.mark.parametrize("mixture", [0, 0.5])
  def test_bfloat16_operands_are_scored_and_summed_in_float32(self, mixture):
    arrays = [x.astype(jnp.bfloat16) for x in operands(64)[:4]]
    total = lambda *a: linear_divergence(*a, mixture=mixture, **scored(tile=(16, 10))).mean()
    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arrays)
    with jax.enable_x64(True):
      exact = lambda *a: materialised_divergence(*a, mixture=mixture).mean()
      expected = jax.jit(jax.value_and_grad(exact, (0, 1, 2, 3)))(*float64(arrays))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for ours, wanted in zip(gradients, expected[1]):
      assert ours.dtype == jnp.bfloat16
      error = np.linalg.norm(np.float64(ours) - wanted) / np.linalg.norm(wanted)
      assert error < 1e-2

  @pytest.mark.fast_cases(1)
  @pytest.mark.parametrize("shape", [MeshShape(1, 1, 8), MeshShape(2, 2, 2)])
  @pytest.mark.parametrize("mixture", [0, 0.5, None])
  def test_a_mesh_changes_neither_values_nor_gradients(self, mixture, shape):
    arrays = operands(3, 5)

    def run(*a):
      each = lambda *a: linear_divergence(
        *a, mixture=mixture, **scored(softcap=5.0, tile=(4, 10), vocab_axis="model")
      )
      return jax.value_and_grad(lambda a: each(*a).mean())(a)

    wanted = jax.jit(run)(*arrays)
    with jax.set_mesh(make_mesh(shape)):
      found = jax.device_get(jax.jit(run)(*arrays))
    chex.assert_trees_all_close(found, wanted, atol=ATOL, rtol=0)

  def test_no_array_of_tokens_times_vocabulary_exists(self):
    n, v = 2053, 4099
    shapes = (n, D), (v, D), (n, E), (v, E)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    loss = lambda *a: linear_divergence(*a, mixture=0.5).mean()
    assert reference.largest_value(jax.grad(loss, (0, 1, 2, 3)), *arrays) < n * v / 4

  @pytest.mark.parametrize("mixture", [-0.1, 1.5, float("nan")])
  def test_a_mixture_outside_of_its_range_is_refused(self, mixture):
    with pytest.raises(ValueError, match=r"`mixture` must be in \[0, 1\]; got"):
      inspect.unwrap(linear_divergence)(*operands(3), mixture=mixture)


def blocks_of(hidden, weight, width=12):
  """Blocks of `width` tokens in a permuted order, the last one padded."""
  count = -(-V // width)
  order = np.resize(np.random.default_rng(0).permutation(V), count * width)
  table = jnp.asarray(order.reshape(count, width), jnp.int32)

  def block(index):
    real = index * width + jnp.arange(width) < V
    scores = jnp.where(real, hidden @ jnp.asarray(weight)[table[index]].T, -jnp.inf)
    return jnp.moveaxis(scores, -1, 0), table[index]

  return sampling.Blocks(count, block, hidden.shape[:-1])


def grouped(batch, groups, vocab_axis, dtype=None):
  """(value and gradients of a grouped head's KL, the same from all logits, their arguments)."""
  head = GroupedHead(V, D, groups=groups, use_bias=True, dtype=dtype, vocab_axis=vocab_axis)
  hidden, _, *teacher, _, bias = operands(*batch)
  params = jitted.init(head, jax.random.key(1), hidden)["params"]
  leaves, tree = jax.tree.flatten(params)
  noisy = [x + noise for x, noise in zip(leaves, normals(2, *(x.shape for x in leaves)))]

  def of_head(module, hidden, *teacher):
    return tuple(module.over_blocks(block_soft_target_loss, hidden, *teacher))

  def kl(params, hidden, *teacher):
    return head.apply({"params": params}, hidden, *teacher, method=of_head)[1].mean()

  def expected(params, hidden, *teacher):
    logits = head.apply({"params": params}, hidden)
    return from_logits(logits, teacher[0] @ teacher[1].T + teacher[2])[1].mean()

  run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))
  return run(kl), run(expected), (jax.tree.unflatten(tree, noisy), hidden, *teacher, bias)


class TestStudentInBlocks:
  @pytest.mark.parametrize(
    ("batch", "temperature", "cap"), [((13,), 1.0, None), ((1, 5), 2.0, 3.0)]
  )
  def test_losses_and_gradients_equal_float64(self, batch, temperature, cap):
    hidden, weight, *teacher, _, bias = operands(*batch)
    options = {"temperature": temperature, "teacher_softcap": cap}

    def ours(hidden, weight):
      return block_soft_target_loss(blocks_of(hidden, weight), *teacher, bias, **options)

    whole = lambda h, w: materialised(h, w, *float64(teacher), None, float64(bias), **options)
    compare(ours, whole, (hidden, weight), atol=ATOL)

  def test_a_token_that_the_student_scores_minus_infinity_is_left_out_of_both(self):
    hidden, weight, *teacher, _, bias = operands(4)
    removed = np.arange(V) % 7 == 2

    @jax.jit
    def ours(hidden, weight, *teacher):
      blocks = sampling.allow(blocks_of(hidden, weight), ~removed, V)
      scores = teacher[0] @ teacher[1].T + teacher[2]
      return (
        tuple(block_soft_target_loss(blocks, *teacher)),
        from_logits((hidden @ weight.T)[:, ~removed], scores[:, ~removed]),
      )

    chex.assert_trees_all_close(*ours(hidden, weight, *teacher, bias), atol=ATOL, rtol=0)

  def test_token_weights_scale_losses_and_gradients_and_a_mask_removes_them(self):
    hidden, weight, *teacher, _, bias = operands(4)
    mask, token_weight = np.array([True, True, False, True]), np.float32([0.5, 0, 3, 2])
    factor = np.array([0.5, 0, 0, 2])
    # What is left out may hold anything.
    noisy = teacher[0].copy()
    noisy[1:3] = np.nan

    def ours(hidden, weight):
      options = {"mask": mask, "token_weight": jnp.asarray(token_weight)}
      return block_soft_target_loss(blocks_of(hidden, weight), noisy, teacher[1], bias, **options)

    def whole(h, w):
      return tuple(factor * x for x in materialised(h, w, *float64(teacher), None, float64(bias)))

    compare(ours, whole, (hidden, weight), atol=ATOL)

  def test_the_teacher_has_no_gradient(self):
    hidden, weight, *teacher, _, bias = operands(2)
    loss = lambda *teacher: block_soft_target_loss(blocks_of(hidden, weight), *teacher).kl.sum()
    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(*teacher, bias):
      assert not np.any(gradient)

  @pytest.mark.slow
  def test_a_grouped_student_has_the_gradients_of_its_logits(self, monkeypatch):
    monkeypatch.setattr(sampling, "block_width", lambda rows, vocab: 25)
    loss, expected, arrays = grouped((3, 5), 11, None)
    chex.assert_trees_all_close(loss(*arrays), expected(*arrays), atol=ATOL, rtol=0)

  # bfloat16 has 8 bits: scores near ten have an error of 0.03, which the mean over tokens reduces.
  @pytest.mark.slow
  @pytest.mark.parametrize(("dtype", "atol"), [(None, ATOL), (jnp.bfloat16, 2e-2)])
  def test_a_mesh_changes_neither_loss_nor_gradients(self, dtype, atol):
    loss, expected, arrays = grouped((3, 5), 11, "model", dtype)
    wanted = jax.device_get(expected(*arrays))
    with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
      chex.assert_trees_all_close(jax.device_get(loss(*arrays)), wanted, atol=atol, rtol=0)

  def test_no_array_of_tokens_times_vocabulary_exists(self):
    n, v = 2053, 40_009
    head = GroupedHead(v, D)
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = jax.eval_shape(head.init, jax.random.key(0), abstract(n, D))

    def kl(params, *arrays):
      body = lambda module, *a: module.over_blocks(block_soft_target_loss, *a).kl.mean()
      return head.apply(params, *arrays, method=body)

    shapes = abstract(n, D), abstract(n, E), abstract(v, E), abstract(v)
    assert reference.largest_value(jax.grad(kl, (0, 1)), params, *shapes) < n * v / 16

  @pytest.mark.parametrize(
    ("change", "options", "message"),
    [
      (lambda h, w, b: (h[:1], w, b), {}, r"`teacher_hidden` must have .*\(2,\).* got \(1, 9\)"),
      (lambda h, w, b: (h[:, :3], w, b), {}, r"`teacher_weight` must be \[V, 3\] .* \(101, 9\)"),
      (lambda h, w, b: (h, w, b[:9]), {}, r"`teacher_bias` must be \[101\] .* got \(9,\)"),
      (lambda *a: a, {"temperature": 0}, "`temperature` must be positive and finite; got 0"),
      (lambda *a: a, {"teacher_softcap": -1.0}, "`teacher_softcap` must be positive .* got -1.0"),
    ],
  )
  def test_what_does_not_fit_is_refused(self, change, options, message):
    hidden, weight, *teacher, _, bias = operands(2)
    with pytest.raises(ValueError, match=message):
      inspect.unwrap(block_soft_target_loss)(
        blocks_of(hidden, weight), *change(*teacher, bias), **options
      )
