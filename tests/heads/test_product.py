"""Product-quantised heads keep the contract and learn their codes."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests import reference
from tests.contract import HeadContract, costly
from tests.contract_on_meshes import as_float64, perturbed
from vqjax.assign.multiple import mixed_radix
from vqjax.heads import LearnedProductHead, ProductHead
from vqjax.heads.product import sub_vector_init
from vqjax.ops import product


def composed(codes, tables):
  """The rows [V, D], by a loop in float64."""
  return np.stack([np.concatenate([t[c] for t, c in zip(tables, row)]) for row in codes])


def check_rounded(head, variables, hidden, tokens, rows):
  """Log-probabilities equal those of rows rounded to bfloat16."""
  low = hidden.astype(jnp.bfloat16)
  found = head.apply(variables, low, tokens, method="log_prob")
  rows = np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float64)
  bias = np.asarray(variables["params"].get("token_bias", 0.0), np.float64)
  expected = reference.log_softmax(np.asarray(low, np.float64) @ rows.T + bias)
  expected = np.take_along_axis(expected, np.asarray(tokens)[..., None], -1)[..., 0]
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, atol=2e-3)


class TestProductHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: ProductHead(v, d, 5, 4, token_bias=True),
    "no bias": lambda v, d: ProductHead(v, d, 17, 12),
    "capped": lambda v, d: ProductHead(v, d, 300, 2, softcap=3.0),
  }

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    scores = hidden @ composed(variables["codes"]["codes"], params["tables"]).T
    scores = scores + params.get("token_bias", 0.0)
    return scores if head.softcap is None else head.softcap * np.tanh(scores / head.softcap)

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, case, hidden, tokens):
    head = self.cases[case](self.vocab, self.dim).clone(dtype=jnp.bfloat16)
    variables = perturbed(head.init(jax.random.key(1), hidden))
    exact = as_float64(variables)
    rows = composed(exact["codes"]["codes"], exact["params"]["tables"])
    check_rounded(head, variables, hidden, tokens, rows)


def nearest(latent, tables):
  """The nearest codes by brute force."""
  parts = latent.reshape(len(latent), len(tables), 1, -1)
  return ((parts - tables[None]) ** 2).sum(-1).argmin(-1)


class TestLearnedProductHead(HeadContract):
  cases: ClassVar = {"bias": lambda v, d: LearnedProductHead(v, d, 7, 4, token_bias=True)}

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    codes = nearest(params["latent"], params["tables"])
    return hidden @ composed(codes, params["tables"]).T + params["token_bias"]

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, head, variables, hidden, tokens
  ):
    """Latent rows get the gradient of the rows; the other gradients are exact."""
    params = variables["params"]
    cotangent = jax.random.normal(jax.random.key(4), tokens.shape)
    loss = lambda p: (
      head.apply({"params": p}, hidden, tokens, method="log_prob") * cotangent
    ).sum()
    found = jax.grad(loss)(params)
    h = np.asarray(hidden, np.float64).reshape(-1, self.dim)
    logits = self.reference_logits(head, {"params": jax.tree.map(np.float64, params)}, h)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    onehot = np.eye(self.vocab)[np.asarray(tokens).ravel()]
    d_scores = (onehot - p) * np.asarray(cotangent, np.float64).ravel()[:, None]
    d_rows = d_scores.T @ h
    np.testing.assert_allclose(found["latent"], d_rows, atol=3e-5)
    np.testing.assert_allclose(found["token_bias"], d_scores.sum(0), atol=3e-5)
    d_tables = np.zeros(params["tables"].shape)
    codes = nearest(np.float64(params["latent"]), np.float64(params["tables"]))
    for row, code in zip(d_rows.reshape(self.vocab, 4, -1), codes):
      for m in range(4):
        d_tables[m, code[m]] += row[m]
    np.testing.assert_allclose(found["tables"], d_tables, atol=3e-5)

  @costly
  def test_bfloat16_agrees_with_float64_on_the_same_values(self, case, hidden, tokens):
    """Rows are rounded to bfloat16; latent rows and codes are not."""
    head = self.cases[case](self.vocab, self.dim).clone(dtype=jnp.bfloat16)
    variables = perturbed(head.init(jax.random.key(1), hidden))
    params = as_float64(variables)["params"]
    rows = composed(nearest(params["latent"], params["tables"]), params["tables"])
    check_rounded(head, variables, hidden, tokens, rows)


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


@pytest.mark.slow
def test_the_commitment_moves_the_batchs_latent_rows_towards_their_rows():
  head = LearnedProductHead(11, 6, 3, 2, commitment=0.5)
  hidden, tokens = jax.random.normal(jax.random.key(0), (4, 6)), jnp.array([0, 3, 3, 10])
  variables = head.init(jax.random.key(1), hidden)
  terms = lambda p: head.apply({"params": p}, hidden, tokens, method="loss_terms")[1]
  value, gradient = jax.value_and_grad(lambda p: terms(p)["commitment"])(variables["params"])
  latent, tables = (np.float64(variables["params"][n]) for n in ("latent", "tables"))
  apart = (latent - composed(nearest(latent, tables), tables))[np.asarray(tokens)]
  np.testing.assert_allclose(value, 0.5 * (apart**2).sum(-1).mean(), rtol=1e-5)
  np.testing.assert_allclose(gradient["latent"][3], 2 * 0.5 * 2 / 4 * apart[1], rtol=1e-4)
  assert (gradient["latent"][1] == 0).all()
  assert (gradient["tables"] == 0).all()


@pytest.mark.parametrize("batch", [(), (1,), (2, 5)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_summed_scores_equal_those_of_composed_rows(dtype, batch):
  # Three subspaces fill no word of four or two codes.
  keys = jax.random.split(jax.random.key(0), 3)
  tables = jax.random.normal(keys[0], (3, 200, 4))
  codes = jax.random.randint(keys[1], (29, 3), 0, 200).astype(dtype)
  hidden = jax.random.normal(keys[2], (*batch, 12))
  found = product.summed_scores(product.partial_scores(hidden, tables, jnp.float32), codes)
  expected = np.asarray(hidden, np.float64) @ composed(np.asarray(codes), np.float64(tables)).T
  np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), atol=1e-5)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((10, 8, 4, 3), r"`subspaces` .*3.*\[1, 2, 4, 8\]"),
    ((10, 8, 0, 2), "`codes` .*0"),
  ],
)
def test_codes_and_subspaces_outside_their_range_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    ProductHead(*arguments).init(jax.random.key(0), jnp.ones((1, 8)))


@pytest.mark.parametrize(
  ("codes", "message"),
  [
    (np.zeros((9, 2), int), r"codes.*9, 2"),
    (np.zeros((10, 2)), "codes.*float64"),
    (np.full((10, 2), 4), "got 4 for token 0"),
  ],
)
def test_codes_that_do_not_fit_are_refused(codes, message):
  head = ProductHead(10, 8, 4, 2, codes_init=lambda *_: codes)
  with pytest.raises(ValueError, match=message):
    head.init(jax.random.key(0), jnp.ones((1, 8)))


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_negative_or_infinite_commitment_is_refused(value):
  with pytest.raises(ValueError, match=f"`commitment` .*{value}"):
    LearnedProductHead(7, 4, 3, 2, commitment=value).init(jax.random.key(0), jnp.zeros((1, 4)))


def test_initialisers_may_be_partitioned():
  init = nn.with_partitioning(sub_vector_init, (None, "codes", None))
  variables = ProductHead(11, 6, 3, 2, table_init=init).init(jax.random.key(0), jnp.ones((1, 6)))
  boxed = variables["params"]["tables"]
  assert boxed.names == (None, "codes", None)
  assert boxed.value.shape == (2, 3, 3)


def test_initial_rows_have_unit_length_on_average():
  head = ProductHead(500, 64, 50, 8)
  variables = head.init(jax.random.key(0), jnp.ones((1, 64)))
  rows = composed(np.asarray(variables["codes"]["codes"]), variables["params"]["tables"])
  np.testing.assert_allclose((rows**2).sum(-1).mean(), 1, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_one_row_is_decoded_by_lookups_and_many_by_composing_with_equal_results(softcap):
  head = ProductHead(101, 12, 5, 3, token_bias=True, softcap=softcap)
  many = jax.random.normal(jax.random.key(0), (7, 12))
  variables = perturbed(head.init(jax.random.key(1), many))
  rows = lambda hidden: str(
    jax.make_jaxpr(lambda h: head.apply(variables, h, 9, method="top_k"))(hidden)
  )
  assert "f32[3,5,1]" in rows(many[:1])  # a score of each sub-vector
  assert "f32[3,5,300]" not in rows(jnp.resize(many, (300, 12)))
  together = [x[:7] for x in head.apply(variables, jnp.resize(many, (300, 12)), 9, method="top_k")]
  alone = [head.apply(variables, row[None], 9, method="top_k") for row in many]
  for at, expected in enumerate(together):
    found = np.concatenate([pair[at] for pair in alone])
    np.testing.assert_allclose(found, expected, atol=1e-5)
