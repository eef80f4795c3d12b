"""Rows of a weight as product codes: composition, nearest codes, and scores.

Row v is the concatenation of M sub-vectors; the m-th is the vector of table m with the index that
code m of v gives. One table may serve all m, and vectors of full width may be averaged instead of
concatenated. While codes are learned, a latent row may determine them: the nearest sub-vectors
compose the row, and the latent row gets the gradient of the row (straight-through).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from vqjax.ops import vocab_parallel


def compose(
  codes: Integer[Array, "*W M"], tables: Float[Array, "Q K C"], additive: bool = False
) -> Float[Array, "*W D"]:
  """Rows from their codes: M concatenated vectors, or their mean; Q is M or 1."""
  return joined(chosen_parts(codes, tables), additive)


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


_NARROW = 16
"""Largest width of sub-vectors that the loop for CPUs compares."""


def nearest_codes(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Int[Array, "W M"]:
  """Code of the nearest sub-vector of each table; the lowest of equally near ones."""
  # float32: in bfloat16, near sub-vectors would tie and the lowest code would win too often.
  tables = tables.astype(jnp.float32)
  subspaces, _, width = tables.shape
  latent_WMC = latent.reshape(len(latent), subspaces, width).astype(jnp.float32)
  by_platform = {"cpu": _nearest_by_loop} if width <= _NARROW else {}
  latent_MCW = latent_WMC.transpose(1, 2, 0)
  return lax.platform_dependent(latent_MCW, tables, **by_platform, default=_nearest_by_product).T


def _nearest_by_product(latent_MCW: Array, tables_MKC: Array) -> Int[Array, "M W"]:
  # |x - t|² / 2 without |x|² / 2, which all codes share.
  product_MKW = jnp.einsum("mkc,mcw->mkw", tables_MKC, latent_MCW)
  distance_MKW = (tables_MKC**2).sum(axis=-1)[..., None] / 2 - product_MKW
  return jnp.argmin(distance_MKW, axis=1).astype(jnp.int32)


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


def nearest_rows(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Float[Array, "W D"]:
  """Rows that the nearest codes compose, differentiable only in the tables."""
  return compose(nearest_codes(*map(lax.stop_gradient, (latent, tables))), tables)


def quantized(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Float[Array, "W D"]:
  """Rows that the nearest codes compose, straight-through in the latent rows.

  The tables get the exact gradient of the composed rows.
  """
  row_WD = nearest_rows(latent, tables)
  return row_WD + (latent - lax.stop_gradient(latent)).astype(row_WD.dtype)


def partial_scores(
  hidden: Float[Array, "*B D"], tables: Float[Array, "M K C"], dtype
) -> Float[Array, "*B M K"]:
  """Scores of every sub-vector of every table, float32."""
  hidden_BMC = hidden.reshape(*hidden.shape[:-1], tables.shape[0], tables.shape[-1])
  return jnp.einsum(
    "...mc,mkc->...mk",
    hidden_BMC.astype(dtype),
    tables.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def summed_scores(
  partial: Float[Array, "*B M K"], codes: Integer[Array, "W M"]
) -> Float[Array, "*B W"]:
  """Scores of the rows with these codes: sums of M gathered numbers each."""
  # One table at a time: a single gather would be an array [*B, W, M].
  table_MBK = jnp.moveaxis(partial, -2, 0)

  def add(total, part):
    scores_BK, code_W = part
    return total + scores_BK[..., code_W], None

  zero = jnp.zeros((*partial.shape[:-2], codes.shape[0]), jnp.float32)
  start = vocab_parallel.varying((zero, partial, codes))[0]
  return lax.scan(add, start, (table_MBK, codes.T.astype(jnp.int32)))[0]
