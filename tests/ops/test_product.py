"""Nearest codes, by the loop of a CPU and by the product of accelerators."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.ops.exact import normals
from vqjax.ops import product

PATHS = {"loop": product._nearest_by_loop, "product": product._nearest_by_product}


@pytest.fixture(params=PATHS)
def nearest(request, monkeypatch):
  """`nearest_codes` with one of the paths for every platform."""
  for path in ("_nearest_by_loop", "_nearest_by_product"):
    monkeypatch.setattr(product, path, PATHS[request.param])
  return jax.jit(lambda tables, *latents: [product.nearest_codes(x, tables) for x in latents])


@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 1, 2), (2, 11, 16), (2, 11, 17)])
def test_codes_are_those_of_a_search_in_float64(nearest, shape):
  subspaces, _, width = shape
  latent, tables = normals(0, (13, subspaces * width), shape)
  parts = latent.reshape(13, subspaces, 1, width).astype(np.float64)
  expected = ((parts - tables) ** 2).sum(-1).argmin(-1)
  for rows, found in zip((0, 1, 13), nearest(tables, latent[:0], latent[:1], latent)):
    np.testing.assert_array_equal(found, expected[:rows])


def test_the_lowest_of_equal_codes_is_taken_and_nan_is_nearest(nearest):
  latent, tables = np.float32([[0.9], [-3]]), np.float32([[[1], [0], [1], [0]]])
  assert nearest(tables, latent)[0].tolist() == [[0], [1]]
  tables[0, 2] = np.nan
  assert nearest(tables, latent)[0].tolist() == [[2], [2]]


def test_latent_rows_of_another_width_are_refused(nearest):
  with pytest.raises(TypeError, match="reshape"):
    nearest(np.ones((2, 7, 16), np.float32), np.ones((5, 64), np.float32))


def test_rows_sharded_over_an_explicit_axis_have_the_same_codes():
  latent, tables = normals(1, (8, 6), (2, 5, 3))
  expected = jax.jit(lambda *a: product.nearest_codes(*a))(latent, tables)
  with jax.set_mesh(jax.make_mesh((8,), ("rows",), (AxisType.Explicit,))):
    run = jax.jit(product.nearest_codes)
    found = run(jax.device_put(latent, P("rows")), jax.device_put(tables))
  np.testing.assert_array_equal(found, expected)


def test_codes_of_many_rows_are_found_a_part_at_a_time(monkeypatch):
  latent, tables = normals(3, (211, 12), (3, 7, 4))
  expected = jax.jit(product.nearest_codes)(latent, tables)
  monkeypatch.setattr(product, "_ROWS", 100)
  found = jax.jit(lambda *arrays: product.nearest_codes(*arrays))(latent, tables)
  np.testing.assert_array_equal(found, expected)
