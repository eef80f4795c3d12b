"""The DPQ head keeps the contract, trains, and converts to a ProductHead."""

from typing import ClassVar

import jax
import numpy as np
import optax
import pytest

from tests import reference
from tests.contract import HeadContract
from tests.contract_on_meshes import as_float64
from tests.jitted import initial_variables, random_variables, results, run
from vqjax import CentroidQuantizer, DPQHead, MovingAverage, SoftmaxQuantizer
from vqjax.convert import to_head

M = 4


def codes_and_rows(variables):
  """Codes and rows by brute force in float64, with initial statistics."""
  params = as_float64(variables)["params"]["table"]
  own = params["quantizer"]
  keys = own.get("keys", own.get("centroids"))
  parts = params["query"].reshape(len(params["query"]), M, 1, -1)
  apart = ((parts - keys[None]) ** 2).sum(-1)
  score = (parts * keys[None]).sum(-1) if "keys" in own else -apart
  codes = score.argmax(-1)
  values = own.get("values", keys)
  return codes, values[np.arange(M), codes].reshape(len(codes), -1)


class TestDPQHead(HeadContract):
  cases: ClassVar = {
    "sx": lambda v, d: DPQHead(v, d, SoftmaxQuantizer(7, M), use_bias=True),
    "vq": lambda v, d: DPQHead(v, d, CentroidQuantizer(7, M)),
  }

  def reference_logits(self, head, variables, hidden):
    bias = variables["params"].get("bias", 0.0)
    return hidden @ codes_and_rows(variables)[1].T + bias

  def bfloat16_logits(self, head, variables, hidden):
    """Rows are rounded to bfloat16; queries and codes are not."""
    rows = reference.in_bfloat16(codes_and_rows(variables)[1])
    return hidden @ rows.T + variables["params"].get("bias", 0.0)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, case, run, head, variables, hidden, tokens, cotangent
  ):
    """Gradients are exact except for the queries, which get those of the rows (Eq. 7)."""
    found, d_hidden = run.core(hidden, tokens, cotangent)[2]
    h = np.asarray(hidden, np.float64).reshape(-1, self.dim)
    codes, rows = codes_and_rows(variables)
    p = np.exp(reference.log_softmax(self.reference_logits(head, as_float64(variables), h)))
    d_scores = (np.eye(self.vocab)[tokens.ravel()] - p) * cotangent.reshape(-1, 1)
    np.testing.assert_allclose(d_hidden.reshape(h.shape), d_scores @ rows, atol=3e-5)
    d_rows = d_scores.T @ h
    if case == "vq":
      np.testing.assert_allclose(found["table"]["query"], d_rows, atol=3e-5)
      assert not np.any(found["table"]["quantizer"]["centroids"])
      return
    np.testing.assert_allclose(found["bias"], d_scores.sum(0), atol=3e-5)
    d_values = np.zeros((M, 7, self.dim // M))
    for row, code in zip(d_rows.reshape(self.vocab, M, -1), codes):
      d_values[np.arange(M), code] += row
    np.testing.assert_allclose(found["table"]["quantizer"]["values"], d_values, atol=3e-5)
    assert np.any(found["table"]["quantizer"]["keys"])
    assert np.any(found["table"]["query"])


@pytest.mark.slow
def test_it_learns_and_converts_to_a_product_head():
  """Statistics and centroids follow the targets; conversion keeps the distribution."""
  quantizer = CentroidQuantizer(8, M, moving_average=MovingAverage(decay=0.9))
  head = DPQHead(40, 12, quantizer, use_bias=True)
  hidden, tokens = np.random.default_rng(0).standard_normal((40, 12), np.float32), np.arange(40)
  variables = initial_variables(head)
  rest = {name: tree for name, tree in variables.items() if name != "params"}
  params, optimizer = variables["params"], optax.adam(0.02)
  state = optimizer.init(params)

  @jax.jit
  def step(params, rest, state):
    def loss(params):
      (log_prob, terms), written = head.apply(
        rest | {"params": params}, hidden, tokens, method="loss_terms", mutable=list(rest)
      )
      return sum(terms.values(), 0.0) - log_prob.mean(), written

    (value, written), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), written, state, value

  first = None
  for _ in range(100):
    params, rest, state, value = step(params, rest, state)
    first = value if first is None else first
  assert value < first - 1
  trained = rest | {"params": params}
  shipped, own = to_head(head.compact(trained), params["bias"])
  expected, found = results(
    lambda *both: [
      h.apply(v, hidden, tokens, method="log_prob") for h, v in zip((head, shipped), both)
    ],
    *(trained, own),
  )
  np.testing.assert_allclose(found, expected, atol=1e-4)
  assert -found.mean() < np.log(40) - 1


def test_the_terms_are_over_the_rows_of_the_targets():
  head = DPQHead(11, 12, CentroidQuantizer(3, M, commitment=0.5))
  hidden = np.random.default_rng(0).standard_normal((5, 12), np.float32)
  tokens, variables = np.array([0, 3, 3, 10, -1]), random_variables(head)
  _, rows = codes_and_rows(variables)
  query = np.asarray(variables["params"]["table"]["query"], np.float64)
  apart = ((query - rows)[tokens[:4]] ** 2).mean()
  terms = run(head, variables, lambda own, h: own.loss_terms(h, tokens)[1], hidden)
  np.testing.assert_allclose(terms["regularizer"], apart, rtol=1e-4)
  np.testing.assert_allclose(terms["commitment"], 0.5 * apart, rtol=1e-4)
