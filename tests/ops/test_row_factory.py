"""Tests of composed rows against a weight that exists as an array."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.ops.exact import normals
from vqjax import ScoreOptions, linear_soft_target_loss, linear_softmax
from vqjax.ops import product, softmax
from vqjax.ops.row_factory import RowFactory, as_row_factory
from vqjax.sharding import MeshShape, make_mesh

V, D, N, M, K = 67, 12, 29, 3, 7


def operands():
  """tables, codes, hidden, tokens and bias."""
  rng = np.random.default_rng(1)
  codes, tokens = rng.integers(0, K, (V, M)), rng.integers(0, V, N)
  tables, hidden, bias = normals(0, (M, K, D // M), (N, D), (V,))
  return tables, codes.astype(np.int32), hidden, tokens, bias


def everything(hidden, weight, tokens, bias, **options):
  """A number from all that the pass tells."""
  found = linear_softmax(
    hidden, weight, tokens, bias, entropy=True, mean=True, top_k=3, softcap=9.0, **options
  )
  return sum((i + 1.0) * x.mean() for i, x in enumerate(found[:5]))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(8, 16), (64, 128), (5, 67)])
def test_value_and_gradients_are_those_of_the_composed_weight(tile):
  tables, codes, hidden, tokens, bias = operands()
  by_rows = lambda h, t, b: everything(
    h, RowFactory(codes, t, product.compose), tokens, b, tile=tile
  )
  whole = lambda h, t, b: everything(h, product.compose(codes, t), tokens, b, tile=tile)
  found, expected = (
    jax.jit(jax.value_and_grad(f, (0, 1, 2)))(hidden, tables, bias) for f in (by_rows, whole)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


@pytest.mark.slow
def test_bfloat16_tables_on_a_mesh_get_the_gradient_of_one_device():
  tables, codes, hidden, tokens, bias = operands()
  tables = tables.astype(jnp.bfloat16)
  loss = lambda t: linear_softmax(
    hidden, RowFactory(codes, t, product.compose), tokens, bias, vocab_axis="model"
  ).log_prob.mean()
  expected = jax.jit(jax.grad(loss))(tables)
  with jax.set_mesh(make_mesh(MeshShape(1, 1, 8))):
    found = jax.device_get(jax.jit(jax.grad(loss))(tables))
  assert found.dtype == jnp.bfloat16
  wide = [np.asarray(x, np.float32) for x in (found, expected)]
  # RowFactory' gradients are rounded to 2^-9, and their sum perhaps to neighbours, 2^-7 apart.
  np.testing.assert_allclose(*wide, rtol=2**-6, atol=2**-9 * abs(wide[1]).max())


@pytest.mark.slow
@pytest.mark.parametrize("tile", [(29, 2003), (29, 64)])
def test_bfloat16_tables_that_many_rows_share_get_their_whole_gradient(tile):
  vocab, codes = 2003, 2
  tables, hidden = (x.astype(jnp.bfloat16) for x in normals(2, (M, codes, D // M), (N, D)))
  table = np.random.default_rng(3).integers(0, codes, (vocab, M))
  tokens = np.arange(N) * 61
  loss = lambda t: linear_softmax(
    hidden, RowFactory(table, t, product.compose), tokens, tile=tile
  ).log_prob.sum()
  found = jax.jit(jax.grad(loss))(tables)
  rows = tables[np.arange(M), table].reshape(vocab, D)
  h = np.asarray(hidden, np.float64)
  _, d_rows, _ = reference.linear_gradients(h, rows, tokens, np.ones(N))
  expected = np.zeros(tables.shape)
  for row, code in zip(d_rows.reshape(vocab, M, -1), table):
    expected[np.arange(M), code] += row
  assert found.dtype == jnp.bfloat16
  # Each cotangent of a score is rounded to 2^-9 of itself; a sum in bfloat16 is off by a half.
  off = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
  assert off < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("student_is_composed", [True, False])
def test_distillation_from_and_to_composed_rows(student_is_composed):
  tables, codes, hidden, _, bias = operands()
  (other,) = normals(7, (V, D))

  def loss(weight, hidden, tables, other):
    pair = (weight(tables), other) if student_is_composed else (other, weight(tables))
    return linear_soft_target_loss(
      hidden, pair[0], hidden[::-1], pair[1], bias, options=ScoreOptions(tile=(8, 16))
    ).kl.mean()

  run = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
  found = run(lambda t: RowFactory(codes, t, product.compose), hidden, tables, other)
  expected = run(lambda t: product.compose(codes, t), hidden, tables, other)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


def test_no_array_of_the_size_of_the_weight_is_needed():
  vocab, dim, subspaces, codes, tokens = 65_536, 256, 32, 256, 512
  shape = jax.ShapeDtypeStruct
  tables = shape((subspaces, codes, dim // subspaces), jnp.float32)
  table = shape((vocab, subspaces), jnp.uint8)
  hidden, target = shape((tokens, dim), jnp.float32), shape((tokens,), jnp.int32)
  loss = lambda h, t, c, y: linear_softmax(h, RowFactory(c, t, product.compose), y).log_prob.mean()
  compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, tables, table, target).compile()
  whole = 4 * vocab * dim
  assert compiled.memory_analysis().temp_size_in_bytes < whole / 4


def test_frozen_shared_arrays_get_no_gradient_and_codes_none():
  tables, codes, hidden, tokens, _ = operands()

  @jax.jit
  def run(hidden, codes, tables):
    log_prob = lambda h, rows: linear_softmax(h, rows, tokens).log_prob.sum()
    rows = RowFactory(codes, jax.lax.stop_gradient(tables), product.compose)
    return jax.grad(log_prob)(hidden, rows), jax.grad(log_prob)(hidden, rows.all())

  np.testing.assert_allclose(*run(hidden, codes, tables), atol=2e-5)


def test_rows_know_their_shape_and_an_array_is_a_table_of_them():
  tables, codes, *_ = operands()
  rows = RowFactory(codes, tables, product.compose)
  assert rows.shape == (V, D)
  assert rows.count == V
  assert rows.dtype == jnp.float32
  assert not rows.is_table
  assert as_row_factory(rows) is rows
  table = as_row_factory(tables[np.arange(M), codes].reshape(V, D))
  assert table.is_table
  index = np.array([3, 3, 0])
  at = jax.jit(lambda codes, tables: RowFactory(codes, tables, product.compose).at(index))
  np.testing.assert_array_equal(table.at(index), at(codes, tables))
  assert dataclasses.replace(rows, per_row=codes[:5]).shape == (5, D)


def test_rows_of_another_width_than_hidden_are_refused():
  tables, codes, hidden, tokens, _ = operands()
  with pytest.raises(ValueError, match=r"`weight` must be \[V, 5\] .* got \(67, 12\)"):
    inspect.unwrap(linear_softmax)(
      hidden[:, :5], RowFactory(codes, tables, product.compose), tokens
    )


@pytest.mark.parametrize("tile", [(16, 50), (64, 50)])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_columns_of_a_kernel_are_rows_that_are_neither_transposed_nor_copied(tile, dtype):
  hidden, kernel = normals(0, (37, 8), (8, 211))
  tokens = np.arange(37) * 5
  loss = lambda h, weight: softmax.linear_log_prob(h, weight, tokens, dtype=dtype, tile=tile).sum()
  of_kernel = lambda h, k: loss(h, softmax.columns(k))
  value, (d_hidden, d_kernel) = jax.jit(jax.value_and_grad(of_kernel, (0, 1)))(hidden, kernel)
  expected, wanted = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, kernel.T)
  # The order of a sum may decide how a cotangent is rounded to bfloat16.
  atol = 1e-5 if dtype is None else 2e-3
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(d_hidden, wanted[0], atol=atol)
  np.testing.assert_allclose(d_kernel, wanted[1].T, atol=atol)
  assert (211, 8) not in reference.shapes_of(jax.grad(of_kernel, (0, 1)), hidden, kernel)


@pytest.mark.slow
def test_columns_are_sharded_over_a_mesh_axis():
  hidden, kernel = normals(0, (16, 8), (8, 101))
  tokens = np.arange(16) * 5
  loss = lambda h, k: softmax.linear_log_prob(
    h, softmax.columns(k), tokens, tile=(8, 10), vocab_axis="model"
  ).sum()
  expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, kernel)
  with jax.set_mesh(make_mesh(MeshShape(data=2, model=4), jax.devices())):
    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, kernel)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)
