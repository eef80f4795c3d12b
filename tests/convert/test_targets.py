"""Heads made of dense rows keep the trained bias; an assignment may be an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import (
  CodebookHead,
  DenseHead,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
  UnsharedGroupedHead,
  convert,
)

V, D, K = 13, 5, 4
CODE = np.arange(V) % K


def stats(bias=True):
  rng = np.random.default_rng(0)
  rows, bias = rng.normal(size=(V, D)).astype(np.float32), rng.normal(size=V) if bias else None
  return convert.TokenStats(np.arange(V), np.arange(1, V + 1), rows, None, bias)


def logits(head, variables, hidden):
  narrow = lambda x: x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
  variables = jax.tree.map(lambda x: narrow(np.asarray(x)), variables)
  return np.asarray(jitted.apply(head, variables, hidden), np.float64)


EXACT = [
  (convert.ToDense(), DenseHead(V, D, use_bias=True)),
  (convert.ToLowRank(), LowRankHead(V, D, D, use_bias=True)),
  (convert.ToResidual(CODE), ResidualCodebookHead(V, D, K, D, token_bias=True)),
  (convert.ToProduct(), ProductHead(V, D, V, 1, token_bias=True)),
  (convert.ToLearnedProduct(), LearnedProductHead(V, D, V, 1, token_bias=True)),
]


@pytest.mark.parametrize(("target", "head"), EXACT, ids=lambda x: type(x).__name__)
def test_a_head_that_can_hold_the_rows_has_the_scores_of_rows_and_bias(target, head):
  given, hidden = stats(), np.random.default_rng(1).normal(size=(7, D)).astype(np.float32)
  expected = hidden @ given.output.T + given.bias
  found = logits(head, target(given, head), hidden)
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
  ("target", "head"),
  [
    (convert.ToCodebook(CODE), CodebookHead(V, D, K, token_bias=True)),
    (convert.ToLearnedCodebook(CODE), LearnedCodebookHead(V, D, K, 2, token_bias=True)),
  ],
  ids=lambda x: type(x).__name__,
)
def test_tokens_on_one_code_differ_by_the_trained_bias(target, head):
  given = stats()
  variables = target(given, head)
  np.testing.assert_array_equal(variables["params"]["token_bias"], given.bias)
  means = np.stack(
    [
      np.average(given.output[k == CODE], axis=0, weights=given.counts[k == CODE] + 1)
      for k in range(K)
    ]
  )
  np.testing.assert_allclose(variables["params"]["codebook"], means, rtol=1e-6)


@pytest.mark.parametrize(
  ("target", "head"),
  [
    (convert.ToDense(), DenseHead(V, D)),
    (convert.ToProduct(), ProductHead(V, D, 2, 1)),
    (convert.ToCodebook(CODE), CodebookHead(V, D, K)),
    (convert.ToGrouped(), UnsharedGroupedHead(V, D, groups=3)),
  ],
  ids=lambda x: type(x).__name__,
)
def test_a_head_without_a_bias_is_refused_where_one_was_trained(target, head):
  assert target(stats(bias=False), head)
  with pytest.raises(ValueError, match="`head` must have a bias"):
    target(stats(), head)


def test_an_array_is_the_assignment_of_a_mapping():
  head = CodebookHead(V, D, K)
  of = lambda mapping: convert.ToCodebook(mapping)(stats(bias=False), head)
  wanted = of(convert.Fixed(lambda vocab, codes: CODE))
  for given in (CODE, CODE.tolist(), jnp.asarray(CODE), convert.Fixed(CODE)):
    jax.tree.map(np.testing.assert_array_equal, of(given), wanted)
  assert convert.ToCodebook(CODE) == convert.ToCodebook(CODE.copy())
  assert convert.ToCodebook(CODE) != convert.ToCodebook(CODE[::-1])
  with pytest.raises(ValueError, match=r"`assignment` must have shape \(13,\)"):
    of(CODE[1:])
  order = convert.ByClusters(CODE)(stats(), np.array([4, 3, 3, 3]))
  np.testing.assert_array_equal(CODE[order], np.repeat([0, 1, 2, 3], [4, 3, 3, 3]))
