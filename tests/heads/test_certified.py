"""The certified head answers as the dense head does, and says how much it had to look at."""

import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vqjax.nnx
from tests.contract import compiled
from tests.contract_of_representatives import RepresentativeContract
from vqjax import CertifiedHead, CodebookHead, DenseEmbedding, DenseHead
from vqjax.ops import certified, narrow, sampling, softmax, vocab_parallel


class TestCertifiedHead(RepresentativeContract):
  cases: ClassVar = {
    "bias": lambda v, d: CertifiedHead(v, d, use_bias=True, budget=20),
    "tied": lambda v, d: CertifiedHead(v, d, embedding=DenseEmbedding(v, d)),
  }

  @pytest.fixture
  def run(self, case):
    run = compiled(type(self), case, self.vocab)
    _, run.variables = CertifiedHead.from_dense(run.head, run.variables)
    return run

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
    return hidden @ weight.T + params.get("bias", 0.0)


def dense(vocab, dim, seed=0, **fields):
  head = DenseHead(vocab, dim, use_bias=True, **fields)
  keys = jax.random.split(jax.random.key(seed), 3)
  variables = {
    "params": {
      "weight": jax.random.normal(keys[0], (vocab, dim)) + 0.5,
      "bias": jax.random.normal(keys[1], (vocab,)),
    }
  }
  return head, variables, jax.random.normal(keys[2], (4, 6, dim))


@pytest.mark.parametrize("dim", [19, 24, 256])
@pytest.mark.parametrize("batch", [(1,), (3, 4)])
def test_no_score_in_float64_is_above_its_bound(dim, batch):
  keys = jax.random.split(jax.random.key(0), 2)
  size = jnp.exp2(jnp.arange(257.0) % 40 - 20)[:, None]
  weight = jax.random.normal(keys[0], (257, dim)) * size
  weight = weight.at[7].set(0.0).at[8].set(1e-30)
  # A few dimensions are far larger than the others, as in states of language models.
  hidden = jax.random.normal(keys[1], (*batch, dim)).at[..., ::17].multiply(30.0)
  rows = certified.int8_rows(weight)
  upper = certified.bounds(hidden, rows, 257, lambda product_WB, cut: product_WB)
  bound = np.moveaxis(np.asarray(upper.block(0)[0], np.float64), 0, -1)
  exact, mean, hidden = (np.asarray(x, np.float64) for x in (weight, rows.mean, hidden))
  assert (hidden @ exact.T <= bound).all()
  tokens = jnp.broadcast_to(jnp.arange(257), (*batch, 257))
  lower = certified.lower(jnp.asarray(hidden, jnp.float32), rows, tokens)
  assert (hidden @ exact.T >= np.asarray(lower, np.float64)).all()
  # Two 8-bit roundings, each of about a hundredth of a length, are far from the worst case.
  length = np.linalg.norm(exact - mean, axis=1) * np.linalg.norm(hidden, axis=-1, keepdims=True)
  assert np.median((bound - hidden @ exact.T) / length) < 0.04


@pytest.mark.parametrize("dim", [1, 63, 128, 1100])
@pytest.mark.parametrize("batch", [(), (3,), (2, 4)])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_integer_products_are_exact(platform, dim, batch, monkeypatch):
  monkeypatch.setattr(vocab_parallel, "platform", lambda: platform)
  rng = np.random.default_rng(0)
  weight, vectors = (rng.integers(-127, 128, (*n, dim)).astype(np.int8) for n in ((7,), batch))
  # The largest sums of two products come near to what 16 bits hold.
  weight[0] = 127
  vectors[..., :] = np.where(rng.random(dim) < 0.9, 127, vectors)
  wanted = np.moveaxis(vectors.astype(np.int64) @ weight.T.astype(np.int64), -1, 0)
  found = jax.jit(narrow.int8_product)(weight, vectors)
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("batch", [(), (0,), (3,), (2, 4)])
def test_scores_of_few_vectors_on_a_tpu_are_products(batch, monkeypatch):
  monkeypatch.setattr(vocab_parallel, "platform", lambda: "tpu")
  weight, hidden = (jax.random.normal(jax.random.key(0), (*n, 24)) for n in ((7,), batch))
  found = jax.jit(softmax.rows_scores)(weight, hidden)
  np.testing.assert_allclose(found, np.moveaxis(hidden @ weight.T, -1, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"softcap": 30.0}, {"dtype": jnp.bfloat16}])
@pytest.mark.parametrize("k", [1, 5])
def test_the_best_tokens_are_those_of_the_dense_head_with_few_in_doubt(fields, k):
  head, variables, hidden = dense(1009, 24, **fields)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=100)
  found = own.apply(own_variables, hidden, k, method="best")
  logits = head.apply(variables, hidden)
  scores, tokens = jax.lax.top_k(logits, k)
  np.testing.assert_array_equal(found.tokens, tokens)
  np.testing.assert_allclose(found.scores, scores, rtol=2e-6, atol=2e-6)
  assert found.certain.all()
  assert found.survivors.min() >= k
  assert found.survivors.max() < 100


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("batch", [(4, 6), (2,)])
def test_a_draw_is_the_best_of_noisy_dense_scores(batch):
  head, variables, hidden = dense(1009, 24)
  hidden = hidden.reshape(-1, 24)[: np.prod(batch)].reshape(*batch, 24)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=100)
  key = jax.random.key(9)
  drawn = own.apply(own_variables, hidden, key, 0.7, method="sample")
  noise = sampling.gumbel(jax.random.fold_in(key, 0), (1009, *batch))
  noisy = jnp.moveaxis(head.apply(variables, hidden), -1, 0) / 0.7 + noise
  np.testing.assert_array_equal(drawn, jnp.argmax(noisy, axis=0))


def test_rows_in_doubt_beyond_the_budget_are_all_scored():
  head, variables, hidden = dense(301, 16)
  # Rows that differ by less than their errors.
  weight = variables["params"]["weight"]
  variables["params"]["weight"] = weight[:1] + 1e-3 * weight
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=3)
  variables["params"]["bias"] = own_variables["params"]["bias"] = jnp.zeros(301)
  own_variables["codes"]["row_error"] += 10.0
  found = own.apply(own_variables, hidden, 2, method="best")
  assert not found.certain.any()
  assert (found.survivors == 4).all()
  np.testing.assert_array_equal(found.tokens, head.apply(variables, hidden, 2, method="top_k")[1])


def test_a_row_of_which_nothing_is_known_has_no_bound():
  weight = jax.random.normal(jax.random.key(0), (9, 24)).at[7].set(jnp.nan)
  rows = certified.int8_rows(weight)
  rows = rows._replace(mean=jnp.zeros(24))
  upper = certified.bounds(jnp.ones((2, 24)), rows, 9, lambda product_WB, cut: product_WB)
  assert np.isposinf(upper.block(0)[0][7]).all()


def test_the_highest_bounds_of_a_vocabulary_of_whole_chunks_are_selected():
  bound = np.random.default_rng(0).standard_normal((4096, 2, 3)).astype(np.float32)
  bound[5, 0, 0], bound[7] = np.inf, -np.inf
  blocks = sampling.Blocks(1, lambda _: (bound, jnp.arange(4096, dtype=jnp.int32)), (2, 3))
  found = certified._highest(blocks, 21)
  bound = np.moveaxis(bound, 0, -1)
  np.testing.assert_array_equal(found.scores, -np.sort(-bound, axis=-1)[..., :21])
  np.testing.assert_array_equal(np.take_along_axis(bound, found.tokens, axis=-1), found.scores)


def test_fresh_variables_answer_from_all_rows():
  head = CertifiedHead(53, 8)
  hidden = jax.random.normal(jax.random.key(0), (3, 8))
  variables = head.init(jax.random.key(1), hidden)
  found = head.apply(variables, hidden, 4, method="best")
  assert not found.certain.any()
  np.testing.assert_array_equal(found.tokens, head.apply(variables, hidden, 4, method="top_k")[1])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("vocab", [1, 2, 7])
def test_a_vocabulary_below_the_budget_is_certain(vocab):
  head, variables, hidden = dense(vocab, 5)
  own, own_variables = CertifiedHead.from_dense(head, variables)
  found = own.apply(own_variables, hidden, vocab, method="best")
  np.testing.assert_array_equal(
    found.tokens, head.apply(variables, hidden, vocab, method="top_k")[1]
  )


def test_equal_scores_come_in_the_order_of_the_tokens():
  head, variables, hidden = dense(64, 5)
  variables["params"] = {"weight": jnp.ones((64, 5)), "bias": jnp.zeros(64)}
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=10)
  found = own.apply(own_variables, hidden, 4, method="best")
  np.testing.assert_array_equal(found.tokens, np.broadcast_to(np.arange(4), (4, 6, 4)))


@pytest.mark.slow
def test_removed_and_forbidden_tokens_are_never_drawn():
  head, variables, hidden = dense(301, 16)
  variables["params"]["bias"] = variables["params"]["bias"].at[::2].set(-jnp.inf)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=40)
  allowed = jnp.arange(301) % 3 > 0
  for options in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}):
    drawn = own.apply(
      own_variables, hidden, jax.random.key(1), allowed=allowed, method="sample", **options
    )
    assert (drawn % 2 == 1).all()
    assert (drawn % 3 > 0).all()
  none = own.apply(
    own_variables, hidden, jax.random.key(1), allowed=jnp.zeros(301, bool), method="sample"
  )
  assert (none == -1).all()


def test_rows_of_another_weight_are_told():
  head, variables, _ = dense(301, 16)
  own, own_variables = CertifiedHead.from_dense(head, variables)
  assert own.is_certified(own, own_variables)
  other = own_variables | {"params": dense(301, 16, seed=1)[1]["params"]}
  assert not own.is_certified(own, other)
  assert own.is_certified(*CertifiedHead.from_dense(own, other))


@pytest.mark.parametrize("changed", ["another weight", "trained a little", "larger"])
def test_rows_of_another_weight_change_no_answer(changed):
  head, variables, hidden = dense(3001, 32)
  own, own_variables = CertifiedHead.from_dense(head, variables, budget=64)
  assert own.apply(own_variables, hidden, method="best").certain.all()
  weight, other = variables["params"]["weight"], dense(3001, 32, seed=1)[1]["params"]["weight"]
  weight = {"another weight": other, "trained a little": weight + 0.1 * other, "larger": 2 * weight}
  variables = {"params": variables["params"] | {"weight": weight[changed]}}
  found = own.apply(own_variables | variables, hidden, method="best")
  assert not found.certain.any()
  logits = head.apply(variables, hidden, method="logits")
  np.testing.assert_array_equal(found.tokens[..., 0], logits.argmax(axis=-1))


@pytest.mark.skipif("VQJAX_RUNTIME_TYPES" in os.environ, reason="calls are checked by jaxtyping")
def test_an_nnx_layer_is_told_from_a_head():
  layer = vqjax.nnx.DenseHead(31, 8, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"got a DenseHead of vqjax\.nnx.*`linen_variables"):
    CertifiedHead.from_dense(layer, layer.linen_variables())
  # As the message says.
  head, variables = CertifiedHead.from_dense(layer.layer, layer.linen_variables())
  certified_layer = vqjax.nnx.CertifiedHead.from_linen(head, variables)
  hidden = jax.random.normal(jax.random.key(0), (3, 8))
  found = certified_layer.best(hidden)
  assert found.certain.all()
  assert (found.tokens[:, 0] == layer.logits(hidden).argmax(axis=-1)).all()


def test_bad_heads_and_weights_are_refused():
  head, variables, _ = dense(31, 8)
  with pytest.raises(ValueError, match=r"must be a DenseHead .*got a CodebookHead"):
    CertifiedHead.from_dense(CodebookHead(31, 8, 4), variables)
  with pytest.raises(ValueError, match="`budget` must be at least 1; got 0"):
    CertifiedHead.from_dense(head, variables, budget=0)[0].init(
      jax.random.key(0), jnp.zeros((1, 8))
    )
  variables["params"]["weight"] = variables["params"]["weight"].at[3, 2].set(jnp.nan)
  with pytest.raises(ValueError, match="must be finite; got nan or inf in row 3"):
    CertifiedHead.from_dense(head, variables)
