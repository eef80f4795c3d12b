"""Heads and embeddings of random shapes and options against float64 NumPy.

Each example is compiled; `make faults` tries many more, by VQJAX_EXAMPLES.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vqjax
from tests import jitted, reference
from tests.contract_on_meshes import as_float64
from tests.heads import (
  test_adaptive,
  test_class_based,
  test_codebook,
  test_dense,
  test_grouped,
  test_hierarchical,
  test_learned_codebook,
  test_low_rank,
  test_mixture,
  test_product,
  test_residual,
  test_sampled,
)
from vqjax.embeddings import LowRankEmbedding, ProductEmbedding, ScalarEmbedding

EXAMPLES = int(os.environ.get("VQJAX_EXAMPLES", "1"))

some = settings(
  max_examples=EXAMPLES,
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=list(HealthCheck),
)

booleans = st.booleans()


def upto(most):
  return st.integers(1, most)


@st.composite
def divisors(draw, number):
  return draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))


def assigned(seed):
  """A random assignment, with empty codes."""
  return lambda vocab, codes: np.random.default_rng(seed).integers(0, codes, vocab)


QUANTIZERS = {"sx": vqjax.SoftmaxQuantizer, "vq": vqjax.CentroidQuantizer}


def quantizer(draw, name, dim):
  """A quantiser without the statistics of normalisation, which `spread` would make negative."""
  codes, subspaces = draw(st.integers(2, 9)), draw(divisors(dim))
  return QUANTIZERS[name](codes, subspaces, shared=draw(booleans), normalize=False)


def dpq_rows(params):
  """The rows of a DPQ embedding by brute force, float64 [V, D]."""
  own, query = params["quantizer"], params["query"]
  keys = own.get("keys", own.get("centroids"))
  parts = query.reshape(len(query), -1, 1, keys.shape[-1])
  scores = parts * keys if "keys" in own else -((parts - keys) ** 2)
  codes = scores.sum(-1).argmax(-1)
  values = own.get("values", keys)
  values = np.broadcast_to(values, (codes.shape[1], *values.shape[1:]))
  return values[np.arange(codes.shape[1]), codes].reshape(len(query), -1)


class DPQ:
  """Reference of the DPQ heads, for any number of subspaces."""

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    return hidden @ dpq_rows(params["table"]).T + params.get("bias", 0.0)


# Head -> (draw, vocab, dim) -> head, and the class of tests whose reference computes its logits.
HEADS = {
  "dense": (
    lambda draw, v, d: vqjax.DenseHead(v, d, use_bias=draw(booleans)),
    test_dense.TestDenseHead,
  ),
  "codebook": (
    lambda draw, v, d: vqjax.CodebookHead(
      v, d, draw(upto(v)), assigned(draw(upto(99))), token_bias=draw(booleans)
    ),
    test_codebook.TestCodebookHead,
  ),
  "grouped": (
    lambda draw, v, d: vqjax.GroupedHead(v, d, groups=draw(upto(v))),
    test_grouped.TestGroupedHead,
  ),
  "unshared grouped": (
    lambda draw, v, d: vqjax.UnsharedGroupedHead(
      v, d, groups=draw(upto(v)), use_bias=draw(booleans)
    ),
    test_grouped.TestUnsharedGroupedHead,
  ),
  "adaptive": (
    lambda draw, v, d: vqjax.AdaptiveHead(
      v, d, tuple(sorted(draw(st.sets(st.integers(1, v - 1), min_size=1, max_size=3)))), factor=1
    ),
    test_adaptive.TestAdaptiveHead,
  ),
  "class based": (
    lambda draw, v, d: vqjax.ClassBasedHead(v, d, draw(upto(v)), assigned(draw(upto(99)))),
    test_class_based.TestClassBasedHead,
  ),
  "hierarchical": (
    lambda draw, v, d: vqjax.HierarchicalHead(v, d),
    test_hierarchical.TestHierarchicalHead,
  ),
  "low rank": (
    lambda draw, v, d: vqjax.LowRankHead(v, d, draw(upto(min(v, d))), use_bias=draw(booleans)),
    test_low_rank.TestLowRankHead,
  ),
  "mixture": (
    lambda draw, v, d: vqjax.MixtureHead(
      v, d, draw(upto(4)), draw(upto(2 * d)), use_bias=draw(booleans)
    ),
    test_mixture.TestMixtureHead,
  ),
  "product": (
    lambda draw, v, d: vqjax.ProductHead(
      v,
      d,
      draw(st.integers(2, 9)),
      draw(divisors(d)),
      codes_init=lambda v, k, m: np.random.default_rng(0).integers(0, k, (v, m)),
      token_bias=draw(booleans),
      softcap=draw(st.sampled_from([None, 2.0])),
    ),
    test_product.TestProductHead,
  ),
  "residual": (
    lambda draw, v, d: vqjax.ResidualCodebookHead(
      v, d, draw(upto(v)), draw(upto(min(v, d))), token_bias=draw(booleans)
    ),
    test_residual.TestResidualCodebookHead,
  ),
  "learned codebook": (
    lambda draw, v, d: vqjax.LearnedCodebookHead(
      v, d, k := draw(upto(v)), draw(upto(k)), token_bias=draw(booleans)
    ),
    test_learned_codebook.TestLearnedCodebookHead,
  ),
  "learned product": (
    lambda draw, v, d: vqjax.LearnedProductHead(
      v, d, draw(st.integers(2, 9)), draw(divisors(d)), token_bias=True
    ),
    test_product.TestLearnedProductHead,
  ),
  "sampled": (
    lambda draw, v, d: vqjax.SampledSoftmaxHead(v, d, samples=draw(upto(v)), use_bias=True),
    test_sampled.TestSampledSoftmaxHead,
  ),
  "dpq sx": (
    lambda draw, v, d: vqjax.DPQHead(v, d, quantizer(draw, "sx", d), use_bias=draw(booleans)),
    DPQ,
  ),
  "dpq vq": (
    lambda draw, v, d: vqjax.DPQHead(v, d, quantizer(draw, "vq", d), use_bias=draw(booleans)),
    DPQ,
  ),
}

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


@jax.jit
def spread(variables, key):
  """Variables of order one, whatever their initialisers."""
  leaves, tree = jax.tree.flatten(variables)
  keys = jax.random.split(key, len(leaves))
  change = lambda x, k: x + 0.5 * jax.random.normal(k, x.shape, x.dtype)
  return jax.tree.unflatten(
    tree,
    [change(x, k) if jnp.issubdtype(x.dtype, jnp.floating) else x for x, k in zip(leaves, keys)],
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@some
@given(st.data())
def test_a_head_is_its_reference(name, data):
  make, contract = HEADS[name]
  draw = data.draw
  vocab, dim, batch = draw(st.integers(2, 70)), draw(upto(5)), draw(upto(6))
  head = make(draw, vocab, dim)
  dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
  integers = draw(st.sampled_from(INTEGERS))
  random = np.random.default_rng(draw(upto(999)))
  hidden = jnp.asarray(random.standard_normal((batch, dim)), dtype)
  tokens = np.append(random.integers(0, vocab, batch - 1), vocab).astype(integers)
  if np.dtype(integers).kind == "i":
    tokens[-1] = -1
  variables = spread(jitted.init(head, jax.random.key(0), hidden), jax.random.key(1))
  params = dict(variables["params"])
  bias = next((b for b in ("bias", "token_bias") if np.shape(params.get(b)) == (vocab,)), None)
  if bias and draw(booleans):
    out = random.random(vocab) < 0.3
    out[0] = False  # at least one token is left
    params[bias] = jnp.where(out, -jnp.inf, params[bias])
    variables = variables | {"params": params}
  if bias and np.isneginf(params[bias]).any() and getattr(head, "softcap", None):
    return  # a capped score is finite
  with np.errstate(all="ignore"):
    exact = contract().reference_logits(head, as_float64(variables), np.asarray(hidden, np.float64))
    expected = reference.log_softmax(exact)
  # The logits of a 16-bit hidden state have its precision, relative to the largest score.
  scale = np.abs(np.where(np.isfinite(exact), exact, 0)).max() + 1
  close = {"atol": {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype] * scale}

  both = jax.jit(
    lambda v, h, t: (head.apply(v, h, method="logits"), head.apply(v, h, t, method="log_prob"))
  )
  logits, log_prob = both(variables, hidden, tokens)
  np.testing.assert_allclose(reference.log_softmax(logits), expected, **close)
  own = expected[np.arange(batch - 1), tokens[:-1].astype(int)]
  np.testing.assert_allclose(log_prob[:-1], own, **close)
  assert np.isnan(log_prob[-1])

  # What is not a number in one row stays in it.
  bad = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
  dirty_logits, dirty = both(variables, hidden.at[0, 0].set(bad), tokens)
  np.testing.assert_array_equal(dirty[1:], log_prob[1:])
  np.testing.assert_array_equal(dirty_logits[1:], logits[1:])
  assert not dirty[0] > 0


def rows_of(embedding, variables):
  """The table of an embedding, float64 [V, D], from its variables."""
  v = as_float64(variables)
  params, codes = v["params"], v.get("codes", {})
  match embedding:
    case vqjax.DenseEmbedding():
      return params["weight"]
    case LowRankEmbedding():
      return params["weight"] @ params["up"]
    case vqjax.DPQEmbedding():
      return dpq_rows(params)
    case vqjax.CodebookEmbedding():
      return params["codebook"][codes["assignment"]]
    case ScalarEmbedding():
      step = (params["high"] - params["low"]) / (2**embedding.bits - 1)
      return params["low"] + step * codes["levels"]
  own = np.arange(embedding.subspaces) if len(params["values"]) > 1 else 0
  parts = params["values"][own, codes["codes"]]
  rows = parts.mean(1) if embedding.additive else parts.reshape(embedding.vocab, -1)
  return rows @ params["basis"] if embedding.rotated else rows


EMBEDDINGS = {
  "dense": lambda draw, v, d, kind: vqjax.DenseEmbedding(v, d, dtype=kind),
  "low rank": lambda draw, v, d, kind: LowRankEmbedding(v, d, draw(upto(min(v, d))), dtype=kind),
  "codebook": lambda draw, v, d, kind: vqjax.CodebookEmbedding(
    v, d, draw(upto(v)), assigned(draw(upto(99))), dtype=kind
  ),
  "scalar": lambda draw, v, d, kind: ScalarEmbedding(v, d, draw(st.integers(1, 16)), dtype=kind),
  "product": lambda draw, v, d, kind: ProductEmbedding(
    v,
    d,
    draw(st.integers(2, 9)),
    draw(divisors(d)),
    shared=draw(booleans),
    additive=draw(booleans),
    codes_init=lambda v, k, m: np.random.default_rng(0).integers(0, k, (v, m)),
    dtype=kind,
  ),
  "dpq sx": lambda draw, v, d, kind: vqjax.DPQEmbedding(v, d, quantizer(draw, "sx", d), dtype=kind),
  "dpq vq": lambda draw, v, d, kind: vqjax.DPQEmbedding(v, d, quantizer(draw, "vq", d), dtype=kind),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EMBEDDINGS)
@some
@given(st.data())
def test_an_embedding_is_its_table(name, data):
  draw = data.draw
  vocab, dim = draw(st.integers(2, 70)), draw(upto(5))
  dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
  embedding = EMBEDDINGS[name](draw, vocab, dim, jnp.dtype(dtype))
  integers = draw(st.sampled_from(INTEGERS))
  random = np.random.default_rng(draw(upto(999)))
  tokens = random.integers(0, vocab, (2, 3)).astype(integers)
  tokens[1, 2] = vocab if np.dtype(integers).kind == "u" else -1
  variables = spread(jitted.init(embedding, jax.random.key(0), tokens), jax.random.key(1))
  found = jitted.apply(embedding, variables, tokens)
  assert found.dtype == jnp.dtype(dtype)
  table = rows_of(embedding, variables)
  rounding = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
  flat, known = np.asarray(found, np.float64).reshape(6, dim), tokens.reshape(6)[:5].astype(int)
  np.testing.assert_allclose(flat[:5], table[known], atol=rounding * (np.abs(table).max() + 1))
  assert np.isnan(flat[5]).all()
