"""Product-quantised heads keep the contract and learn their codes."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract
from tests.contract_on_meshes import as_float64
from tests.jitted import abstract_variables, random_variables, results, run
from vqjax.assign.multiple import mixed_radix
from vqjax.heads import LearnedProductHead, ProductHead
from vqjax.ops import product


def normal(*shape):
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def composed(codes, tables):
  """The rows [V, D], by a loop in float64."""
  return np.stack([np.concatenate([t[c] for t, c in zip(tables, row)]) for row in codes])


def logits_of_rows(head, params, hidden, rows):
  """Capped scores of rows."""
  scores = hidden @ rows.T + params.get("token_bias", 0.0)
  cap = getattr(head, "softcap", None)
  return scores if cap is None else cap * np.tanh(scores / cap)


class TestProductHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: ProductHead(v, d, 5, 4, token_bias=True),
    "no bias": lambda v, d: ProductHead(v, d, 17, 12),
    "capped": lambda v, d: ProductHead(v, d, 300, 2, softcap=3.0),
    "rotated": lambda v, d: ProductHead(v, d, 5, 5, token_bias=True, rotated=True),
  }

  def reference_logits(self, head, variables, hidden, rounded=lambda rows: rows):
    params = variables["params"]
    rows = composed(variables["codes"]["codes"], params["tables"])
    if head.rotated:
      hidden = rounded(hidden @ rounded(params["basis"]).T)
    return logits_of_rows(head, params, hidden, rounded(rows))

  def bfloat16_logits(self, head, variables, hidden):
    return self.reference_logits(head, variables, hidden, reference.in_bfloat16)


def nearest(latent, tables):
  """The nearest codes by brute force."""
  parts = latent.reshape(len(latent), len(tables), 1, -1)
  return ((parts - tables[None]) ** 2).sum(-1).argmin(-1)


class TestLearnedProductHead(HeadContract):
  cases: ClassVar = {"bias": lambda v, d: LearnedProductHead(v, d, 7, 4, token_bias=True)}

  def reference_logits(self, head, variables, hidden, rounded=lambda rows: rows):
    params = variables["params"]
    rows = composed(nearest(params["latent"], params["tables"]), params["tables"])
    return logits_of_rows(head, params, hidden, rounded(rows))

  def bfloat16_logits(self, head, variables, hidden):
    """Rows are rounded to bfloat16; latent rows and codes are not."""
    return self.reference_logits(head, variables, hidden, reference.in_bfloat16)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    """Latent rows get the gradient of the rows; the other gradients are exact."""
    found, _ = run.core(hidden, tokens, cotangent)[2]
    params = as_float64(variables)["params"]
    h = np.asarray(hidden, np.float64).reshape(-1, self.dim)
    p = np.exp(reference.log_softmax(self.reference_logits(head, {"params": params}, h)))
    d_scores = (np.eye(self.vocab)[tokens.ravel()] - p) * cotangent.reshape(-1, 1)
    d_rows = d_scores.T @ h
    np.testing.assert_allclose(found["latent"], d_rows, atol=3e-5)
    np.testing.assert_allclose(found["token_bias"], d_scores.sum(0), atol=3e-5)
    d_tables = np.zeros(params["tables"].shape)
    codes = nearest(params["latent"], params["tables"])
    for row, code in zip(d_rows.reshape(self.vocab, 4, -1), codes):
      d_tables[np.arange(4), code] += row
    np.testing.assert_allclose(found["tables"], d_tables, atol=3e-5)


@pytest.mark.parametrize(
  ("vocab", "codes", "subspaces"),
  [(10007, 101, 5), (10000, 224, 16), (1024, 2, 10), (4096, 4, 6), (101, 101, 1), (1, 1, 3)],
)
def test_mixed_radix_gives_distinct_codes_and_uses_each_evenly(vocab, codes, subspaces):
  table = mixed_radix(vocab, codes, subspaces)
  assert len(np.unique(table, axis=0)) == vocab
  counts = np.stack([np.bincount(column, minlength=codes) for column in table.T])
  assert 0.9 * (vocab // codes) <= counts.min() <= counts.max() <= 1.1 * -(-vocab // codes)


def test_mixed_radix_gives_neighbours_few_codes_in_common():
  table = mixed_radix(10007, 101, 5)
  # By chance two rows of 5 codes of 101 share one in 5%; the digits alone would share 4 of 5.
  assert (table[1:] == table[:-1]).mean() < 0.1


def test_the_commitment_moves_the_batchs_latent_rows_towards_their_rows():
  head = LearnedProductHead(11, 6, 3, 2, commitment=0.5)
  hidden, tokens = normal(4, 6), np.array([0, 3, 3, 10])
  params = random_variables(head)["params"]
  terms = lambda p: head.apply({"params": p}, hidden, tokens, method="loss_terms")[1]
  value, gradient = results(jax.value_and_grad(lambda p: terms(p)["commitment"]), params)
  latent, tables = (np.float64(params[n]) for n in ("latent", "tables"))
  apart = (latent - composed(nearest(latent, tables), tables))[tokens]
  np.testing.assert_allclose(value, 0.5 * (apart**2).sum(-1).mean(), rtol=1e-5)
  np.testing.assert_allclose(gradient["latent"][3], 2 * 0.5 * 2 / 4 * apart[1], rtol=1e-4)
  assert (gradient["latent"][1] == 0).all()
  assert (gradient["tables"] == 0).all()


def test_summed_scores_equal_those_of_composed_rows():
  # Three subspaces fill no word of four or two codes.
  tables, codes = normal(3, 200, 4), np.random.default_rng(1).integers(0, 200, (29, 3))
  batches = [normal(*batch, 12) for batch in ((), (1,), (2, 5))]
  dtypes = "uint8", "uint16", "int32"

  def program(tables, batches):
    partial = [product.partial_scores(hidden, tables, jnp.float32) for hidden in batches]
    return [[product.summed_scores(p, codes.astype(dtype)) for dtype in dtypes] for p in partial]

  for hidden, scores in zip(batches, results(program, tables, batches)):
    expected = np.float64(hidden) @ composed(codes, np.float64(tables)).T
    for found in scores:
      np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), atol=1e-5)


@pytest.mark.parametrize(
  ("codes", "message"),
  [
    (np.zeros((9, 2), int), r"codes.*9, 2"),
    (np.zeros((10, 2)), "codes.*float64"),
    (np.full((10, 2), 4), "got 4 for token 0"),
  ],
)
def test_codes_that_do_not_fit_are_refused(codes, message):
  with pytest.raises(ValueError, match=message):
    abstract_variables(ProductHead(10, 8, 4, 2, codes_init=lambda *_: codes))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_row_is_decoded_by_lookups_and_many_by_composing_with_equal_results(softcap):
  head = ProductHead(101, 12, 5, 3, token_bias=True, softcap=softcap)
  variables, many = random_variables(head), np.resize(normal(7, 12), (300, 12))
  best = lambda hidden: head.apply(variables, hidden, 9, method="top_k")
  assert (3, 5, 1) in reference.shapes_of(best, many[:1])  # a score of each sub-vector
  assert (3, 5, 300) not in reference.shapes_of(best, many)
  both = lambda own, many: (own.top_k(many, 9), [own.top_k(row[None], 9) for row in many[:7]])
  together, alone = run(head, variables, both, many)
  for expected, *found in zip(together, *alone):
    np.testing.assert_allclose(np.concatenate(found), expected[:7], atol=1e-5)
