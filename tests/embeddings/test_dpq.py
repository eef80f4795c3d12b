"""Does a DPQ embedding train as its quantiser says, and ship as what it evaluates to?"""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax import DenseHead, DPQEmbedding
from vqjax.embeddings import compact_file
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.ops import packing
from vqjax.quantizers import CentroidQuantizer, MovingAverage, Revival, SoftmaxQuantizer
from vqjax.sharding import MeshShape, make_mesh

V, D, K, M = 53, 12, 6, 3

QUANTIZERS = {
  "sx": SoftmaxQuantizer(K, M, D),
  "sx shared": SoftmaxQuantizer(K, M, D, shared=True),
  "sx additive": SoftmaxQuantizer(K, 5, D, additive=True),
  "sx narrow": SoftmaxQuantizer(K, M, 6, value_dim=D),
  "vq": CentroidQuantizer(K, M, D),
  "vq averages": CentroidQuantizer(K, M, D, moving_average=MovingAverage()),
  "vq revived": CentroidQuantizer(K, M, D, revival=Revival(0.9, decay=0.1)),
}

TRAINING = {
  "method": "loss_terms",
  "mutable": ["batch_stats", "centroids", "revival"],
  "rngs": {"sample": jax.random.key(6)},
}


@pytest.fixture(params=QUANTIZERS)
def embedding(request):
  return DPQEmbedding(V, D, QUANTIZERS[request.param])


@pytest.fixture
def variables(embedding):
  """After a training batch, so that statistics are not those of the start."""
  fresh = embedding.init(jax.random.key(0), jnp.arange(5))
  _, written = embedding.apply(fresh, jnp.arange(40), False, **TRAINING)
  return fresh | written


def test_vectors_are_those_of_the_quantised_rows(embedding, variables):
  tokens = jnp.array([[7, 0, 52], [7, 7, 1]])
  found = embedding.apply(variables, tokens)
  np.testing.assert_array_equal(found, embedding.apply(variables, method="table")[tokens])
  inner = {name: tree["quantizer"] for name, tree in variables.items() if "quantizer" in tree}
  row = variables["params"]["query"][tokens]
  expected = embedding.quantizer.apply(inner, row)
  np.testing.assert_array_equal(found, expected)


def test_tokens_outside_the_vocabulary_are_nan_and_count_nowhere(embedding, variables):
  found = embedding.apply(variables, jnp.array([3, V, -1]))
  assert np.isfinite(found[0]).all()
  assert np.isnan(found[1:]).all()
  train = lambda tokens: embedding.apply(variables, tokens, False, **TRAINING)
  (_, terms), written = train(jnp.array([3, V, 4, -1]))
  (_, wanted), same = train(jnp.array([3, 4]))
  for tree in (written, same):  # the vectors that are drawn depend on how many there are
    tree.get("revival", {"quantizer": {}})["quantizer"].pop("offset", None)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (terms, written), (wanted, same)
  )


def test_a_batch_reads_its_own_rows_alone(embedding):
  big = embedding.clone(vocab=100_003)
  tokens = jnp.arange(8)
  variables = jax.eval_shape(lambda: big.init(jax.random.key(0), tokens))
  apply = jax.jit(lambda v: big.apply(v, tokens))
  memory = apply.lower(variables).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 100_003 * 4


def test_size_and_axes_are_those_of_the_variables(embedding):
  variables = embedding.init(jax.random.key(0), jnp.arange(5))
  assert embedding.size().params == sum(x.size for x in jax.tree.leaves(variables["params"]))
  assert embedding.size().state_bytes == sum(x.nbytes for x in jax.tree.leaves(variables))
  ranks = jax.tree.map(lambda x: x.ndim, variables)
  axes = embedding.logical_axes()
  assert jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple)) == ranks


def test_on_a_mesh_a_training_step_is_that_of_one_device(embedding, variables):
  spread = embedding.clone(vocab_axis="model")
  tokens = jnp.arange(32).reshape(8, 4) * 7 % V

  def step(embedding):
    def loss(params):
      (vectors, terms), written = embedding.apply(
        variables | {"params": params}, tokens, False, **TRAINING
      )
      return (vectors**2).sum() + sum(terms.values(), 0.0), written

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

  expected = jax.device_get(step(embedding))
  with jax.set_mesh(make_mesh(MeshShape(data=2, model=4))):
    found = jax.device_get(step(spread))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_a_head_that_shares_the_codes_scores_with_the_quantised_rows(embedding, variables):
  head = DenseHead(V, D, embedding=embedding)
  own = {name: {"embedding": tree} for name, tree in variables.items()}
  hidden = jax.random.normal(jax.random.key(4), (9, D))
  tokens = jnp.arange(9) * 5
  found = head.apply(own, hidden, tokens, method="log_prob")
  table = np.asarray(embedding.apply(variables, method="table"), np.float64)
  expected = reference.log_softmax(np.asarray(hidden, np.float64) @ table.T)
  np.testing.assert_allclose(found, expected[np.arange(9), tokens], atol=1e-5)
  loss = lambda p: head.apply(own | {"params": p}, hidden, tokens, method="log_prob").mean()
  gradient = jax.grad(loss)(own["params"])["embedding"]
  assert np.any(gradient["query"])


def test_what_ships_is_the_evaluation_bit_for_bit(embedding, variables, tmp_path):
  tokens = jnp.arange(V).reshape(1, V)
  compact = embedding.compact(variables)
  expected = np.asarray(embedding.apply(variables, tokens))
  np.testing.assert_array_equal(jax.jit(compact.__call__)(tokens), expected)
  file = tmp_path / "embedding.safetensors"
  compact.save(file)
  np.testing.assert_array_equal(CompactEmbedding.load(file)(tokens), expected)
  with_numpy = compact_file.open_compact(file)[np.asarray(tokens)]
  if embedding.quantizer.additive:
    # NumPy may add in another order.
    np.testing.assert_allclose(with_numpy, expected, atol=1e-6)
  else:
    np.testing.assert_array_equal(with_numpy, expected)


def test_the_file_has_codes_and_values_and_nothing_else(embedding, variables, tmp_path):
  file = tmp_path / "embedding.safetensors"
  compact = embedding.compact(variables)
  compact.save(file)
  q = embedding.quantizer
  header = int.from_bytes(file.read_bytes()[:8], "little")
  # Eq. in Appendix E.2 where tables are shared; additive ones have whole vectors.
  tables = 1 / M if q.shared else q.subspaces if q.additive else 1
  values = int(K * D * tables)
  codes = -(-V * q.subspaces * 3 // 8)
  assert file.stat().st_size == 8 + header + codes + 4 * values
  assert compact.nbytes == codes + 4 * values
  meta = json.loads(file.read_bytes()[8 : 8 + header])["__metadata__"]
  assert {meta[key] for key in "V"} == {str(V)}
  assert (meta["d"], meta["K"], meta["M"]) == (str(D), str(K), str(q.subspaces))


def test_the_ratio_is_that_of_the_paper():
  """Table 4, small: 85.5 for K=8 and 25 shared subspaces, 51.1 for K=32; it counts d + 1 for d."""
  for codes, printed in ((8, 85.5), (32, 51.1)):
    compact = CompactEmbedding(
      data=np.zeros(packing.packed_bytes(10_000, 25, packing.bits_for(codes)), np.uint8),
      values=np.zeros((1, codes, 8), np.float32),
      vocab=10_000,
      dim=200,
      codes=codes,
      subspaces=25,
      additive=False,
    )
    np.testing.assert_allclose(compact.compression_ratio() * 201 / 200, printed, atol=0.05)


def test_the_reader_needs_numpy_alone(embedding, variables, tmp_path):
  file = tmp_path / "embedding.safetensors"
  embedding.compact(variables).save(file)
  copied = tmp_path / "reader.py"
  copied.write_text(pathlib.Path(compact_file.__file__).read_text())
  script = (
    "import sys; sys.modules['jax'] = sys.modules['safetensors'] = None\n"
    "import numpy, reader\n"
    f"table = reader.open_compact({str(file)!r})\n"
    "print(table[[3, 0, 52]].sum(), len(table))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  total, count = done.stdout.split()
  expected = np.asarray(embedding.apply(variables, jnp.array([3, 0, 52]))).sum()
  np.testing.assert_allclose(float(total), expected, rtol=1e-5)
  assert int(count) == V


@pytest.fixture
def saved(tmp_path):
  embedding = DPQEmbedding(V, D, QUANTIZERS["vq"])
  file = tmp_path / "embedding.safetensors"
  embedding.compact(embedding.init(jax.random.key(0), jnp.arange(5))).save(file)
  return file


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_a_truncated_file_is_refused(saved, kept):
  whole = saved.read_bytes()
  saved.write_bytes(whole[:kept])
  with pytest.raises(ValueError, match="truncated"):
    CompactEmbedding.load(saved)


@pytest.mark.parametrize(
  ("old", "new", "said"),
  [
    (b'"version":"1"', b'"version":"2"', "has version '2'"),
    (b'"format":"vqjax-c', b'"format":"other-c', "is no compact embedding"),
    (b'"V":"53"', b'"V":"54"', "bytes of codes where V=54"),
    (b'"d":"12"', b'"d":"15"', "values of shape"),
    (b'"K":"6"', b'"K":"x"', "states K = 'x'"),
  ],
)
def test_a_file_that_contradicts_itself_is_refused(saved, old, new, said):
  whole = saved.read_bytes()
  assert old in whole
  saved.write_bytes(whole.replace(old, new))
  with pytest.raises(ValueError, match=said):
    CompactEmbedding.load(saved)


def test_codes_of_k_and_above_are_refused(saved):
  table = compact_file.open_compact(saved)
  whole = bytearray(saved.read_bytes())
  codes = np.asarray(table.data).tobytes()
  at = bytes(whole).index(codes)
  whole[at : at + len(codes)] = b"\xff" * len(codes)
  saved.write_bytes(bytes(whole))
  with pytest.raises(ValueError, match="codes of 6 or above"):
    CompactEmbedding.load(saved)


def test_tokens_outside_are_nan_in_jax_and_an_error_in_numpy(saved):
  assert np.isnan(CompactEmbedding.load(saved)(jnp.array([V, -1]))).all()
  with pytest.raises(IndexError, match=f"token {V} is outside"):
    compact_file.open_compact(saved)[[V]]


def test_a_quantizer_of_another_width_is_named():
  embedding = DPQEmbedding(V, 10, QUANTIZERS["vq"])
  with pytest.raises(ValueError, match="width 12 in an embedding of dim 10"):
    embedding.init(jax.random.key(0), jnp.arange(3))
