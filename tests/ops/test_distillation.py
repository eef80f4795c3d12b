"""Is the divergence from a teacher exact, whatever the shapes, and are its gradients?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax.ops.distillation import linear_soft_target_loss


def operands(n=13, d=6, e=9, v=101, bias=True):
  keys = jax.random.split(jax.random.key(0), 6)
  normal = jax.random.normal
  arrays = [
    normal(keys[0], (n, d)),
    normal(keys[1], (v, d)),
    normal(keys[2], (n, e)),
    normal(keys[3], (v, e)),
  ]
  return arrays + [normal(key, (v,)) if bias else None for key in keys[4:]]


def materialised(h, w, th, tw, b, tb, temperature=1.0, softcap=None, teacher_softcap=None):
  """(cross-entropy, KL) from all scores, in the precision of its arguments."""

  def log_prob(h, w, b, cap):
    score = h @ w.T + (0.0 if b is None else b)
    return jax.nn.log_softmax((cap * jnp.tanh(score / cap) if cap else score) / temperature)

  lp, lq = log_prob(h, w, b, softcap), log_prob(th, tw, tb, teacher_softcap)
  q = jnp.exp(lq)
  return -(q * lp).sum(-1), (q * (lq - lp)).sum(-1)


OPTIONS = [{}, {"temperature": 2.0}, {"temperature": 1.5, "softcap": 3, "teacher_softcap": 2.0}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "tile"), [(1, None), (13, (4, 10)), (13, (100, 101))])
def test_loss_and_all_gradients_equal_float64(options, bias, n, tile):
  arrays = operands(n=n, bias=bias)
  cotangents = tuple(jax.random.normal(jax.random.key(i), (n,)) for i in (7, 8))
  value, pull = jax.vjp(
    lambda *a: tuple(linear_soft_target_loss(*a, tile=tile, **options)), *arrays
  )
  found = pull(cotangents)
  with jax.enable_x64(True):
    exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arrays)
    expected, pull = jax.vjp(lambda *a: materialised(*a, **options), *exact)
    wanted = pull(tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in cotangents))
    # Scores of size ten, known to 1e-6, and a hundred roundings of float32 in their sums.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), value, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def test_a_teacher_of_its_own_diverges_by_nothing():
  hidden, weight, *_ = operands()
  found = linear_soft_target_loss(hidden, weight, hidden, weight, tile=(4, 10))
  np.testing.assert_allclose(found.kl, 0, atol=2e-6)
  entropy = -(lambda p: (np.exp(p) * p).sum(-1))(reference.log_softmax(hidden @ weight.T))
  np.testing.assert_allclose(found.cross_entropy, entropy, atol=1e-5)


def test_a_common_offset_of_all_scores_changes_nothing_but_their_rounding():
  arrays = operands()
  plain = linear_soft_target_loss(*arrays)
  *rest, bias, teacher_bias = arrays
  moved = linear_soft_target_loss(*rest, bias + 1000.0, teacher_bias - 1000.0)
  # A score near 1000 is stored to 6e-5.
  for a, b in zip(plain, moved):
    np.testing.assert_allclose(a, b, atol=2e-4)


def test_rows_without_mass_may_be_removed_and_others_make_the_loss_infinite():
  *rest, bias, teacher_bias = operands()
  both = [b.at[5:30].set(-jnp.inf) for b in (bias, teacher_bias)]
  loss = lambda w: linear_soft_target_loss(rest[0], w, *rest[2:], *both, tile=(4, 10)).kl.sum()
  value, gradient = jax.value_and_grad(loss)(rest[1])
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert (gradient[5:30] == 0).all()
  alone = linear_soft_target_loss(*rest, both[0], teacher_bias, tile=(4, 10))
  assert np.isposinf(alone.cross_entropy).all()


def test_no_value_of_tokens_times_vocabulary_is_made_and_a_frozen_teacher_costs_its_scores_alone():
  n, d, e, v = 2053, 8, 16, 4099
  shapes = [(n, d), (v, d), (n, e), (v, e)]
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  loss = lambda *a: linear_soft_target_loss(*a).kl.mean()
  both = jax.grad(loss, (0, 1, 2, 3))
  frozen = jax.grad(lambda h, w, th, tw: loss(h, w, *map(jax.lax.stop_gradient, (th, tw))), (0, 1))
  assert reference.largest_value(both, *arrays) < n * v / 4
  flops = lambda f: jax.jit(f).lower(*arrays).compile().cost_analysis()["flops"]
  assert flops(frozen) < 0.7 * flops(both)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda a: (a[0][:5], *a[1:]), "not of the same tokens"),
    (lambda a: (a[0], a[1][:9], *a[2:]), "one vocabulary"),
    (lambda a: (a[0][:, :3], *a[1:]), "does not fit hidden"),
    (lambda a: (*a[:4], a[4][:9], a[5]), "a bias of shape"),
  ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    linear_soft_target_loss.__wrapped__(*change(operands()))


def test_a_temperature_of_zero_is_refused():
  with pytest.raises(ValueError, match="temperature 0 is not positive"):
    linear_soft_target_loss(*operands(), temperature=0)
