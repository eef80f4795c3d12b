"""Output functions: slopes from results, and what refuses them."""

import functools

import jax
import numpy as np
import pytest

from tests import jitted
from vqjax import DenseHead, SigmoidCap, SigSoftmax, linear_softmax
from vqjax.ops.scores import Softcap

RAW = np.concatenate([np.linspace(-40, 40, 161), [-300, 90, 1000]])


@pytest.mark.parametrize("function", [SigSoftmax(), Softcap(30.0), SigmoidCap()])
def test_the_slope_of_a_result_is_the_derivative_of_the_function(function):
  run = jax.jit(lambda raw: (function.slope(function(raw)), jax.vmap(jax.grad(function))(raw)))
  # Near its limits a cap loses the digits of 1 - tanh².
  np.testing.assert_allclose(*run(np.float32(RAW)), atol=2e-6)


def test_a_sigmoid_in_place_of_tanh_is_the_same_softmax():
  # c / 2 · (1 + tanh(x)) = c · sigmoid(2 x), and a softmax does not see the constant.
  hidden, weight = np.float32(np.eye(3)), np.float32(RAW[:159].reshape(-1, 3))
  both = {"softcap": 15}, {"output": SigmoidCap(30, 7.5, 0)}
  run = lambda h, w, t: [linear_softmax(h, w, t, **option).log_prob for option in both]
  np.testing.assert_allclose(*jitted.results(run, hidden, weight, np.array([0, 7, 9])), atol=1e-5)


@pytest.mark.parametrize("wrong", [{"cap": 0.0}, {"width": -1.0}, {"cap": np.inf}])
def test_a_sigmoid_that_does_not_rise_is_refused(wrong):
  with pytest.raises(ValueError, match="`cap` and `width` must be positive and finite; got"):
    SigmoidCap(**wrong)


def test_sigsoftmax_multiplies_the_exponential_by_a_sigmoid():
  raw = RAW[:161]
  expected = np.log(np.exp(raw) / (1 + np.exp(-raw)))
  np.testing.assert_allclose(jax.jit(SigSoftmax())(np.float32(raw)), expected, atol=1e-5)


def test_a_removed_row_has_no_probability_and_no_gradient():
  hidden, weight = np.ones((2, 3), np.float32), np.eye(4, 3, dtype=np.float32)
  bias = np.float32([0, -np.inf, 0.1, 0.2])

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
  def run(hidden, weight, bias, tokens):
    return linear_softmax(hidden, weight, tokens, bias, output=SigSoftmax()).log_prob.sum()

  value, gradients = jax.device_get(run(hidden, weight, bias, np.array([0, 2])))
  kept = np.array([0, 2, 3])
  expected, wanted = run(hidden, weight[kept], bias[kept], np.array([0, 1]))
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(gradients[0], wanted[0], atol=1e-6)
  for found, exact in zip(gradients[1:], wanted[1:]):
    np.testing.assert_allclose(found[kept], exact, atol=1e-6)
    assert not found[1].any()


def test_rows_and_bias_of_a_head_with_an_output_function_are_not_read_alone():
  head = DenseHead(7, 4, output=SigSoftmax())
  variables = jitted.init(head, jax.random.key(0), np.zeros((1, 4), np.float32))
  with pytest.raises(ValueError, match="`output` must be None"):
    head.apply(variables, method="linear")
