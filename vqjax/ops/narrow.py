"""Products of one vector or a few with a weight, as decoding and verification compute them."""

from __future__ import annotations

import math

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Shaped

from vqjax.ops import vocab_parallel
from vqjax.types import Dtype

__all__ = ["FEW"]

# Most vectors whose product is split: with more of them XLA's own way is faster.
_MOST = 8

# Rows of a part of the weight.
_PART = 16

# Most numbers of all parts' products, 4 MiB, which stay in a cache until they are summed.
_SUMMED = 2**20


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
  `_PART` rows reads the weight in place. The contracted axes are in the same order on both sides,
  and there are no batch axes.
  """
  (lhs_axes, rhs_axes), _ = dimension_numbers
  width = math.prod(lhs.shape[axis] for axis in lhs_axes)
  vectors = lhs.size // width
  if jax.export.is_symbolic_dim(vectors):
    return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
  dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
  is_cpu = vocab_parallel.platform() == "cpu"
  kept = [n for axis, n in enumerate(lhs.shape) if axis not in lhs_axes]
  kept += [n for axis, n in enumerate(rhs.shape) if axis not in rhs_axes]
  leads = tuple(rhs_axes) == tuple(range(len(rhs_axes)))
  leads &= tuple(lhs_axes) == tuple(range(lhs.ndim - len(lhs_axes), lhs.ndim))
  parts, rest = divmod(width, _PART)
  is_split = is_cpu and leads and not rest and 1 < vectors <= _MOST
  is_split &= lhs.dtype == rhs.dtype == dtype == jnp.float32
  if is_split and parts * vectors * rhs.size <= _SUMMED * width:
    part_TPI = lhs.reshape(vectors, parts, _PART)
    part_PIO = rhs.reshape(parts, _PART, -1)
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


def weight_first(
  weight: Shaped[Array, "W D"], vectors: Shaped[Array, "*B D"], dtype: Dtype
) -> Shaped[Array, "W *B"]:
  """weight · vectorsᵀ with results of `dtype`, on a TPU of at least eight vectors.

  A few vectors would be multiplied in vector units, in more time than the weight takes to read; the
  matrix unit takes eight in the time of one.
  """
  batch, count = vectors.shape[:-1], math.prod(vectors.shape[:-1])
  is_padded = count < 8 and vocab_parallel.platform() == "tpu"
  if is_padded:
    # The barriers keep XLA from taking the product apart again.
    vectors = jnp.pad(vectors.reshape(count, vectors.shape[-1]), ((0, 8 - count), (0, 0)))
    vectors = lax.optimization_barrier(vectors)
  axes = ((1,), (vectors.ndim - 1,)), ((), ())
  product = lax.dot_general(weight, vectors, axes, preferred_element_type=dtype)
  if not is_padded:
    return product
  return lax.optimization_barrier(product)[:, :count].reshape(len(weight), *batch)


# Integers of a row that are multiplied at once; XLA sums as many in one loop.
_LANES = 32

# Dimensions that are one sum, a multiple of `2 * _LANES`.
_SPAN = 1024

# Most vectors whose integer products are summed lane by lane.
FEW = 4


def int8_product(weight: Int8[Array, "W D"], vectors: Int8[Array, "*B D"]) -> Int[Array, "W *B"]:
  """weight · vectorsᵀ in integers, exactly; no integer may be -128.

  XLA for CPUs writes a weight of 8 bits to memory as 32 bits before a product. Here a sum of two
  products, which fits 16 bits, is one step of a sum over the weight as it is read.
  """
  dim, batch = weight.shape[1], vectors.shape[:-1]
  count, platform = math.prod(batch), vocab_parallel.platform()
  if platform == "gpu" and dim % 4:
    # Tensor cores take integers by fours: on an H200 products of 63 dimensions failed.
    pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -dim % 4)])
    return weight_first(pad(weight), pad(vectors), jnp.int32)
  if count > FEW or platform != "cpu":
    return weight_first(weight, vectors, jnp.int32)
  # Not one sum over a whole row: XLA would split it, and write the products to memory.
  weight, vectors = lax.optimization_barrier((weight, vectors))
  weight_W1D, vector_ND = weight[:, None], vectors.reshape(math.prod(batch), dim)

  def product(first, last, dtype):
    return weight_W1D[..., first:last].astype(dtype) * vector_ND[:, first:last].astype(dtype)

  whole = dim - dim % (2 * _LANES)
  sums = []
  for start in range(0, whole, _SPAN):
    total_WNn = 0
    for first in range(start, min(start + _SPAN, whole), 2 * _LANES):
      middle, last = first + _LANES, first + 2 * _LANES
      pair_WNn = product(first, middle, jnp.int16) + product(middle, last, jnp.int16)
      total_WNn = total_WNn + pair_WNn.astype(jnp.int32)
    sums.append(total_WNn.sum(axis=-1))
  for first in range(whole, dim, _LANES):
    sums.append(product(first, min(first + _LANES, dim), jnp.int32).sum(axis=-1))
  return sum(sums).reshape(weight.shape[0], *batch)
