"""The codebook head keeps the contract with any assignment, tied and untied."""

import contextlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import abstract_variables, initial_variables, random_variables, results, run
from vqjax import CodebookEmbedding, CodebookHead, assign
from vqjax.sharding import MeshShape, make_mesh


def with_empty_codes(vocab, codes):
  """Only every third code has tokens."""
  return (np.arange(vocab) * 7 % codes) // 3 * 3


def tied(vocab, dim, codes=17, **options):
  """A head that is tied to an embedding."""
  embedding = CodebookEmbedding(vocab, dim, codes, with_empty_codes)
  return CodebookHead(vocab, dim, codes, embedding=embedding, **options)


class TestCodebookHead(RepresentativeContract):
  cases: ClassVar = {
    "uniform": lambda v, d: CodebookHead(v, d, 17),
    "bias": lambda v, d: CodebookHead(v, d, 17, token_bias=True),
    "empty": lambda v, d: CodebookHead(v, d, 17, with_empty_codes),
    "empty bias": lambda v, d: CodebookHead(v, d, 17, with_empty_codes, token_bias=True),
    "one each": lambda v, d: CodebookHead(v, d, v),
    "tied": lambda v, d: tied(v, d, token_bias=True),
  }
  mesh_cases: ClassVar = ("one each", "empty bias")

  def reference_logits(self, head, variables, hidden):
    params, codes = variables["params"], variables["codes"]
    if head.embedding is not None:
      codes = codes["embedding"]
    scores = hidden @ params.get("embedding", params)["codebook"].T
    return scores[..., codes["assignment"]] + params.get("token_bias", 0.0)


def normal(*shape):
  return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_an_empty_code_gets_no_gradient():
  head = CodebookHead(10, 4, 6, with_empty_codes)
  variables, hidden = random_variables(head), normal(3, 4)
  loss = lambda v: head.apply(v, hidden, np.arange(3), method="log_prob").sum()
  gradient = results(jax.grad(loss, allow_int=True), variables)["params"]["codebook"]
  empty = ~np.isin(np.arange(6), variables["codes"]["assignment"])
  assert empty.any()
  assert (gradient[empty] == 0).all()
  assert np.isfinite(gradient).all()


def test_a_bfloat16_bias_of_a_frequent_token_gets_its_whole_gradient():
  head = CodebookHead(5, 4, 2, token_bias=True, param_dtype=jnp.bfloat16)
  hidden, tokens = np.zeros((3000, 4), np.float32), np.zeros(3000, np.int32)
  loss = lambda v: head.apply(v, hidden, tokens, method="log_prob").sum()
  gradient = results(jax.grad(loss, allow_int=True), initial_variables(head))["params"][
    "token_bias"
  ]
  # With equal scores p is 1/5: 3000 · (1 - 1/5) for token 0, -3000 / 5 for others, to 2^-9.
  np.testing.assert_allclose(np.float64(gradient), [2400, -600, -600, -600, -600], rtol=2**-7)


def test_without_a_bias_no_probability_exceeds_one_over_the_size_of_its_code():
  head = CodebookHead(12, 4, 3, assign.contiguous)
  best = lambda v, h: head.apply(v, h, 1, method="top_k")[0]
  top = results(best, random_variables(head), 100 * normal(50, 4))
  np.testing.assert_allclose(np.exp(top.max()), 1 / 4, rtol=1e-3)


@pytest.mark.parametrize(
  ("table", "message"),
  [
    (np.zeros(9, np.int32), r"assignment.*\(9,\)"),
    (np.full(10, 3), r"got 3 for token 0"),
    (np.full(10, -1), "-1"),
    (np.zeros(10), "float64"),
  ],
)
def test_a_table_that_does_not_fit_is_refused_with_a_remedy(table, message):
  head = CodebookHead(10, 4, 3, lambda vocab, codes: table)
  with pytest.raises(ValueError, match=message) as error:
    abstract_variables(head)
  assert "assign.zipf_mass" in str(error.value)


def test_contiguous_blocks_differ_by_at_most_one():
  sizes = np.bincount(assign.contiguous(10007, 1024), minlength=1024)
  assert set(sizes) == {9, 10}
  assert (np.diff(assign.contiguous(10007, 1024)) >= 0).all()


def test_frequent_tokens_are_alone_and_no_code_is_empty():
  table = assign.FrequentAlone(0.75)(1009, 100)
  sizes = np.bincount(table, minlength=100)
  assert (sizes[:75] == 1).all()
  assert (sizes[75:] > 30).all()
  assert table[:75].tolist() == list(range(75))


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_that_leaves_no_code_for_the_rest_is_refused(fraction):
  with pytest.raises(ValueError, match=r"`fraction` .*\[0, 1\)"):
    assign.FrequentAlone(fraction)(10, 5)


def test_a_code_that_does_not_exist_is_nan_and_never_that_of_a_neighbour():
  head = CodebookHead(10, 4, 3)
  variables, tokens = random_variables(head), np.array([2, 5])
  table = variables["codes"]["assignment"].copy()
  table[tokens] = 40, -1
  variables = variables | {"codes": {"assignment": table}}
  both = lambda own, h: (own.log_prob(h, tokens), own.logits(h)[:, tokens])
  assert all(np.isnan(x).all() for x in run(head, variables, both, normal(2, 4)))


def test_a_code_whose_bias_is_minus_infinity_has_no_probability():
  head = CodebookHead(10, 4, 5, token_bias=True)
  variables, tokens = random_variables(head), np.array([0, 3])
  variables["params"]["token_bias"] = np.float32([-np.inf] * 2 + [0] * 8)
  log_prob = results(
    lambda v, h: head.apply(v, h, tokens, method="log_prob"), variables, normal(2, 4)
  )
  assert np.isneginf(log_prob[0])
  assert np.isfinite(log_prob[1])


@pytest.mark.parametrize("shape", [None, MeshShape(2, 2, 2)])
def test_the_commitment_moves_hidden_vectors_and_not_the_codebook(shape):
  head = CodebookHead(
    53, 6, 7, assign.contiguous, commitment=0.25, vocab_axis="model" if shape else None
  )
  hidden, tokens = normal(4, 5, 6), np.random.default_rng(1).integers(0, 53, (4, 5))
  variables = random_variables(head)
  terms = lambda p, h: head.apply(variables | {"params": p}, h, tokens, method="loss_terms")[1]
  loss = lambda p, h: terms(p, h)["commitment"]
  with jax.set_mesh(make_mesh(shape)) if shape else contextlib.nullcontext():
    found, gradients = results(jax.value_and_grad(loss, (0, 1)), variables["params"], hidden)
  codebook = np.asarray(variables["params"]["codebook"], np.float64)
  apart = np.asarray(hidden, np.float64) - codebook[tokens * 7 // 53]
  np.testing.assert_allclose(found, 0.25 * np.mean(apart**2), rtol=1e-5)
  np.testing.assert_allclose(gradients[1], 0.5 * apart / apart.size, atol=1e-6)
  assert (gradients[0]["codebook"] == 0).all()


def test_the_commitment_is_a_separate_term_of_the_loss():
  heads, tokens = [tied(11, 4, 3, commitment=1.0), tied(11, 4, 3)], np.array([0, 10])
  (log_prob, terms), plain = results(
    lambda v, h: [head.apply(v, h, tokens, method="loss_terms") for head in heads],
    *(random_variables(heads[0]), normal(2, 4)),
  )
  np.testing.assert_array_equal(log_prob, plain[0])
  assert set(terms) == {"commitment"}
  assert plain[1] == {}
