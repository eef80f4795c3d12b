"""Nearest codes, by the loop of a CPU and by the product of accelerators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vqjax.ops import product

PATHS = {"loop": product._nearest_by_loop, "product": product._nearest_by_product}


@pytest.fixture(params=PATHS)
def nearest(request, monkeypatch):
  """`nearest_codes` with one of the paths for every platform."""
  for path in ("_nearest_by_loop", "_nearest_by_product"):
    monkeypatch.setattr(product, path, PATHS[request.param])
  return lambda *arrays: jax.jit(lambda *a: product.nearest_codes(*a))(*arrays)


@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 1, 2), (2, 11, 16), (2, 11, 17)])
def test_codes_are_those_of_a_search_in_float64(nearest, shape, rows):
  rng = np.random.default_rng(0)
  subspaces, _, width = shape
  latent = rng.normal(size=(rows, subspaces * width)).astype(np.float32)
  tables = rng.normal(size=shape).astype(np.float32)
  parts = latent.reshape(rows, subspaces, 1, width).astype(np.float64)
  expected = ((parts - tables) ** 2).sum(-1).argmin(-1)
  np.testing.assert_array_equal(nearest(latent, tables), expected)


def test_the_lowest_of_equal_codes_is_taken_and_nan_is_nearest(nearest):
  tables = jnp.array([[[1.0], [0.0], [1.0], [0.0]]])
  assert nearest(jnp.array([[0.9], [-3.0]]), tables).tolist() == [[0], [1]]
  assert nearest(jnp.array([[0.9], [-3.0]]), tables.at[0, 2].set(jnp.nan)).tolist() == [[2], [2]]


def test_latent_rows_of_another_width_are_refused(nearest):
  with pytest.raises(TypeError, match="reshape"):
    nearest(jnp.ones((5, 64)), jnp.ones((2, 7, 16)))


def test_rows_sharded_over_an_explicit_axis_have_the_same_codes():
  rng = np.random.default_rng(1)
  latent = rng.normal(size=(8, 6)).astype(np.float32)
  tables = jnp.asarray(rng.normal(size=(2, 5, 3)).astype(np.float32))
  expected = product.nearest_codes(jnp.asarray(latent), tables)
  with jax.set_mesh(jax.make_mesh((8,), ("rows",), (AxisType.Explicit,))):
    found = jax.jit(product.nearest_codes)(jax.device_put(latent, P("rows")), tables)
  np.testing.assert_array_equal(found, expected)
