"""How are the rows of a weight composed from a few codes each, and scored without composing them?

Row v is the concatenation of M sub-vectors, the m-th of which is one of the K of table m: the one
that code m of v names. (One table may serve all m, and whole vectors may be averaged instead of
laid side by side.) A latent row may stand for the codes while they are learned: the nearest
sub-vectors make the row, and the latent row gets the row's gradient as it is (straight-through).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from vqjax.ops import vocab_parallel


def compose(
  codes: Integer[Array, "*W M"], tables: Float[Array, "Q K C"], additive: bool = False
) -> Float[Array, "*W D"]:
  """Rows from their codes: D = M·C, or the mean of the M vectors; Q is M, or 1 for all of them."""
  return joined(chosen_parts(codes, tables), additive)


def chosen_parts(
  codes: Integer[Array, "*W M"], tables: Float[Array, "Q K C"]
) -> Float[Array, "*W M C"]:
  """The sub-vector that each code names."""
  return tables[jnp.arange(codes.shape[-1]) if tables.shape[0] > 1 else 0, codes]


def joined(parts: Float[Array, "*W M C"], additive: bool) -> Float[Array, "*W D"]:
  """Sub-vectors side by side, or their mean."""
  if additive:
    return parts.mean(axis=-2)
  return parts.reshape(*parts.shape[:-2], parts.shape[-2] * parts.shape[-1])


def nearest_codes(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Int[Array, "W M"]:
  """The code of the nearest sub-vector of each table; the first of equally near ones."""
  latent_WMC = latent.reshape(latent.shape[0], tables.shape[0], -1).astype(jnp.float32)
  tables = tables.astype(jnp.float32)
  # |x - t|^2 / 2 without the part that all tables share.
  product_WMK = jnp.einsum("wmc,mkc->wmk", latent_WMC, tables)
  distance_WMK = (tables**2).sum(axis=-1) / 2 - product_WMK
  return jnp.argmin(distance_WMK, axis=-1).astype(jnp.int32)


def nearest_rows(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Float[Array, "W D"]:
  """The rows that the nearest codes compose, differentiable in the tables alone."""
  return compose(nearest_codes(*map(lax.stop_gradient, (latent, tables))), tables)


def quantized(latent: Float[Array, "W D"], tables: Float[Array, "M K C"]) -> Float[Array, "W D"]:
  """The rows that the nearest codes compose; latent rows get the gradient straight through.

  The tables get the exact gradient of what was composed of them.
  """
  row_WD = nearest_rows(latent, tables)
  return row_WD + (latent - lax.stop_gradient(latent)).astype(row_WD.dtype)


def partial_scores(
  hidden: Float[Array, "*B D"], tables: Float[Array, "M K C"], dtype
) -> Float[Array, "*B M K"]:
  """Scores of every sub-vector of every table, float32: what decoding looks up."""
  hidden_BMC = hidden.reshape(*hidden.shape[:-1], tables.shape[0], -1)
  return jnp.einsum(
    "...mc,mkc->...mk",
    hidden_BMC.astype(dtype),
    tables.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def summed_scores(
  partial: Float[Array, "*B M K"], codes: Integer[Array, "W M"]
) -> Float[Array, "*B W"]:
  """The scores of rows with these codes: a sum of M looked-up numbers each."""
  table_MBK = jnp.moveaxis(partial, -2, 0)

  def add(total, part):
    scores_BK, code_W = part
    return total + scores_BK[..., code_W], None

  zero = jnp.zeros((*partial.shape[:-2], codes.shape[0]), jnp.float32)
  start = vocab_parallel.varying((zero, partial, codes))[0]
  return lax.scan(add, start, (table_MBK, codes.T.astype(jnp.int32)))[0]
