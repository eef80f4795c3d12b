"""The certified head answers as the dense head does, and says how much it had to look at."""

import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vqjax.nnx
from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import random_variables, results
from vqjax import CertifiedHead, CodebookHead, DenseEmbedding, DenseHead
from vqjax.ops import certified, narrow, sampling, softmax, vocab_parallel


class TestCertifiedHead(RepresentativeContract):
  cases: ClassVar = {
    "bias": lambda v, d: CertifiedHead(v, d, use_bias=True, budget=20),
    "tied": lambda v, d: CertifiedHead(v, d, embedding=DenseEmbedding(v, d)),
  }

  @staticmethod
  def prepared(head, variables):
    return CertifiedHead.from_dense(head, variables)[1]

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
    return hidden @ weight.T + params.get("bias", 0.0)


def normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dense(vocab, dim, seed=0, **fields):
  head = DenseHead(vocab, dim, use_bias=True, **fields)
  params = {"weight": normal(seed, vocab, dim) + np.float32(0.5), "bias": normal(seed + 9, vocab)}
  return head, {"params": params}, normal(seed + 19, 4, 6, dim)


@pytest.mark.parametrize("dim", [19, 24, 256])
def test_no_score_in_float64_is_above_its_bound(dim):
  weight = normal(0, 257, dim) * np.exp2(np.arange(257) % 40 - 20, dtype=np.float32)[:, None]
  weight[7], weight[8] = 0.0, 1e-30
  batches = normal(1, 1, dim), normal(2, 3, 4, dim)
  for hidden in batches:
    # A few dimensions are far larger than the others, as in states of language models.
    hidden[..., ::17] *= 30.0

  def program(weight, batches):
    rows, found = certified.int8_rows(weight), []
    for hidden in batches:
      tokens = jnp.broadcast_to(jnp.arange(257), (*hidden.shape[:-1], 257))
      upper = certified.bounds(hidden, rows, 257, lambda product_WB, cut: product_WB)
      found.append((upper.block(0)[0], certified.lower(hidden, rows, tokens)))
    return rows.mean, found

  mean, found = results(program, weight, batches)
  exact = np.float64(weight)
  length = np.linalg.norm(exact - mean, axis=1)
  for hidden, (upper, lower) in zip(batches, found):
    score, bound = np.float64(hidden) @ exact.T, np.moveaxis(np.float64(upper), 0, -1)
    assert (score <= bound).all()
    assert (score >= np.float64(lower)).all()
    # Two 8-bit roundings, each of about a hundredth of a length, are far from the worst case.
    both = length * np.linalg.norm(hidden, axis=-1, keepdims=True)
    assert np.median((bound - score) / both) < 0.04


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_integer_products_are_exact(platform, monkeypatch):
  monkeypatch.setattr(vocab_parallel, "platform", lambda: platform)
  rng = np.random.default_rng(0)
  pairs = []
  for dim in (1, 63, 128, 1100):
    for batch in ((), (3,), (2, 4)):
      weight, vectors = (rng.integers(-127, 128, (*n, dim), np.int8) for n in ((7,), batch))
      # The largest sums of two products come near to what 16 bits hold.
      weight[0] = 127
      vectors[...] = np.where(rng.random(dim) < 0.9, 127, vectors)
      pairs.append((weight, vectors))
  found = results(lambda pairs: [narrow.int8_product(*pair) for pair in pairs], pairs)
  for (weight, vectors), product in zip(pairs, found):
    wanted = np.moveaxis(vectors.astype(np.int64) @ weight.T.astype(np.int64), -1, 0)
    np.testing.assert_array_equal(product, wanted)


def test_scores_of_few_vectors_on_a_tpu_are_products(monkeypatch):
  monkeypatch.setattr(vocab_parallel, "platform", lambda: "tpu")
  weight, batches = normal(0, 7, 24), [normal(1, *batch, 24) for batch in [(), (0,), (3,), (2, 4)]]
  found = results(lambda w, batches: [softmax.rows_scores(w, h) for h in batches], weight, batches)
  for hidden, scores in zip(batches, found):
    wanted = np.moveaxis(hidden @ weight.T, -1, 0)
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"softcap": 30.0}, {"dtype": jnp.bfloat16}])
def test_the_best_tokens_are_those_of_the_dense_head_with_few_in_doubt(fields):
  head, variables, hidden = dense(1009, 24, **fields)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=100)

  def program(variables, own_variables, hidden):
    logits = head.apply(variables, hidden)
    best = [own.apply(own_variables, hidden, k, method="best") for k in (1, 5)]
    return best, [jax.lax.top_k(logits, k) for k in (1, 5)]

  for found, (scores, tokens) in zip(*results(program, variables, own_variables, hidden)):
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.scores, scores, rtol=2e-6, atol=2e-6)
    assert found.certain.all()
    assert found.survivors.min() >= tokens.shape[-1]
    assert found.survivors.max() < 100


def test_a_draw_is_the_best_of_noisy_dense_scores():
  head, variables, hidden = dense(1009, 24)
  variables["params"]["bias"][::2] = -np.inf
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=100)

  def program(variables, own_variables, hidden):
    key = jax.random.key(9)
    noise = sampling.gumbel(jax.random.fold_in(key, 0), (1009, *hidden.shape[:-1]))
    noisy = jnp.moveaxis(head.apply(variables, hidden), -1, 0) / 0.7 + noise
    return own.apply(own_variables, hidden, key, 0.7, method="sample"), noisy.argmax(axis=0)

  # Two vectors take the first pass; on a CPU, 24 take all rows.
  for some in (hidden, hidden[0, :2]):
    drawn, wanted = results(program, variables, own_variables, some)
    np.testing.assert_array_equal(drawn, wanted)


def best_and_top_k(head, own, variables, own_variables, hidden, k):
  """`best` of the certified head, and the k best tokens of the dense head."""
  return results(
    lambda v, o, h: (own.apply(o, h, k, method="best"), head.apply(v, h, k, method="top_k")[1]),
    *(variables, own_variables, hidden),
  )


def test_rows_in_doubt_beyond_the_budget_are_all_scored():
  head, variables, hidden = dense(301, 16)
  # Rows that differ by less than their errors.
  weight = variables["params"]["weight"]
  variables["params"] = {"weight": weight[:1] + 1e-3 * weight, "bias": np.zeros(301, np.float32)}
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=3)
  codes = own_variables["codes"]
  codes = codes | {"row_error": np.asarray(codes["row_error"]) + np.float32(10)}
  found, tokens = best_and_top_k(head, own, variables, own_variables | {"codes": codes}, hidden, 2)
  assert not found.certain.any()
  assert (found.survivors == 4).all()
  np.testing.assert_array_equal(found.tokens, tokens)


def test_a_row_of_which_nothing_is_known_has_no_bound():
  weight = normal(0, 9, 24)
  weight[7] = np.nan

  def bounds(weight):
    rows = certified.int8_rows(weight)._replace(mean=jnp.zeros(24))
    upper = certified.bounds(jnp.ones((2, 24)), rows, 9, lambda product_WB, cut: product_WB)
    return upper.block(0)[0]

  assert np.isposinf(results(bounds, weight)[7]).all()


def test_the_highest_bounds_of_a_vocabulary_of_whole_chunks_are_selected():
  bound = normal(0, 4096, 2, 3)
  bound[5, 0, 0], bound[7] = np.inf, -np.inf

  def highest(bound):
    tokens = jnp.arange(4096, dtype=jnp.int32)
    return certified._highest(sampling.Blocks(1, lambda _: (bound, tokens), (2, 3)), 21)

  found = results(highest, bound)
  bound = np.moveaxis(bound, 0, -1)
  np.testing.assert_array_equal(found.scores, -np.sort(-bound, axis=-1)[..., :21])
  np.testing.assert_array_equal(np.take_along_axis(bound, found.tokens, axis=-1), found.scores)


def test_fresh_variables_answer_from_all_rows():
  head = CertifiedHead(53, 8)
  variables = random_variables(head)
  found, tokens = best_and_top_k(head, head, variables, variables, normal(0, 3, 8), 4)
  assert not found.certain.any()
  np.testing.assert_array_equal(found.tokens, tokens)


@pytest.mark.parametrize("vocab", [1, 7])
def test_a_vocabulary_below_the_budget_is_certain(vocab):
  head, variables, hidden = dense(vocab, 5)
  own = CertifiedHead.from_dense(head, variables)
  found, tokens = best_and_top_k(head, own[0], variables, own[1], hidden, vocab)
  np.testing.assert_array_equal(found.tokens, tokens)


def test_equal_scores_come_in_the_order_of_the_tokens():
  head, variables, hidden = dense(64, 5)
  variables["params"] = {"weight": np.ones((64, 5)), "bias": np.zeros(64)}
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=10)
  found = results(lambda v, h: own.apply(v, h, 4, method="best"), own_variables, hidden)
  np.testing.assert_array_equal(found.tokens, np.broadcast_to(np.arange(4), (4, 6, 4)))


def test_rows_of_another_weight_are_told():
  head, variables, _ = dense(301, 16)
  own, own_variables = CertifiedHead.from_dense(head, variables)
  assert own.is_certified(own, own_variables)
  other = own_variables | {"params": dense(301, 16, seed=1)[1]["params"]}
  assert not own.is_certified(own, other)
  assert own.is_certified(*CertifiedHead.from_dense(own, other))


def test_rows_of_another_weight_change_no_answer():
  head, variables, hidden = dense(3001, 32)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=64)
  weight, other = variables["params"]["weight"], dense(3001, 32, seed=1)[1]["params"]["weight"]

  @jax.jit
  def program(weight, hidden):
    params = own_variables["params"] | {"weight": weight}
    best = own.apply(own_variables | {"params": params}, hidden, method="best")
    return best, head.apply({"params": params}, hidden).argmax(axis=-1)

  for changed in (weight, other, weight + np.float32(0.1) * other, 2 * weight):
    found, tokens = jax.device_get(program(changed, hidden))
    assert found.certain.any() == found.certain.all() == (changed is weight)
    np.testing.assert_array_equal(found.tokens[..., 0], tokens)


@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
def test_an_nnx_layer_is_told_from_a_head():
  layer = nnx.jit(lambda: vqjax.nnx.DenseHead(31, 8, rngs=nnx.Rngs(0)))()
  with pytest.raises(ValueError, match=r"got a DenseHead of vqjax\.nnx.*`linen_variables"):
    CertifiedHead.from_dense(layer, layer.linen_variables())
  # As the message says.
  head, variables = CertifiedHead.from_dense(layer.layer, layer.linen_variables())
  certified_layer = vqjax.nnx.CertifiedHead.from_linen(head, variables)
  both = nnx.jit(lambda own, layer, h: (own.best(h), layer.logits(h).argmax(axis=-1)))
  found, tokens = jax.device_get(both(certified_layer, layer, normal(0, 3, 8)))
  assert found.certain.all()
  assert (found.tokens[:, 0] == tokens).all()


def test_bad_heads_and_weights_are_refused():
  head, variables, _ = dense(31, 8)
  with pytest.raises(ValueError, match=r"must be a DenseHead .*got a CodebookHead"):
    CertifiedHead.from_dense(CodebookHead(31, 8, 4), variables)
  with pytest.raises(ValueError, match="`budget` must be at least 1; got 0"):
    CertifiedHead(31, 8, budget=0).size()
  variables["params"]["weight"][3, 2] = np.nan
  with pytest.raises(ValueError, match="must be finite; got nan or inf in row 3"):
    CertifiedHead.from_dense(head, variables)
