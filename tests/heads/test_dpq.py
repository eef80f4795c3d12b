"""The DPQ head keeps the contract, trains, and converts to a ProductHead."""

from typing import ClassVar

import numpy as np

from tests import reference
from tests.contract import HeadContract
from tests.contract_on_meshes import as_float64
from tests.jitted import random_variables, run
from vqjax import CentroidQuantizer, DPQHead, SoftmaxQuantizer

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
