"""Rows of a weight as product codes: composition, nearest codes, and scores.

Row v is the concatenation of M sub-vectors; the m-th is the vector of table m with the index that
code m of v gives. One table may serve all m, and vectors of full width may be averaged instead of
concatenated. The concatenation may be multiplied by a basis, [M C, D]. While codes are learned, a
latent row may determine them: the nearest sub-vectors compose the row, and the latent row gets the
gradient of the row (straight-through).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from vqjax.ops import vocab_parallel

__all__ = []


def compose(
  codes: Integer[Array, "*W M"],
  tables: Float[Array, "Q K C"],
  additive: bool = False,
  basis: Float[Array, "P D"] | None = None,
) -> Float[Array, "*W D"]:
  """Rows from their codes: M concatenated vectors, or their mean, in a basis; Q is M or 1."""
  rows = joined(chosen_parts(codes, tables), additive)
  if basis is None:
    return rows
  # A TPU or GPU would round the operands to fewer bits.
  return jnp.matmul(rows, basis.astype(rows.dtype), precision=lax.Precision.HIGHEST)


def part_width(dim: int, subspaces: int) -> int:
  """Width of the sub-vectors of a row; where M does not divide D they are wider than the row."""
  return -(-dim // subspaces)


def chosen_parts(
  codes: Integer[Array, "*W M"], tables: Float[Array, "Q K C"]
) -> Float[Array, "*W M C"]:
  """Sub-vectors with the indices that the codes give."""
  # Two index arrays that broadcast: part m of a row is read from table m, or all from the only one.
  return tables[jnp.arange(codes.shape[-1]) if tables.shape[0] > 1 else 0, codes]


def joined(parts: Float[Array, "*W M C"], additive: bool) -> Float[Array, "*W D"]:
  """Concatenation of the sub-vectors of each row, or their mean."""
  if additive:
    return parts.mean(axis=-2)
  return parts.reshape(*parts.shape[:-2], parts.shape[-2] * parts.shape[-1])


# Largest width of sub-vectors that the loop for CPUs compares.
_NARROW = 16


# Rows whose nearest codes are found at once: their distances and transposed copies are in memory.
_ROWS = 2**15


def nearest_codes(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Int[Array, "W M"]:
  """Code of the nearest sub-vector of each table; the lowest of equally near ones."""
  rows = len(latent)
  if rows <= _ROWS:
    return _nearest(latent, tables)

  def step(codes_WM, index):
    # The last part computes again what it shares with the one before.
    start = jnp.minimum(index * _ROWS, rows - _ROWS)
    found = _nearest(lax.dynamic_slice_in_dim(latent, start, _ROWS), tables)
    return lax.dynamic_update_slice_in_dim(codes_WM, found, start, axis=0), None

  empty = jnp.zeros((rows, len(tables)), jnp.int32)
  empty = vocab_parallel.varying((empty, latent, tables))[0]
  return lax.scan(step, empty, jnp.arange(-(-rows // _ROWS), dtype=jnp.int32))[0]


def _nearest(latent, tables):
  # float32: in bfloat16, near sub-vectors would tie and the lowest code would win too often.
  tables = tables.astype(jnp.float32)
  subspaces, _, width = tables.shape
  latent_WMC = latent.reshape(len(latent), subspaces, width).astype(jnp.float32)
  by_platform = {"cpu": _nearest_by_loop} if width <= _NARROW else {}
  latent_MCW = latent_WMC.transpose(1, 2, 0)
  return lax.platform_dependent(latent_MCW, tables, **by_platform, default=_nearest_by_product).T


def _nearest_by_product(latent_MCW: Array, tables_MKC: Array) -> Int[Array, "M W"]:
  """A product for each subspace, so that only the distances [K, W] of one are held."""

  def in_subspace(given):
    latent_CW, table_KC = given
    # |x - t|² / 2 without |x|² / 2, which all codes share.
    distance_KW = (table_KC**2).sum(axis=-1)[:, None] / 2 - table_KC @ latent_CW
    return jnp.argmin(distance_KW, axis=0).astype(jnp.int32)

  return lax.map(in_subspace, (latent_MCW, tables_MKC))


def _nearest_by_loop(latent_MCW: Array, tables_MKC: Array) -> Int[Array, "M W"]:
  """A loop over the codes, which holds no array [M, K, W].

  XLA's argmin for CPUs is not vectorised, nor are its products of so few terms; this loop is.
  """
  half_KM = (tables_MKC**2).sum(axis=-1).T / 2
  tables_KMC = tables_MKC.transpose(1, 0, 2)

  def compare(k, nearest):
    least_MW, code_MW = nearest
    distance_MW = half_KM[k][:, None]
    for c in range(tables_KMC.shape[-1]):
      distance_MW = distance_MW - tables_KMC[k, :, c, None] * latent_MCW[:, c]
    # Like argmin, nan is below all numbers.
    nearer = (distance_MW < least_MW) | (jnp.isnan(distance_MW) & ~jnp.isnan(least_MW))
    return jnp.where(nearer, distance_MW, least_MW), jnp.where(nearer, k, code_MW)

  # Like the data, so that the carry has their sharding.
  start = jnp.full_like(latent_MCW[:, 0], jnp.inf), jnp.zeros_like(latent_MCW[:, 0], jnp.int32)
  start = vocab_parallel.varying((start, latent_MCW, tables_MKC))[0]
  return lax.fori_loop(0, tables_MKC.shape[1], compare, start, unroll=4)[1]


def straight_through_rows(
  per_row: tuple[Float[Array, "W D"], Integer[Array, "W M"]], tables: Float[Array, "M K C"]
) -> Float[Array, "W D"]:
  """Rows that codes compose, whose gradient the latent rows get unchanged.

  The tables get the exact gradient of the composed rows.
  """
  latent, codes = per_row
  row_WD = compose(codes, tables)
  return row_WD + (latent - lax.stop_gradient(latent)).astype(row_WD.dtype)


def prefers_sums(rows: int, subspaces: int, dim: int) -> bool:
  """Whether sums of partial scores are faster than products with composed rows.

  To compose a row reads D numbers once for all hidden vectors; otherwise each of them gathers M
  numbers, which count twice because they are not read in order. On a CPU the numbers of many hidden
  vectors are read and added as vectors.
  """
  if vocab_parallel.platform() == "cpu":
    return rows <= 256 and 4 * subspaces <= dim
  return 2 * rows * subspaces <= dim


def partial_scores(
  hidden: Float[Array, "*B D"], tables: Float[Array, "M K C"], dtype
) -> Float[Array, "M K *B"]:
  """Scores of every sub-vector of every table, float32."""
  hidden_BMC = hidden.reshape(*hidden.shape[:-1], tables.shape[0], tables.shape[-1])
  return jnp.einsum(
    "mkc,...mc->mk...",
    tables.astype(dtype),
    hidden_BMC.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def summed_scores(
  partial: Float[Array, "M K *B"], codes: Integer[Array, "V M"]
) -> Float[Array, "V *B"]:
  """Scores of the rows with these codes: sums of M gathered numbers each."""
  vocab, batch = codes.shape[0], partial.shape[2:]
  if vocab_parallel.platform() == "gpu":
    # One kernel gathers and adds; the tables are in its caches.
    return chosen_parts(codes.astype(jnp.int32), partial).sum(axis=1)
  # Sums and codes of a tile stay in a cache: 64 Ki rows for one hidden vector, 8 Ki for 64.
  tiles = -(-vocab // max(1, 2**16 // max(1, math.isqrt(math.prod(batch)))))
  width = -(-vocab // tiles)
  if tiles == 1:
    return _summed(partial, codes)

  def step(total_VB, index):
    # The last tile computes again what it shares with the one before.
    start = jnp.minimum(index * width, vocab - width)
    new_WB = _summed(partial, lax.dynamic_slice_in_dim(codes, start, width))
    return lax.dynamic_update_slice_in_dim(total_VB, new_WB, start, axis=0), None

  zero_VB = jnp.zeros((vocab, *batch), jnp.float32)
  zero_VB = vocab_parallel.varying((zero_VB, partial, codes))[0]
  return lax.scan(step, zero_VB, jnp.arange(tiles, dtype=jnp.int32))[0]


def _summed(partial, codes):
  word_QW, table_QPKB, bits = _words(codes, partial)
  batch = partial.shape[2:]

  def add(total_WB, word):
    word_W, table_PKB = word
    for place in range(table_PKB.shape[0]):
      code_W = (word_W >> np.uint32(bits * place)) & np.uint32(2**bits - 1)
      total_WB = total_WB + table_PKB[place].at[code_W].get(mode="clip")
    return total_WB, None

  zero_WB = jnp.zeros((codes.shape[0], *batch), jnp.float32)
  start = vocab_parallel.varying((zero_WB, partial, codes))[0]
  # Some words at once: their gathered vectors are added before a sum is written. Of one hidden
  # vector the sums are as small as the codes, and a longer body is slower.
  unroll = 1 if math.prod(batch) == 1 else 4
  return lax.scan(add, start, (word_QW, table_QPKB), unroll=unroll)[0]


def _words(codes, partial):
  """Codes as 32-bit words [Q, W], partial scores [Q, P, K, *B], and bits of a code.

  A word holds P codes. The codes of a subspace have to be read for many rows at once, and the
  transposition of bytes takes four times as long as that of words.
  """
  bits = 8 * codes.dtype.itemsize
  each = 32 // bits
  missing = -codes.shape[1] % each
  # Code 0 of further tables of zeros.
  codes_WM = jnp.pad(codes, ((0, 0), (0, missing)))
  table_MKB = jnp.pad(partial, ((0, missing), *[(0, 0)] * (partial.ndim - 1)))
  code_WQP = codes_WM.reshape(codes.shape[0], -1, each).astype(jnp.uint32)
  word_WQ = code_WQP[..., 0]
  for place in range(1, each):
    word_WQ = word_WQ | code_WQP[..., place] << np.uint32(bits * place)
  # The barriers keep the transposition apart from the loops before and after it.
  word_QW = lax.optimization_barrier(lax.optimization_barrier(word_WQ).T)
  return word_QW, table_MKB.reshape(-1, each, *table_MKB.shape[1:]), bits
