"""Output functions: slopes from results, and what refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import DenseHead, SampledSoftmaxHead, SigSoftmax, linear_softmax
from vqjax.ops.scores import Softcap

RAW = np.concatenate([np.linspace(-40, 40, 161), [-300, 90, 1000]])


@pytest.mark.parametrize("function", [SigSoftmax(), Softcap(30.0)])
def test_the_slope_of_a_result_is_the_derivative_of_the_function(function):
  raw = jnp.asarray(RAW, jnp.float32)
  found = function.slope(function(raw))
  expected = jax.vmap(jax.grad(function))(raw)
  # Near its limits a cap loses the digits of 1 - tanh².
  np.testing.assert_allclose(found, expected, atol=2e-6)


def test_sigsoftmax_multiplies_the_exponential_by_a_sigmoid():
  raw = RAW[:161]
  expected = np.log(np.exp(raw) / (1 + np.exp(-raw)))
  np.testing.assert_allclose(SigSoftmax()(jnp.asarray(raw, jnp.float32)), expected, atol=1e-5)


def test_a_removed_row_has_no_probability_and_no_gradient():
  hidden, weight = jnp.ones((2, 3)), jnp.eye(4, 3)
  bias = jnp.array([0.0, -jnp.inf, 0.1, 0.2])

  def loss(hidden, weight, bias):
    stats = linear_softmax(hidden, weight, jnp.array([0, 2]), bias, output=SigSoftmax())
    return stats.log_prob.sum()

  value, gradients = jax.value_and_grad(loss, (0, 1, 2))(hidden, weight, bias)
  kept = jnp.array([0, 2, 3])
  expected = jax.value_and_grad(
    lambda h, w, b: linear_softmax(h, w, jnp.array([0, 1]), b, output=SigSoftmax()).log_prob.sum(),
    (0, 1, 2),
  )(hidden, weight[kept], bias[kept])
  np.testing.assert_allclose(value, expected[0], rtol=1e-6)
  np.testing.assert_allclose(gradients[0], expected[1][0], atol=1e-6)
  for found, wanted in zip(gradients[1:], expected[1][1:]):
    np.testing.assert_allclose(found[kept], wanted, atol=1e-6)
    assert not found[1].any()


@pytest.mark.parametrize(
  "head",
  [
    DenseHead(7, 4, output=SigSoftmax(), softcap=3.0),
    DenseHead(7, 4, output="sigsoftmax"),
    SampledSoftmaxHead(7, 4, samples=3, output=SigSoftmax()),
  ],
)
def test_heads_that_cannot_have_an_output_function_refuse_it(head):
  with pytest.raises(ValueError, match="`output`"):
    head.init(jax.random.key(0), jnp.zeros((1, 4)))


def test_rows_and_bias_of_a_head_with_an_output_function_are_not_read_alone():
  head = DenseHead(7, 4, output=SigSoftmax())
  variables = head.init(jax.random.key(0), jnp.zeros((1, 4)))
  with pytest.raises(ValueError, match="`output` must be None"):
    head.apply(variables, method="linear")
