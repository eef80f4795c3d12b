"""Low-rank, product-quantised and scalar-quantised embeddings keep the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from vqjax import DenseHead, convert
from vqjax.embeddings import (
  Int8Embedding,
  LowRankEmbedding,
  ProductEmbedding,
  ScalarEmbedding,
  compact_file,
)
from vqjax.embeddings.scalar import scalar_levels

V, D = 29, 12
ALL = [
  LowRankEmbedding(V, D, 3),
  ProductEmbedding(V, D, 5, 4),
  ProductEmbedding(V, D, 5, 4, shared=True),
  ProductEmbedding(V, D, 5, 7, additive=True),
  ProductEmbedding(V, D, 5, 7, additive=True, shared=True),
  ScalarEmbedding(V, D, 6),
  Int8Embedding(V, D, 4),
]
every = pytest.mark.parametrize("embedding", ALL, ids=lambda e: type(e).__name__)


def init(embedding):
  variables = embedding.init(jax.random.key(0), jnp.zeros((1,), jnp.int32))
  if isinstance(embedding, ScalarEmbedding):
    levels, low, high = scalar_levels(table(), embedding.bits)
    params = {"low": jnp.float32(low), "high": jnp.float32(high)}
    variables = {"params": params, "codes": {"levels": jnp.asarray(levels)}}
  return variables


def table():
  return np.asarray(jax.random.normal(jax.random.key(3), (V, D)))


@pytest.mark.fast_cases(2)
@every
def test_a_lookup_is_a_row_of_the_table_and_nan_outside(embedding):
  variables = init(embedding)
  tokens = jnp.array([[0, V - 1, -1], [7, V, 7]])
  found = embedding.apply(variables, tokens)
  whole = np.asarray(embedding.apply(variables, method="table"))
  assert whole.shape == (V, D)
  np.testing.assert_allclose(found[1, 0], whole[7], rtol=1e-6)
  np.testing.assert_allclose(found[0, :2], whole[[0, V - 1]], rtol=1e-6)
  assert np.isnan(found[0, 2]).all()
  assert np.isnan(found[1, 1]).all()


@pytest.mark.slow
@every
def test_rows_differ_between_tokens(embedding):
  if getattr(embedding, "additive", False) and embedding.shared:
    pytest.skip("the same codes in another order have the same sum")
  whole = np.asarray(embedding.apply(init(embedding), method="table"))
  assert len(np.unique(whole.round(6), axis=0)) == V


@every
def test_size_and_axes_are_those_of_the_variables(embedding):
  variables = init(embedding)
  leaves = jax.tree.leaves(variables["params"])
  assert embedding.size().params == sum(np.size(x) for x in leaves)
  own = sum(np.asarray(x).nbytes for x in jax.tree.leaves(variables))
  assert embedding.size().state_bytes == own
  axes = embedding.logical_axes()
  is_names = lambda x: isinstance(x, tuple)
  ranks = jax.tree.map(len, axes, is_leaf=is_names)
  assert ranks == jax.tree.map(np.ndim, variables)


@pytest.mark.fast_cases(2)
@every
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_vectors_have_the_requested_dtype(embedding, dtype):
  found = embedding.clone(dtype=dtype).apply(init(embedding), jnp.arange(4))
  assert found.dtype == dtype


@pytest.mark.fast_cases(1)
@every
def test_on_eight_devices_vectors_and_gradients_are_those_of_one(embedding):
  variables, tokens = init(embedding), jnp.array([3, 3, 0, V - 1, 9, 11, 1, 28])
  others = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params, embedding, tokens):
    vectors = embedding.apply({"params": params, **others}, tokens)
    return (jnp.sin(vectors) * jnp.arange(8)[:, None]).sum()

  wanted = jax.value_and_grad(loss)(variables["params"], embedding, tokens)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):  # explicit axes
    spread, tokens = embedding.clone(vocab_axis="model"), jax.device_put(tokens, jax.P("data"))
    both = jax.jit(jax.value_and_grad(lambda params: loss(params, spread, tokens)))
    found = jax.device_get(both(variables["params"]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_levels_of_8_bits_are_at_most_half_a_step_off_and_score_where_they_lie():
  embedding, given = Int8Embedding(V, D, 4), np.array(table())
  given[3] = 0
  given[5, 4:8] = 0
  variables = convert.to_int8(embedding, given)
  found = np.asarray(embedding.apply(variables, method="table"))
  step = np.abs(given.reshape(V, -1, 4)).max(axis=-1).repeat(4, axis=1) / 127
  assert (np.abs(found - given) <= step / 2 * (1 + 1e-3)).all()
  assert not np.abs(found[3]).any()
  head = DenseHead(V, D, embedding=embedding)
  tied = {name: {"embedding": tree} for name, tree in variables.items()}
  hidden = jax.random.normal(jax.random.key(1), (5, D))
  scores = np.asarray(hidden, np.float64) @ found.T.astype(np.float64)
  logits = jitted.apply(head, tied, hidden, method="logits")
  np.testing.assert_allclose(logits, scores, atol=1e-5)
  best = head.apply(tied, hidden, 3, method="top_k")[1]
  np.testing.assert_array_equal(best, np.argsort(-scores)[:, :3])


@pytest.mark.parametrize("bits", [1, 4, 6, 8, 12, 16])
def test_levels_are_at_most_half_a_step_off(bits):
  embedding = ScalarEmbedding(V, D, bits)
  found = np.asarray(embedding.apply(init(embedding), method="table"))
  step = (table().max() - table().min()) / (2**bits - 1)
  assert np.abs(found - table()).max() <= step / 2 * (1 + 1e-3)


def test_a_constant_table_has_one_level():
  levels, low, high = scalar_levels(np.full((3, 2), 4.0), 8)
  assert (levels == 0).all()
  assert low == high == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ALL[1:5])
def test_the_compact_form_is_equal_bit_for_bit(embedding):
  variables, tokens = init(embedding), jnp.array([[0, 28], [-1, 7]])
  compact = embedding.compact(variables)
  np.testing.assert_array_equal(compact(tokens), embedding.apply(variables, tokens))
  assert compact.data.nbytes == -(-V * embedding.subspaces * 3 // 8)


def test_codes_of_another_vocabulary_are_refused():
  given = lambda vocab, codes, subspaces: np.zeros((3, subspaces), int)
  with pytest.raises(ValueError, match=r"codes.*3, 4"):
    init(ProductEmbedding(V, D, 5, 4, codes_init=given))


@pytest.mark.parametrize(
  ("embedding", "message"),
  [
    (LowRankEmbedding(V, D, 13), r"`rank` .*\[1, 12\].*13"),
    (LowRankEmbedding(V, D, 0), "`rank` .*0"),
    (ProductEmbedding(V, D, 5, 5), "`subspaces` .*12.*5"),
    (ProductEmbedding(V, D, 0, 4), "`codes` and `subspaces` .*0 and 4"),
    (ProductEmbedding(0, D, 5, 4), "`vocab` .*0"),
    (ScalarEmbedding(V, D, 0), "`bits` .*0"),
    (ScalarEmbedding(V, D, 17), "`bits` .*17"),
    (Int8Embedding(V, D), "`group` must divide dim 12; got 32"),
  ],
)
def test_numbers_outside_their_range_are_refused(embedding, message):
  with pytest.raises(ValueError, match=message):
    embedding.init(jax.random.key(0), jnp.zeros((1,), jnp.int32))


def test_a_table_that_is_not_finite_is_refused():
  with pytest.raises(ValueError, match="`table` must be finite"):
    scalar_levels(np.array([[1.0, np.nan]]), 8)


@pytest.mark.parametrize("bits", [*range(1, 10), 16])
def test_levels_are_packed_at_their_bits_and_read_back(bits, tmp_path):
  vocab, dim = 101, 7
  embedding = ScalarEmbedding(vocab, dim, bits)
  rows = np.random.default_rng(0).normal(size=(vocab, dim))
  levels, low, high = scalar_levels(rows, bits)
  variables = {
    "params": {"low": jnp.float32(low), "high": jnp.float32(high)},
    "codes": {"levels": levels},
  }
  compact = embedding.compact(variables)
  assert compact.data.nbytes == -(-vocab * dim * bits // 8)
  assert embedding.inference_size().state_bytes == compact.nbytes
  compact.save(tmp_path / "small.safetensors")
  read = compact_file.open_compact(tmp_path / "small.safetensors")
  np.testing.assert_array_equal(read.codes_of(np.arange(vocab)), levels)
  wanted = np.asarray(embedding.apply(variables, method="table"))
  np.testing.assert_array_equal(read[np.arange(vocab)], wanted)
  np.testing.assert_array_equal(compact(jnp.arange(vocab)), wanted)
  assert np.abs(wanted - rows).max() <= (high - low) / (2**bits - 1) / 2 * (1 + 1e-2)


def test_levels_of_a_bfloat16_table_are_those_of_its_float32_copy():
  rows = np.random.default_rng(0).normal(size=(V, D)).astype(jnp.bfloat16)
  for mine, wanted in zip(scalar_levels(rows, 8), scalar_levels(rows.astype(np.float32), 8)):
    np.testing.assert_array_equal(mine, wanted)
