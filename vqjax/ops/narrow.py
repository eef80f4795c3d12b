"""Products of few vectors with a weight of 16 or 8 bits, as a decoding step computes them."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from vqjax.ops import vocab_parallel
from vqjax.types import Dtype


def dot_general(
  lhs: Float[Array, "..."],
  rhs: Float[Array, "..."],
  dimension_numbers: lax.DotDimensionNumbers,
  precision: lax.PrecisionLike = None,
  preferred_element_type: Dtype | None = None,
) -> Float[Array, "..."]:
  """`jax.lax.dot_general` of vectors `lhs` and a weight `rhs`, with another way for one vector.

  XLA for CPUs writes a weight of 16 bits to memory as float32 before a product; a sum over the
  weight converts it as it reads it. The contracted axes are in the same order on both sides, and
  there are no batch axes.
  """
  (lhs_axes, rhs_axes), _ = dimension_numbers
  vectors = lhs.size // math.prod(lhs.shape[axis] for axis in lhs_axes)
  dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
  if vectors > 1 or rhs.dtype.itemsize > 2 or vocab_parallel.platform() != "cpu":
    return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
  # Together with a vector that changes in each step, the weight is not a constant of a loop, of
  # which XLA would keep a float32 copy.
  lhs, rhs = lax.optimization_barrier((lhs, rhs))
  vector = lhs.reshape([n if axis in rhs_axes else 1 for axis, n in enumerate(rhs.shape)])
  products = rhs.astype(jnp.float32) * vector.astype(jnp.float32)
  kept = [n for axis, n in enumerate(lhs.shape) if axis not in lhs_axes]
  kept += [n for axis, n in enumerate(rhs.shape) if axis not in rhs_axes]
  return products.sum(rhs_axes).reshape(kept).astype(dtype)


LANES = 32
"""Integers of a row that are multiplied at once; XLA sums as many in one loop."""

FEW = 4
"""Most vectors whose integer products are summed lane by lane."""


def int8_product(weight: Int8[Array, "W D"], vectors: Int8[Array, "*B D"]) -> Int[Array, "W *B"]:
  """weight · vectorsᵀ in integers, exactly; no integer may be -128.

  XLA for CPUs writes a weight of 8 bits to memory as 32 bits before a product. Here a sum of two
  products, which fits 16 bits, is one step of a sum over the weight as it is read.
  """
  dim, batch = weight.shape[1], vectors.shape[:-1]
  if math.prod(batch) > FEW or vocab_parallel.platform() != "cpu":
    axes = ((1,), (vectors.ndim - 1,)), ((), ())
    return lax.dot_general(weight, vectors, axes, preferred_element_type=jnp.int32)
  total_WBn = 0
  weight, vectors = lax.optimization_barrier((weight, vectors))
  flat_ND = vectors.reshape(-1, dim)
  for start in range(0, dim, 2 * LANES):
    pair = [(at, min(at + LANES, dim)) for at in (start, start + LANES) if at < dim]
    sums = 0
    for first, last in pair:
      product = weight[:, None, first:last].astype(jnp.int16) * flat_ND[:, first:last].astype(
        jnp.int16
      )
      sums = sums + jnp.pad(product, ((0, 0), (0, 0), (0, LANES - (last - first))))
    total_WBn = total_WBn + sums.astype(jnp.int32)
  return total_WBn.sum(axis=-1).reshape(-1, *batch)
