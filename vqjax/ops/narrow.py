"""The product of a single vector with a weight of 16 bits, as a decoding step computes it."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

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
