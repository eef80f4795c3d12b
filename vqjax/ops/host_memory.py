"""Rows of tables [V, D], read and written where the table lies: on a device, or beside it.

An array of `memory_kind="pinned_host"` lies in the memory of a device's host. Its rows are gathered
there, and sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int, Shaped

__all__ = []


def is_on_host(array: Array) -> bool:
  """Whether an array of JAX lies in the memory of a device's host."""
  return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


def read_rows(table: Shaped[Array, "V ..."], index: Int[Array, "*B"]) -> Shaped[Array, "*B ..."]:
  """`table[index]` on the device; an index behind the last row reads that row."""
  if not is_on_host(table):
    return _of_bits(_bits(table).at[index].get(mode="clip"), table)
  index = jax.device_put(jnp.minimum(index, table.shape[0] - 1), jax.memory.Space.Host)
  with compute_on("device_host"):
    found = _bits(table).at[index].get(mode="promise_in_bounds")
  return _of_bits(jax.device_put(found, jax.memory.Space.Device), table)


def write_rows(
  table: Shaped[Array, "V ..."], index: Int[Array, "N"], rows: Shaped[Array, "N ..."]
) -> Shaped[Array, "V ..."]:
  """The table with rows at a sorted index, in its dtype; what is behind its last row is dropped."""
  put = lambda to, index, rows: to.at[index].set(rows, mode="drop", indices_are_sorted=True)
  rows = _bits(rows.astype(table.dtype))
  if not is_on_host(table):
    return _of_bits(put(_bits(table), index, rows), table)
  index, rows = jax.device_put((index, rows), jax.memory.Space.Host)
  with compute_on("device_host"):
    return _of_bits(put(_bits(table), index, rows), table)


# 16-bit floats are moved as integers. XLA for CPUs otherwise converts the whole table to float32
# and back. It still copies the table once a step, unless its caller keeps it as integers too.


def _bits(x):
  is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
  return lax.bitcast_convert_type(x, jnp.uint16) if is_narrow else x


def _of_bits(x, like):
  return x if x.dtype == like.dtype else lax.bitcast_convert_type(x, like.dtype)
