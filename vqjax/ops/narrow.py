"""Products of one vector or a few with a weight, as decoding and verification compute them."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vqjax.ops import vocab_parallel
from vqjax.types import Dtype

MOST = 8
"""Most vectors whose product is split: with more of them XLA's own way is faster."""

PART = 16
"""Rows of a part of the weight."""

SUMMED = 2**20
"""Most numbers of all parts' products, 4 MiB, which stay in a cache until they are summed."""


def dot_general(
  lhs: Float[Array, "..."],
  rhs: Float[Array, "..."],
  dimension_numbers: lax.DotDimensionNumbers,
  precision: lax.PrecisionLike = None,
  preferred_element_type: Dtype | None = None,
) -> Float[Array, "..."]:
  """`jax.lax.dot_general` of vectors `lhs` and a weight `rhs`, with other ways for one and for few.

  XLA for CPUs writes a weight of 16 bits to memory as float32 before a product; a sum over the
  weight converts it as it reads it. Before a product with several vectors it copies the weight in
  another order, which takes longer than the product with few; a sum of products with parts of
  `PART` rows reads the weight in place. The contracted axes are in the same order on both sides,
  and there are no batch axes.
  """
  (lhs_axes, rhs_axes), _ = dimension_numbers
  width = math.prod(lhs.shape[axis] for axis in lhs_axes)
  vectors = lhs.size // width
  dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
  is_cpu = vocab_parallel.platform() == "cpu"
  kept = [n for axis, n in enumerate(lhs.shape) if axis not in lhs_axes]
  kept += [n for axis, n in enumerate(rhs.shape) if axis not in rhs_axes]
  leads = tuple(rhs_axes) == tuple(range(len(rhs_axes)))
  leads &= tuple(lhs_axes) == tuple(range(lhs.ndim - len(lhs_axes), lhs.ndim))
  parts, rest = divmod(width, PART)
  is_split = is_cpu and leads and not rest and 1 < vectors <= MOST
  is_split &= lhs.dtype == rhs.dtype == dtype == jnp.float32
  if is_split and parts * vectors * rhs.size <= SUMMED * width:
    part_TPI = lhs.reshape(vectors, parts, PART)
    part_PIO = rhs.reshape(parts, PART, -1)
    product_PTO = jnp.einsum("tpi,pio->pto", part_TPI, part_PIO, precision=precision)
    return product_PTO.sum(0).reshape(kept)
  if vectors > 1 or rhs.dtype.itemsize > 2 or not is_cpu:
    return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
  # Together with a vector that changes in each step, the weight is not a constant of a loop, of
  # which XLA would keep a float32 copy.
  lhs, rhs = lax.optimization_barrier((lhs, rhs))
  vector = lhs.reshape([n if axis in rhs_axes else 1 for axis, n in enumerate(rhs.shape)])
  products = rhs.astype(jnp.float32) * vector.astype(jnp.float32)
  return products.sum(rhs_axes).reshape(kept).astype(dtype)
