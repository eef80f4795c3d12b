"""Low-rank, product-quantised and scalar-quantised embeddings keep the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jitted
from tests.embeddings.quantized import vectors_of
from vqjax import DenseHead, convert
from vqjax.embeddings import (
  Int8Embedding,
  ScalarEmbedding,
  table_file,
)
from vqjax.embeddings.scalar import scalar_levels

V, D = 29, 12
TABLE = np.random.default_rng(3).normal(size=(V, D)).astype(np.float32)


def of_levels(levels, low, high):
  params = {"low": np.float32(low), "high": np.float32(high)}
  return {"params": params, "codes": {"levels": levels}}


def table_of(embedding, variables):
  return np.asarray(jitted.apply(embedding, variables, method="table"))


def test_levels_of_8_bits_are_at_most_half_a_step_off_and_score_where_they_lie():
  embedding, given = Int8Embedding(V, D, 4), TABLE.copy()
  given[3] = 0
  given[5, 4:8] = 0
  variables = convert.to_int8(embedding, given)
  found = table_of(embedding, variables)
  step = np.abs(given.reshape(V, -1, 4)).max(axis=-1).repeat(4, axis=1) / 127
  assert (np.abs(found - given) <= step / 2 * (1 + 1e-3)).all()
  assert not np.abs(found[3]).any()
  head = DenseHead(V, D, embedding=embedding)
  tied = {name: {"embedding": tree} for name, tree in variables.items()}
  hidden = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)

  @jax.jit
  def run(tied, hidden):
    best = head.apply(tied, hidden, 3, method="top_k")[1]
    return head.apply(tied, hidden, method="logits"), best

  logits, best = run(tied, hidden)
  scores = np.float64(hidden) @ np.float64(found).T
  np.testing.assert_allclose(logits, scores, atol=1e-5)
  np.testing.assert_array_equal(best, np.argsort(-scores)[:, :3])


def test_a_constant_table_has_one_level():
  levels, low, high = scalar_levels(np.full((3, 2), 4.0), 8)
  assert (levels == 0).all()
  assert low == high == 4.0


def test_a_table_that_is_not_finite_is_refused():
  with pytest.raises(ValueError, match="`table` must be finite"):
    scalar_levels(np.array([[1.0, np.nan]]), 8)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("bits", [1, 3, 8, 9, 12, 16])
def test_levels_are_packed_at_their_bits_and_read_back(bits, tmp_path):
  vocab, dim = 101, 7
  embedding = ScalarEmbedding(vocab, dim, bits)
  rows = np.random.default_rng(0).normal(size=(vocab, dim))
  levels, low, high = scalar_levels(rows, bits)
  variables = of_levels(levels, low, high)
  compact = embedding.compact(variables)
  assert compact.data.nbytes == -(-vocab * dim * bits // 8)
  assert embedding.inference_size().state_bytes == compact.nbytes
  compact.save(tmp_path / "small.safetensors")
  read = table_file.open_table(tmp_path / "small.safetensors")
  np.testing.assert_array_equal(read.codes_of(np.arange(vocab)), levels)
  # Not compiled as a whole, where a product and its sum may be rounded at once.
  wanted = np.asarray(embedding.apply(variables, method="table"))
  np.testing.assert_array_equal(read[np.arange(vocab)], wanted)
  np.testing.assert_array_equal(vectors_of(compact, np.arange(vocab)), wanted)
  assert np.abs(wanted - rows).max() <= (high - low) / (2**bits - 1) / 2 * (1 + 1e-2)


def test_levels_of_a_bfloat16_table_are_those_of_its_float32_copy():
  rows = np.random.default_rng(0).normal(size=(V, D)).astype(jnp.bfloat16)
  for mine, wanted in zip(scalar_levels(rows, 8), scalar_levels(rows.astype(np.float32), 8)):
    np.testing.assert_array_equal(mine, wanted)
