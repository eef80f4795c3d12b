"""Heads and embeddings of packed rows keep the contract and read the bits that were written."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import reference
from tests.contract import HeadContract
from tests.jitted import results, run
from vqjax.embeddings import PackedEmbedding
from vqjax.heads import PackedHead
from vqjax.ops import trellis
from vqjax.tables import packing

V, D = 29, 12


def uneven(row_groups, dim):
  """Widths of 0 to 8 bits, wide and narrow ones mixed."""
  return np.arange(row_groups * dim).reshape(row_groups, dim) * 7 % 9


def units(sizes, width):
  return 1 + int((sizes * -(-width.sum(axis=1) // 16)).sum())


def make(vocab, dim, **fields):
  """A head with three row groups, of which the last has one row."""
  sizes = np.array([vocab // 3, vocab - vocab // 3 - 1, 1])
  fields |= {"size_init": lambda v, c: sizes, "width_init": uneven}
  return PackedHead(vocab, dim, 3, units(sizes, uneven(3, dim)), **fields)


def bits_of(stream):
  """The stream as a list of bits."""
  return [int(word) >> (15 - i) & 1 for word in stream for i in range(16)]


@functools.cache
def quantiles():
  """The values of the states, from the bijections and SciPy's quantiles."""
  state = np.arange(4096)
  for factor in (3077, 1009, 2221):
    state = (state * factor + 3512) % 4096
    state ^= state >> 6
  assert len(set(state)) == 4096
  return scipy.stats.norm.ppf((state + 0.5) / 4096)


@functools.cache
def written(stream, sizes, widths, is_trellis):
  """What the bits say of the rows: class of each [V], and its values before the scale [V, D]."""
  bits, value = bits_of(stream), quantiles()
  at, row_groups, values = 16, [], []
  for of_group, (size, width) in enumerate(zip(sizes, widths)):
    for _ in range(size):
      y, state, own = np.zeros(len(width)), 0, at
      for j in sorted(range(len(width)), key=lambda j: -width[j]):
        for _ in range(width[j]):
          state = (state * 2 + bits[own]) % 4096
          own += 1
        if width[j] and is_trellis:
          y[j] = value[state]
        elif width[j]:
          y[j] = scipy.stats.norm.ppf((state % 2 ** width[j] + 0.5) / 2 ** width[j])
      row_groups.append(of_group)
      values.append(y)
      at += -(-sum(width) // 16) * 16
  return np.array(row_groups), np.stack(values)


def rows(params, codes, is_trellis=True):
  """The rows [V, D], bit by bit in float64."""
  stream, sizes = (tuple(np.asarray(codes[name], int).tolist()) for name in ("stream", "size"))
  widths = tuple(map(tuple, np.asarray(codes["width"], int).tolist()))
  of_group, values = written(stream, sizes, widths, is_trellis)
  scale, center = (np.asarray(params[name], np.float64)[of_group] for name in ("scale", "center"))
  rank = codes.get("rank", np.arange(len(values)))
  return (center + scale * values)[rank] @ np.asarray(params["inverse"], np.float64)


class TestQuantizedHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: make(v, d, use_bias=True),
    "levels in order": lambda v, d: make(v, d, is_ranked=False, is_trellis=False),
    "tied": lambda v, d: PackedHead(v, d, embedding=PackedEmbedding(v, d, 2), softcap=3.0),
  }

  # A sum near the middle of two numbers may be rounded to the other: a part of 2^-8 of a product.
  bfloat16_tolerance = 2e-2

  def reference_logits(self, head, variables, hidden, rounded=lambda x: x):
    params, codes = (
      tree["embedding"] if head.embedding is not None else tree
      for tree in (variables["params"], variables["codes"])
    )
    of_rows = rounded(rows(params | {"inverse": np.eye(self.dim)}, codes, head.is_trellis))
    scores = rounded(hidden @ rounded(params["inverse"]).T) @ of_rows.T
    scores = scores + variables["params"].get("bias", 0.0)
    return scores if head.softcap is None else head.softcap * np.tanh(scores / head.softcap)

  def bfloat16_logits(self, head, variables, hidden):
    """The hidden vectors are rounded again in the coordinates, and so are the rows."""
    return self.reference_logits(head, variables, hidden, reference.in_bfloat16)


def test_a_lookup_is_a_row_of_the_table_and_nan_outside():
  embedding = PackedEmbedding(V, D, 3, width_init=uneven, units=1000)
  variables = results(lambda: embedding.init(jax.random.key(0), jnp.zeros(1, jnp.int32)))
  variables["codes"]["rank"] = np.random.default_rng(0).permutation(V).astype(np.uint8)
  expected = rows(variables["params"], variables["codes"])
  tokens = np.array([[0, V - 1, -1], [7, V, 7]])
  found, table = run(embedding, variables, lambda own, tokens: (own(tokens), own.table()), tokens)
  np.testing.assert_allclose(found[0, :2], expected[[0, V - 1]], atol=1e-5)
  np.testing.assert_allclose(found[1, ::2], expected[[7, 7]], atol=1e-5)
  assert np.isnan(found[0, 2]).all()
  assert np.isnan(found[1, 1]).all()
  np.testing.assert_allclose(table, expected, atol=1e-5)
  leaves = jax.tree.leaves(variables)
  assert embedding.size().state_bytes == sum(x.nbytes for x in leaves)


def best_of_all(x, weight, width):
  """The least cost over all strings of bits, by brute force."""
  value, total = quantiles(), int(sum(width))
  costs = []
  for string in range(2**total):
    state, cost, left = 0, 0.0, total
    for j, bits in enumerate(width):
      left -= bits
      state = (string >> left) % 4096
      cost += weight[j] * (x[j] - value[state]) ** 2 if bits else 0.0
    costs.append(cost)
  return min(costs)


def test_the_best_path_costs_as_little_as_brute_force_finds():
  rng = np.random.default_rng(1)
  width = np.array([3, 2, 2, 1, 1, 0])
  x, weight = rng.normal(size=(5, 6)), rng.uniform(0.5, 2, size=6)
  state = np.asarray(trellis.best_states(*map(np.float32, (x, weight)), width))
  error = np.where(width, (x - quantiles()[state]) ** 2, 0)
  expected = [best_of_all(row, weight, width) for row in x]
  np.testing.assert_allclose((weight * error).sum(axis=1), expected, rtol=1e-5)


def test_packed_states_are_read_back():
  width = np.array([[5, 0, 8, 1, 3]])
  columns = np.argsort(-width[0], kind="stable")[:4]
  x = np.random.default_rng(0).standard_normal((7, 4), np.float32)
  state = np.asarray(trellis.best_states(x, np.ones(4, np.float32), width[0, columns]))
  units = trellis.stream_units(state, width[0, columns])
  stream = np.concatenate([np.zeros(1, np.uint16), np.asarray(units).reshape(-1)])

  def read(stream, width):
    unit, of_group = trellis.row_starts(jnp.arange(7), jnp.array([7]), width)
    return trellis.states(stream, unit, trellis.ends(width)[of_group])

  np.testing.assert_array_equal(results(read, stream, width)[:, columns], state)


@pytest.mark.parametrize(("width", "left"), [(1, 0.31), (2, 0.086), (3, 0.023), (8, 6e-5)])
def test_a_code_leaves_the_variance_that_it_states(width, left):
  # The best 2, 4 and 8 levels leave 0.363, 0.1175 and 0.0345; QTIP's 2^16 states 0.069 at 2 bits.
  x = np.random.default_rng(0).standard_normal((32, 200), np.float32)
  spread = {1: 0.9, 2: 1.0, 3: 1.05, 8: 1.45}[width]
  state = np.asarray(
    trellis.best_states(np.float32(x / spread), np.ones(200, np.float32), np.full(200, width))
  )
  assert ((x - spread * np.asarray(trellis.values())[state]) ** 2).mean() < left


def test_nearest_levels_are_the_nearest():
  width = np.array([0, 1, 3, 8])
  x = np.random.default_rng(0).normal(size=(50, 4))
  place = trellis.nearest_levels(x, width)
  for j, bits in enumerate(width):
    level = scipy.stats.norm.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    np.testing.assert_array_equal(place[:, j] - 2**bits, abs(x[:, j, None] - level).argmin(axis=1))
    np.testing.assert_allclose(
      trellis.level_values()[place[:, j]], level[place[:, j] - 2**bits], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(("width", "best"), [(1, 0.3634), (2, 0.1175), (4, 0.009497)])
def test_levels_leave_about_what_the_best_levels_do(width, best):
  # Max, Quantizing for minimum distortion, 1960, Table I.
  x = scipy.stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)[:, None]
  spread = packing.LEVELS.spread[width]
  place = trellis.nearest_levels(x / spread, np.array([width]))
  left = ((x - spread * trellis.level_values()[place]) ** 2).mean()
  assert left == pytest.approx(packing.LEVELS.left[width], rel=0.01)
  assert left < 1.04 * best
