"""Forward-mode derivatives and Hessian-vector products of the tiled log-probability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests import reference
from vqjax import ClassBasedHead
from vqjax.ops.distillation import linear_soft_target_loss
from vqjax.ops.forward_mode import linear_log_prob_jvp
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.softmax import linear_log_prob, linear_softmax

N, V, D = 23, 101, 12  # 101 is prime: no tile and no device count divides it
TILE = 7, 30


@pytest.fixture
def operands():
  rng = np.random.default_rng(0)
  hidden, weight, bias = rng.normal(size=(N, D)), rng.normal(size=(V, D)), rng.normal(size=V)
  bias[3] = -np.inf
  directions = tuple(rng.normal(size=x.shape) for x in (hidden, weight, bias))
  float32 = lambda arrays: tuple(np.float32(x) for x in arrays)
  return float32((hidden, weight, bias)), float32(directions), np.arange(N) + 5


def float64_log_prob(operands, tokens, softcap=None, temperature=1.0):
  """Log-probabilities of tokens, in NumPy."""
  hidden, weight, bias = operands
  scores = hidden @ weight.T + bias
  if softcap is not None:
    scores = np.where(np.isneginf(bias), -np.inf, softcap * np.tanh(scores / softcap))
  return np.take_along_axis(reference.log_softmax(scores / temperature), tokens[:, None], -1)[:, 0]


def central_difference(function, operands, directions, step=1e-5):
  """The derivative of `function` in a direction, in float64."""
  at = lambda sign: function(
    [np.asarray(x, np.float64) + sign * step * np.asarray(d) for x, d in zip(operands, directions)]
  )
  return (at(1) - at(-1)) / (2 * step)


@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (3.0, 0.7)])
def test_the_derivative_in_a_direction_is_that_of_float64(operands, softcap, temperature):
  primals, tangents, tokens = operands
  hidden, weight, bias = primals
  expected = central_difference(
    lambda x: float64_log_prob(x, tokens, softcap, temperature), primals, tangents
  )
  options = {"softcap": softcap, "temperature": temperature}

  @jax.jit
  def run(hidden, weight, bias, tangents):
    arrays = hidden, weight, tokens, bias
    scored = ScoreOptions(tile=TILE, **options)
    found = linear_log_prob_jvp(*arrays, tangents=tangents, options=scored)
    return *found, linear_log_prob(*arrays, **options)

  log_prob, tangent, equal = run(hidden, weight, bias, tangents)
  np.testing.assert_allclose(log_prob, equal, atol=1e-5)
  # Sums of 2·D + V products of size 10: some hundred roundings of 6e-7.
  np.testing.assert_allclose(tangent, expected, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_may_be_sharded(operands, kind):
  (hidden, weight, _), tangents, tokens = operands
  run = lambda axis: jax.jit(
    lambda hidden, weight: linear_log_prob_jvp(
      *(hidden, weight, tokens),
      tangents=tangents[:2],
      options=ScoreOptions(tile=TILE, vocab_axis=axis),
    )
  )
  expected = run(None)(hidden, weight)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2)):
    found = run("model")(hidden, weight)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_token_outside_the_vocabulary_is_nan(operands):
  (hidden, weight, bias), tangents, tokens = operands
  tokens[2] = V
  run = jax.jit(lambda h, w, b, t: linear_log_prob_jvp(h, w, tokens, b, tangents=t))
  for result in run(hidden, weight, bias, tangents):
    assert np.flatnonzero(np.isnan(result)).tolist() == [2]


def test_a_direction_of_other_shapes_is_refused(operands):
  (hidden, weight, bias), tangents, tokens = operands
  with pytest.raises(ValueError, match=r"`tangents` .*array of zeros"):
    linear_log_prob_jvp(hidden, weight, tokens, bias, tangents=tangents[:2])


def test_a_hessian_vector_product_is_that_of_float64(operands):
  (hidden, weight, _), (d_hidden, d_weight, _), tokens = operands
  loss = lambda h, w: -linear_log_prob(h, w, tokens, tile=TILE).sum()
  run = jax.jit(lambda *arrays: jax.jvp(jax.grad(loss, (0, 1)), arrays[:2], arrays[2:])[1])
  found = run(hidden, weight, d_hidden, d_weight)

  def gradient(operands):
    hidden, weight = operands
    prob = np.exp(reference.log_softmax(hidden @ weight.T))
    error = prob - np.eye(V)[tokens]
    return np.concatenate([(error @ weight).ravel(), (error.T @ hidden).ravel()])

  expected = central_difference(gradient, (hidden, weight), (d_hidden, d_weight))
  flat = np.concatenate([np.ravel(x) for x in found])
  np.testing.assert_allclose(flat, expected, atol=2e-4)


def statistics(hidden, weight, tokens, axis):
  stats = linear_softmax(hidden, weight, tokens, entropy=True, vocab_axis=axis)
  return stats.log_prob.sum() + stats.entropy.sum()


def distilled(hidden, weight, tokens, axis):
  del tokens
  teacher = jnp.roll(hidden, 1, 0), jnp.roll(weight, 1, 0)
  options = ScoreOptions(vocab_axis=axis)
  return linear_soft_target_loss(hidden, weight, *teacher, options=options).kl.sum()


def by_class(hidden, weight, tokens, axis):
  head = ClassBasedHead(V, D, 5, vocab_axis=axis)
  variables = head.init(jax.random.key(0), hidden)
  params = variables["params"] | {"weight": weight}
  return head.apply(variables | {"params": params}, hidden, tokens, method="log_prob").sum()


@pytest.mark.parametrize(
  "loss", [statistics, distilled, pytest.param(by_class, marks=pytest.mark.slow)]
)
def test_a_loss_of_sharded_rows_has_hessian_vector_products(operands, loss):
  (hidden, weight, _), (d_hidden, d_weight, _), tokens = operands

  def run(axis):
    derivatives = jax.value_and_grad(lambda h, w: loss(h, w, tokens, axis), (0, 1))
    return jax.jit(lambda x, d: jax.jvp(derivatives, x, d)[1])(
      (hidden, weight), (d_hidden, d_weight)
    )

  # The derivative of the loss, and of its gradients.
  expected = run(None)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)):
    found = run("model")
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
