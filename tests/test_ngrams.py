"""Tables of n-grams: rows of any embedding, and a decoder's memory that equals transformers'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import jitted
from vqjax import (
  CompactEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  Int8,
  Integers,
  Packed,
  SmallTable,
  SoftmaxQuantizer,
  compress,
)
from vqjax import nnx as layers
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.tables.paged import compress_rows

VOCAB, END, DIM, STREAMS = 101, 3, 12, 2
HASH = XorHash.qwen4(VOCAB, END, heads=2, least=50)
RNG = np.random.default_rng(0)
TOKENS = np.where(RNG.random((2, 11)) < 0.2, END, RNG.integers(0, VOCAB, (2, 11)))
HIDDEN = RNG.standard_normal((2, 11, STREAMS * DIM), np.float32)


def memory():
  table = NGramEmbedding(HASH, DenseEmbedding(HASH.rows + 5, 4))
  return NGramMemory(table, DIM, streams=STREAMS)


def randomised(variables):
  leaves, tree = jax.tree.flatten(variables)
  return tree.unflatten([RNG.standard_normal(x.shape).astype(x.dtype) / 2 for x in leaves])


def test_a_token_reads_the_rows_of_its_hash_one_behind_the_other():
  layer = NGramEmbedding(HASH, DenseEmbedding(HASH.rows, 4))
  variables = randomised(jitted.init(layer, jax.random.key(0), TOKENS))
  table = variables["params"]["table"]["weight"]
  expected = table[HASH(TOKENS)].reshape(2, 11, -1)
  np.testing.assert_array_equal(jitted.apply(layer, variables, TOKENS), expected)
  unknown = np.where(np.arange(11) == 4, VOCAB, TOKENS)
  found = jitted.apply(layer, variables, unknown)
  np.testing.assert_array_equal(
    np.isnan(found).all(-1)[0], (np.arange(11) // 1 >= 4) & (np.arange(11) < 7)
  )
  assert layer.size().params == HASH.rows * 4


def test_a_compressed_table_has_its_own_terms():
  quantizer = SoftmaxQuantizer(4, 2)
  layer = NGramEmbedding(HASH, DPQEmbedding(HASH.rows, 4, quantizer))
  variables = jitted.init(layer, jax.random.key(0), TOKENS)
  vectors = jitted.apply(layer, variables, TOKENS)
  assert vectors.shape == (2, 11, 16)
  assert len(np.unique(np.asarray(vectors).reshape(-1, 2), axis=0)) <= 8


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_token_adds_nothing(shape):
  layer = memory()
  variables = jitted.init(layer, jax.random.key(0), HIDDEN, TOKENS)
  hidden = np.zeros((*shape, STREAMS * DIM), np.float32)
  added = jitted.apply(layer, variables, hidden, np.zeros(shape, np.int32))
  assert added.shape == hidden.shape


@pytest.mark.parametrize("parts", [[1] * 11, [4, 7]])
def test_a_text_in_parts_adds_what_the_whole_adds(parts):
  layer = memory()
  variables = randomised(jitted.init(layer, jax.random.key(0), HIDDEN, TOKENS))
  whole = jitted.apply(layer, variables, HIDDEN, TOKENS)
  cache, found, start = layer.cache(2), [], 0
  for size in parts:
    part = slice(start, start + size)
    added, cache = jitted.apply(
      layer, variables, HIDDEN[:, part], TOKENS[:, part], cache, method="step"
    )
    found.append(added)
    start += size
  np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=1e-5)


def test_a_memory_adds_the_same_on_explicit_axes_whole_and_in_parts():
  layer, tokens, hidden = memory(), np.tile(TOKENS, (2, 1)), np.tile(HIDDEN, (2, 1, 1))
  variables = randomised(jitted.init(layer, jax.random.key(0), hidden, tokens))
  expected = jitted.apply(layer, variables, hidden, tokens)

  def added(variables, hidden, tokens):
    first, cache = layer.apply(
      variables, hidden[:, :4], tokens[:, :4], layer.cache(4), method="step"
    )
    rest, _ = layer.apply(variables, hidden[:, 4:], tokens[:, 4:], cache, method="step")
    return layer.apply(variables, hidden, tokens), jnp.concatenate([first, rest], axis=1)

  with jax.set_mesh(jax.make_mesh((4,), ("data",), (AxisType.Explicit,))):
    given = jax.device_put((hidden, tokens), P("data"))
    found = jax.jit(added)(variables, *given)
    assert jax.typeof(found[0]).sharding.spec[0] == "data"
  for one in jax.device_get(found):
    np.testing.assert_allclose(one, expected, atol=1e-5)


WEIGHT = RNG.standard_normal((HASH.rows + 5, 4), np.float32)


def paged(path):
  compress_rows(WEIGHT, np.ones(len(WEIGHT)), path, size=3000, rows_of_block=5)
  return SmallTable.load(path)


def codes(path):
  del path
  rows = len(WEIGHT)
  packed = RNG.integers(0, 256, -(-rows * 2 * 3 // 8), np.uint8)
  values = RNG.standard_normal((2, 8, 2), np.float32)
  return SmallTable(CompactEmbedding(packed, values, rows, 4, 8, 2, False, "float32"))


@pytest.mark.parametrize(
  "made",
  [
    pytest.param(lambda path: compress(WEIGHT, method=Int8()), id="int8"),
    pytest.param(lambda path: compress(WEIGHT, method=Packed(), bytes=2000), id="packed"),
    pytest.param(codes, id="codes"),
    pytest.param(lambda path: compress(WEIGHT, bytes=2000, method=Integers()), id="integers"),
    pytest.param(paged, id="pages"),
  ],
)
def test_any_table_is_read_in_decoding(made, tmp_path):
  small = made(tmp_path / "table.safetensors")
  dense = memory()
  variables = randomised(jitted.init(dense, jax.random.key(0), HIDDEN, TOKENS))
  variables["params"]["lookup"]["table"]["weight"] = small.table()
  expected = jitted.apply(dense, variables, HIDDEN, TOKENS)
  table, own = small.to_embedding()
  layer = NGramMemory(NGramEmbedding(HASH, table), DIM, streams=STREAMS)
  del variables["params"]["lookup"]
  for collection, tree in own.items():
    variables.setdefault(collection, {})["lookup"] = {"table": tree}
  cache, found = layer.cache(2), []
  for part in (slice(0, 10), slice(10, 11)):
    added, cache = jitted.apply(
      layer, variables, HIDDEN[:, part], TOKENS[:, part], cache, method="step"
    )
    found.append(added)
  np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_it_begins_without_its_convolution_and_all_its_parameters_have_gradients():
  layer = memory()
  variables = jitted.init(layer, jax.random.key(0), HIDDEN, TOKENS)
  assert not variables["params"]["filters"].any()
  variables = randomised(variables)
  loss = lambda params: jnp.square(layer.apply({"params": params}, HIDDEN, TOKENS)).sum()
  gradient = jax.jit(jax.grad(loss))(variables["params"])
  assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(gradient))
  assert layer.size().params == sum(x.size for x in jax.tree.leaves(variables))


def test_a_memory_without_a_table_adds_the_same_for_vectors_that_are_given():
  layer = memory()
  variables = randomised(jitted.init(layer, jax.random.key(0), HIDDEN, TOKENS))
  expected = jitted.apply(layer, variables, HIDDEN, TOKENS)
  params = dict(variables["params"])
  table = params.pop("lookup")["table"]["weight"]
  vectors = table[HASH(TOKENS)].reshape(2, 11, -1)
  without = layer.clone(has_table=False)
  found = jitted.apply(without, {"params": params}, HIDDEN, TOKENS, vectors)
  np.testing.assert_array_equal(found, expected)
  assert without.size().params == layer.size().params - table.size
  in_nnx = layers.from_linen(without, {"params": params})
  found = nnx.jit(lambda layer: layer(HIDDEN, TOKENS, vectors))(in_nnx)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_nnx_adds_the_same():
  linen = memory()
  variables = randomised(jitted.init(linen, jax.random.key(0), HIDDEN, TOKENS))
  layer = layers.from_linen(linen, variables)
  count = np.array([4, 11])
  step = lambda layer: layer.step(HIDDEN, TOKENS, layer.cache(2), count=count)
  both = nnx.jit(lambda layer: (step(layer), layer.loss_terms(HIDDEN, TOKENS)[0]))
  (added, cache), of_training = both(layer)
  expected = jitted.apply(linen, variables, HIDDEN, TOKENS)
  np.testing.assert_allclose(added, expected, atol=1e-6)
  np.testing.assert_array_equal(cache.tokens, [TOKENS[0, 2:4], TOKENS[1, 9:]])
  np.testing.assert_allclose(of_training, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: NGramEmbedding(HASH, DenseEmbedding(7, 4)).size(), rf"DenseEmbedding\({HASH.rows}, 4"),
    (lambda: memory().clone(kernel=0).size(), "`kernel` must be at least 1; got 0"),
    (
      lambda: memory().init(jax.random.key(0), HIDDEN[..., 1:], TOKENS),
      r"`hidden` must be \(2, 11, 24\)",
    ),
    (
      lambda: memory().init(jax.random.key(0), HIDDEN, TOKENS, HIDDEN),
      "`vectors` must be given where .* got vectors and has_table=True",
    ),
    (
      lambda: memory().clone(has_table=False).init(jax.random.key(0), HIDDEN, TOKENS, HIDDEN),
      r"`vectors` must be \(2, 11, 16\), 4 rows of 4 for each token; got \(2, 11, 24\)",
    ),
  ],
)
def test_what_does_not_fit_is_refused_by_name(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_memory_adds_what_transformers_adds():
  modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
  configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
  config = configuration.Qwen4ExpTextConfig(
    vocab_size=VOCAB,
    hidden_size=DIM,
    hc_count=STREAMS,
    eos_token_id=END,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    ple_embed_dim=16,
  )
  torch = pytest.importorskip("torch")
  torch.manual_seed(0)
  theirs = modeling.Qwen4ExpTextPLELayer(config, 0, 0)
  for parameter in theirs.parameters():
    torch.nn.init.normal_(parameter, std=0.5)
  array = lambda x: x.detach().numpy()
  params = {
    "lookup": {"table": {"weight": array(theirs.ple_embedding.ngram_embedding.weight)}},
    "key": array(theirs.key_proj.weight).T,
    "value": array(theirs.value_proj.weight).T,
    "key_scale": 1 + array(theirs.norm_key.weight),
    "query_scale": 1 + array(theirs.norm_query.weight),
    "convolved_scale": 1 + array(theirs.norm_conv.weight),
    "filters": array(theirs.conv1d.weight)[:, 0].T,
  }
  rows = len(params["lookup"]["table"]["weight"])
  of = XorHash.qwen4(VOCAB, END, heads=2, least=50, seed=config.seed)
  layer = NGramMemory(
    NGramEmbedding(of, DenseEmbedding(rows, 4)),
    DIM,
    streams=config.hc_count,
    epsilon=config.rms_norm_eps,
  )
  expected = array(theirs(torch.tensor(HIDDEN), torch.tensor(TOKENS), None))
  found = jitted.apply(layer, {"params": params}, HIDDEN, TOKENS)
  np.testing.assert_allclose(found, expected, atol=1e-5)
