"""Packed tables are near the tables that they are made of, in as many bytes as they may take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests import jitted
from vqjax import PackedEmbedding, PackedHead
from vqjax.sharding import MeshShape, make_mesh
from vqjax.tables import Moments, PackedTable, pack, units_of
from vqjax.tables.packing import allocate, row_group_sizes

V, D = 211, 8


def text(vocab=V, dim=D, seed=0):
  """A table, and moments of hidden states of unequal directions with Zipf's counts."""
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(500, dim)) * np.linspace(0.2, 2, dim)
  counts = rng.permutation((10_000 / np.arange(1, vocab + 1)).astype(int))
  return rng.normal(size=(vocab, dim)), Moments(hidden.T @ hidden / 500, counts, 500)


def cost(table, found, moments):
  error = np.asarray(found, np.float64) - table
  p = moments.counts / moments.counts.sum()
  return (p * np.einsum("vd,de,ve->v", error, moments.hidden, error)).sum()


@pytest.mark.parametrize("is_trellis", [True, False])
def test_head_and_embedding_have_the_rows_and_the_bias(is_trellis):
  table, moments = text()
  packed = pack(table, moments, 1 + V * 2, row_groups=6, is_trellis=is_trellis)
  embedding, variables = packed.embedding()
  found = np.asarray(jitted.apply(embedding, variables, method="table"))
  hidden = np.random.default_rng(0).standard_normal((3, D), np.float32)
  bias = np.linspace(-1, 1, V)
  head, of_head = packed.head(bias)
  logits = jitted.apply(head, of_head, hidden)
  np.testing.assert_allclose(logits, np.asarray(hidden) @ found.T + bias, atol=1e-4)
  fresh = jax.eval_shape(lambda: embedding.init(jax.random.key(0), jnp.zeros(1, jnp.int32)))
  assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, variables)
  # Four bits a number: 0.6 % of the variance and a little for the frequent rows.
  assert cost(table, found, moments) < 0.02 * cost(table, table.mean(axis=0), moments)


@pytest.mark.parametrize("is_trellis", [True, False])
def test_more_bits_err_less_and_frequent_tokens_least(is_trellis):
  table, moments = text()
  made = [pack(table, moments, 1 + V * n, row_groups=6, is_trellis=is_trellis) for n in (1, 2, 3)]
  found = [np.asarray(jitted.apply(*packed.embedding(), method="table")) for packed in made]
  costs = [cost(table, rows, moments) for rows in found]
  assert costs[0] > 2 * costs[1] > 4 * costs[2]
  error = ((found[1] - table) ** 2).sum(axis=1)
  order = np.argsort(-moments.counts)
  assert error[order[:20]].mean() < error[order[-100:]].mean() / 4


@pytest.mark.parametrize(("vocab", "dim"), [(1, 3), (17, 1), (40, 5)])
def test_small_tables_and_equal_rows_keep_their_rows(vocab, dim):
  table = np.broadcast_to(np.linspace(-1, 1, dim), (vocab, dim))
  moments = Moments(np.zeros((dim, dim)), np.r_[3, np.zeros(vocab - 1)], 1)
  packed = pack(table, moments, 1 + vocab, row_groups=min(vocab, 3))
  found = jitted.apply(*packed.embedding(), method="table")
  np.testing.assert_allclose(found, table, atol=2e-3)


class Tied(nn.Module):
  """A language model whose packed embedding is also its head."""

  embedding: PackedEmbedding

  def setup(self):
    self.rows = self.embedding.clone()
    self.head = PackedHead(V, D, embedding=self.rows, vocab_axis="model")

  def hidden(self, tokens):
    return jnp.tanh(self.rows(tokens))

  def __call__(self, tokens):
    return -self.head.log_prob(self.hidden(tokens[:, :-1]), tokens[:, 1:]).mean()

  def best(self, tokens):
    return self.head.top_k(self.hidden(tokens), 5)

  def drawn(self, tokens):
    return self.head.sample(self.hidden(tokens), jax.random.key(0), top_k=1)


def test_a_packed_table_is_embedding_and_head_on_a_mesh():
  table, moments = text()
  embedding, variables = pack(table, moments, 1 + V * 2, row_groups=6, is_trellis=False).embedding()
  model, variables = Tied(embedding), {name: {"rows": tree} for name, tree in variables.items()}
  tokens = np.random.default_rng(1).integers(0, V, (8, 5))
  codes = {"codes": variables["codes"]}
  loss = lambda params: model.apply(codes | {"params": params}, tokens)

  def run(params):
    value, gradient = jax.value_and_grad(loss)(params)
    trained = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradient)
    method = lambda name: model.apply(codes | {"params": params}, tokens, method=name)
    return value, gradient, loss(trained), method("best"), method("drawn")

  expected = jitted.results(run, variables["params"])
  assert expected[2] < expected[0]
  np.testing.assert_array_equal(expected[4], expected[3][1][..., 0])
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    found = jitted.results(run, variables["params"])
  # float32 sums in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_tokens_in_the_order_of_their_counts_have_no_ranks():
  table, moments = text()
  sorted_moments = Moments(moments.hidden, np.sort(moments.counts)[::-1], 500)
  head, variables = pack(table, sorted_moments, 500, row_groups=6).head()
  assert not head.is_ranked
  assert "rank" not in variables["codes"]
  assert pack(table, moments, 500, row_groups=6).is_ranked


def test_the_units_of_a_budget_fill_it():
  table, moments = text()
  budget = 3000
  units = units_of(budget, V, D, 6, others=V * 3)
  head, _ = pack(table, moments, units, row_groups=6).head(np.zeros(V), param_dtype=jnp.float16)
  assert head.size().state_bytes in (budget, budget - 1)
  with pytest.raises(ValueError, match=r"`byte_budget` must be above .* got 400"):
    units_of(400, V, D, 6)


def test_classes_hold_probabilities_within_a_factor_and_enough_rows():
  p = 1 / np.arange(1, 5001)
  size = row_group_sizes(p, 12)
  assert len(size) == 12
  assert size.sum() == 5000
  size = size[size > 0]
  assert size.min() >= 16
  ends = np.cumsum(size)[:-1]
  factors = np.r_[p[0], p[ends]] / np.r_[p[ends - 1], p[-1]]
  assert (factors[size > 16] < 2.1).all()
  assert (row_group_sizes(p, 3) > 0).sum() <= 3
  assert row_group_sizes(np.ones(1), 4).tolist() == [1, 0, 0, 0]


def test_a_table_of_fewer_rows_than_classes_is_scored():
  table = np.linspace(-1, 1, 40).reshape(10, 4)
  units = units_of(4000, 10, 4, 24)
  head, variables = pack(table, Moments(np.eye(4), np.ones(10), 1), units, is_trellis=False).head()
  logits = jitted.apply(head, variables, np.eye(4, dtype=np.float32))
  np.testing.assert_allclose(logits, table.T, atol=0.02)


def test_bits_are_allocated_by_falling_returns_within_the_units():
  cost, size = np.array([[64.0, 4.0, 1.0, 0.0]] * 2) * [[1.0], [0.25]], np.array([10, 50])
  width = allocate(cost, size, 100)
  assert (size * np.ceil(width.sum(axis=1) / 16)).sum() <= 100
  assert (np.diff(width.astype(int), axis=1) <= 0).all()
  assert width[0].sum() >= width[1].sum()


def test_a_packed_table_is_read_from_its_parts_and_refuses_others():
  table, moments = text()
  packed = pack(table, moments, 1 + V * 2, row_groups=6, is_trellis=False)
  parts = packed.parts()
  assert packed.nbytes == sum(part.nbytes for part in parts.values())
  assert packed.nbytes == 2 * (1 + V * 2) + 2 * D * D + 6 * (5 * D + 4) + V + 1
  found = PackedTable.from_parts(parts)
  expected = np.asarray(jitted.apply(*packed.embedding(), method="table"))
  np.testing.assert_allclose(found.table(), expected, atol=1e-6)
  np.testing.assert_allclose(found.rows(100, 103), expected[100:103], atol=1e-6)
  without = {name: part for name, part in parts.items() if name != "width"}
  with pytest.raises(ValueError, match="must have the parts"):
    PackedTable.from_parts(without)
  for name, part in (("stream", parts["stream"][:V]), ("size", parts["size"] + 1)):
    with pytest.raises(ValueError, match="must be those of one"):
      PackedTable.from_parts(parts | {name: part})
