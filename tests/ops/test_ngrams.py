"""Hashes of n-grams: equal bit for bit to integers of any size, and to models that have them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vqjax.ops import ngrams
from vqjax.ops.ngrams import CanonicalHash, PolynomialHash, XorHash

END, VOCAB = 3, 151_936
QWEN = XorHash.qwen4(VOCAB, END, layer=1, heads=2, least=20_000)
HASHES = {
  "qwen4": QWEN,
  "qwen4, published sizes": XorHash.qwen4(248_320, 7, heads=8),
  "engram": XorHash.engram(99_092, [5_000, 7_000, 11], pad=2, layers=(1, 15), layer=15, heads=3),
  "longcat": PolynomialHash(131_072, 4, (6_007, 9_001, 2**30 + 3), pad=1, end=0),
  "pairs, all": PolynomialHash(50, 2, (2_500,)),
}


def text(of, rows=2, length=40):
  rng = np.random.default_rng(0)
  return np.where(
    rng.random((rows, length)) < 0.1, of.pad, rng.integers(0, of.vocab, (rows, length))
  )


def reference(of, row):
  """Ids of a text by Python's integers."""
  found = []
  for i in range(len(row)):
    first = max([j + 1 for j in range(i) if row[j] == of.end], default=0)
    seen = [int(row[i - k]) if i - k >= first else of.pad for k in range(of.order)]
    ids, offset = [], 0
    for head, size in enumerate(of.sizes):
      length = 2 + head // (len(of.sizes) // (of.order - 1))
      if isinstance(of, XorHash):
        number = 0
        for token, multiplier in zip(seen[:length], of.multipliers):
          number ^= token * multiplier
      else:
        number = sum(token * of.vocab**k for k, token in enumerate(seen[:length]))
      ids.append(offset + number % size)
      offset += size
    found.append(ids)
  return np.array(found)


@pytest.mark.parametrize("name", HASHES)
def test_ids_are_those_of_integers_of_any_size_in_numpy_and_in_programs(name):
  of = HASHES[name]
  tokens = text(of)
  expected = np.stack([reference(of, row) for row in tokens])
  np.testing.assert_array_equal(of(tokens), expected)
  found = jax.jit(of)(jnp.asarray(tokens))
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, expected)
  assert expected.max() < of.rows == sum(of.sizes)
  assert expected.shape[-1] == of.heads


@pytest.mark.parametrize("name", ["qwen4", "longcat"])
@pytest.mark.parametrize("parts", [[1] * 7, [2, 5], [0, 7]])
def test_a_text_in_parts_has_the_ids_of_the_whole(name, parts):
  of = HASHES[name]
  tokens = text(of, length=7)
  history = np.concatenate([np.full((2, of.order - 1), of.pad), tokens], axis=-1)
  # What is before a part is known to the last end, as n - 1 tokens are read at most.
  found, start = [], 0
  for size in parts:
    found.append(
      of(tokens[:, start : start + size], previous=history[:, start : start + of.order - 1])
    )
    start += size
  np.testing.assert_array_equal(np.concatenate(found, axis=1), of(tokens))


def test_an_exported_hash_takes_texts_of_any_length():
  (length,) = jax.export.symbolic_shape("length")
  shape = jax.ShapeDtypeStruct((2, length), jnp.int32)
  exported = jax.export.export(jax.jit(QWEN))(shape)
  tokens = text(QWEN, length=9).astype(np.int32)
  np.testing.assert_array_equal(exported.call(tokens), QWEN(tokens))


def test_a_token_outside_the_vocabulary_has_no_row_and_numpy_says_which():
  tokens = np.array([5, 6, VOCAB, 8, 9, 10, 2**31 - 1])
  ids = np.asarray(jax.jit(QWEN)(jnp.asarray(tokens)))
  assert ((ids == -1).all(axis=-1) == [False, False, True, True, True, False, True]).all()
  with pytest.raises(ValueError, match=f"got {VOCAB}"):
    QWEN(tokens)


def test_a_table_is_read_by_the_share_that_the_readings_say():
  of = PolynomialHash(4, 2, (16, 3))
  whole, small = ngrams.readings(of, np.array([0, 0, 1, 1, 2, 2, 3, 3]))
  assert whole.ngrams == whole.used == 7
  assert whole.shared == 0
  assert whole.entropy == pytest.approx(math.log2(8) - 2 * 2 / 8 / 2)
  assert small.used <= 3
  assert small.shared >= 5
  # Two texts, of which the second begins after `pad` and not after the first.
  assert ngrams.readings(of, np.array([[0, 1], [0, 2]]))[0].used == 3
  assert str(ngrams.readings(of, np.array([1]))[0].entropy) == "0.0"


def test_tokens_that_read_alike_have_the_rows_of_their_canonical_id():
  ids = np.arange(40) % 7
  of = CanonicalHash(XorHash.engram(7, [101, 53], pad=4, heads=2), tuple(ids.tolist()))
  assert (of.vocab, of.pad, of.rows, of.order) == (40, 4, of.hash.rows, 3)
  tokens = text(of)
  expected = of.hash(ids[tokens])
  np.testing.assert_array_equal(of(tokens), expected)
  np.testing.assert_array_equal(jax.jit(of)(jnp.asarray(tokens)), expected)
  np.testing.assert_array_equal(of(tokens[:, 5:], previous=tokens[:, 3:5]), expected[:, 5:])
  unknown = np.asarray(jax.jit(of)(jnp.array([1, 40, 2, 3, 4])))
  assert ((unknown == -1).all(axis=-1) == [False, True, True, True, False]).all()
  with pytest.raises(ValueError, match="got 40"):
    of(np.array([40]))
  assert ngrams.readings(of, tokens) == ngrams.readings(of.hash, ids[tokens])
  same = CanonicalHash(of.hash, of.ids)
  assert (same, hash(same)) == (of, hash(of))
  assert same != CanonicalHash(of.hash, of.ids[::-1])


def test_canonical_ids_are_sharded_as_their_tokens():
  of = CanonicalHash(PolynomialHash(3, 2, (7,)), (0, 1, 2, 1))
  with jax.set_mesh(jax.make_mesh((2,), ("data",), (AxisType.Explicit,))):
    tokens = jax.device_put(jnp.array([[1, 3], [4, 0]]), P("data"))
    found = jax.jit(of.canonical)(tokens)
  assert jax.typeof(found).sharding.spec == P("data", None)
  np.testing.assert_array_equal(found, [[1, 1], [-1, 0]])


@pytest.mark.untyped
@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: CanonicalHash(QWEN, np.ones(3)), r"of all tokens, \[V\]; got float64 \(3,\)"),
    (lambda: CanonicalHash(PolynomialHash(5, 2, (7,)), [0, 5]), r"vocab=6"),
    (lambda: CanonicalHash(PolynomialHash(5, 2, (7,)), [1, 4]), "`pad`, 0; no token has it"),
    (lambda: PolynomialHash(10, 1, (5,)), "at least 2 tokens; got 1"),
    (lambda: PolynomialHash(10, 3, (5, 7, 11)), "multiple of 2"),
    (lambda: PolynomialHash(10, 2, (7.5,)), r"integers of at least 2, .* got \(7\.5,\)"),
    (lambda: XorHash.qwen4(10, 0, heads=1, least=1), r"`least` must be whole .* got 1\."),
    (lambda: XorHash.qwen4(10, 0, heads=1, least=7, layer=-1), "`layer` must be .* got -1"),
    (
      lambda: XorHash.qwen4(10, None, heads=1, least=7),
      r"`end` must be a token .* got None\. Give",
    ),
    (lambda: XorHash.engram(9, [5, 0], pad=0), r"`sizes` must be whole .* got 0\."),
    (lambda: ngrams.count_rows(QWEN, [1, 2]), r"a text \[T\], or several; got the number 1"),
    (lambda: PolynomialHash(10, 2, (2**31,)), "Ids of rows are int32"),
    (lambda: PolynomialHash(10, 2, (7,), pad=10), "`pad` must be a token"),
    (lambda: XorHash(2**20, (2**50, 1), (7,)), "products with tokens"),
    (lambda: XorHash.engram(9, [5], pad=0, layers=(1,), layer=2), "one of `layers`"),
    (lambda: QWEN(np.ones(3)), "must be integers"),
    (lambda: QWEN(np.ones((2, 3), int), np.ones((2, 1), int)), r"integers \(2, 2\)"),
  ],
)
def test_what_is_no_hash_is_refused_by_name(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_ids_are_those_of_transformers():
  modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
  configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
  config = configuration.Qwen4ExpTextConfig(
    vocab_size=VOCAB,
    eos_token_id=END,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=20_000,
    ple_embed_dim=16,
  )
  theirs = modeling.Qwen4ExpTextNGramEmbedding(config, 16, 0, ple_layer_index=1)
  of = XorHash.qwen4(VOCAB, END, layer=1, heads=2, least=20_000, seed=config.seed)
  assert of.multipliers == tuple(theirs.layer_multipliers.tolist())
  assert of.sizes == tuple(theirs.head_vocab_sizes)
  tokens = text(of)
  torch = pytest.importorskip("torch")
  # A table whose rows are their numbers.
  table = torch.arange(theirs.ngram_embedding.weight.shape[0]).float()
  theirs.ngram_embedding.weight.data = table[:, None].repeat(1, 4)
  found = theirs(torch.tensor(tokens), None).detach().numpy().reshape(*tokens.shape, of.heads, 4)
  np.testing.assert_array_equal(of(tokens), found[..., 0])
