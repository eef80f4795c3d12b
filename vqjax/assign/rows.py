"""What codes are made of, where each token has a row: means, products, low ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from vqjax.ops import product
from vqjax.ops.kmeans import kmeans

__all__ = []

SAMPLE = 2**8
"""Rows for each code from which the codes of a large table are learned."""

TURNS = 20
"""Updates of the rotation of optimised product quantisation."""

BLOCK = 2**13
"""Rows that are rotated and assigned at a time."""


def unit_rows(rows: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "V D"]:
  """The rows with length 1; a row of rounding errors alone becomes zeros."""
  squared = (rows**2).sum(axis=1, keepdims=True)
  exists = squared > 1e-20 * squared.max()
  return np.where(exists, rows / np.sqrt(np.where(exists, squared, 1)), 0)


def code_means(
  rows: Float[np.ndarray, "V D"],
  weights: Float[np.ndarray, "V"],
  code: Int[np.ndarray, "V"],
  codes: int,
) -> Float[np.ndarray, "K D"]:
  """The weighted mean of the rows on each code; 0 for a code without tokens."""
  mass = np.bincount(code, weights, codes)
  sums = np.zeros((codes, rows.shape[1]))
  np.add.at(sums, code, rows * weights[:, None])
  return sums / np.where(mass > 0, mass, 1)[:, None]


def low_rank(
  rows: Float[np.ndarray, "V D"], weights: Float[np.ndarray, "V"], rank: int
) -> tuple[Float[np.ndarray, "V R"], Float[np.ndarray, "R D"]]:
  """Weighted low-rank factors (low [V, R], up [R, D]) of the rows."""
  rows = np.asarray(rows, np.float64)
  second = (rows * weights[:, None]).T @ rows
  up = np.linalg.eigh(second)[1][:, ::-1][:, :rank].T
  return rows @ up.T, up


def nearest_codes(
  rows: Float[np.ndarray, "V D"],
  codebook: Float[np.ndarray, "K D"],
  code: Int[np.ndarray, "V"],
  count: int,
  chunk: int = 4096,
) -> Int[np.ndarray, "V {count}"]:
  """The code of each row, followed by the nearest other codes, nearest first."""
  chunks = []
  for start in range(0, len(rows), chunk):
    part, own = rows[start : start + chunk], code[start : start + chunk]
    distance = (codebook**2).sum(axis=1) - 2 * part @ codebook.T
    distance[np.arange(len(part)), own] = -np.inf
    near = np.argpartition(distance, count - 1, axis=1)[:, :count]
    order = np.take_along_axis(distance, near, axis=1).argsort(axis=1, kind="stable")
    chunks.append(np.take_along_axis(near, order, axis=1))
  return np.concatenate(chunks)


def product_kmeans(
  rows: Float[np.ndarray, "V D"],
  codes: int,
  subspaces: int,
  *,
  key: PRNGKeyArray,
  weights: Float[np.ndarray, "V"] | None = None,
  second: Float[np.ndarray, "D D"] | None = None,
  iterations: int = 25,
) -> tuple[Float[np.ndarray, "M K C"], Int[np.ndarray, "V M"]]:
  """The values and the codes of k-means in each subspace by itself.

  With `second`, E[h hᵀ] of the hidden states that multiply the rows, distances are those of scores.
  """
  width, values, assigned = rows.shape[1] // subspaces, [], []
  weights = None if weights is None else jnp.asarray(weights, jnp.float32)
  for m, own_key in enumerate(jax.random.split(key, subspaces)):
    own = slice(m * width, (m + 1) * width)
    points = jnp.asarray(np.asarray(rows[:, own], np.float32))
    if second is not None:
      # d S dᵀ is the squared length of d L, where S = L Lᵀ.
      root = np.linalg.cholesky(np.asarray(second, np.float64)[own, own]).astype(np.float32)
      points = jnp.matmul(points, root, precision="highest")
    found = kmeans(own_key, points, codes, weights=weights, iterations=iterations, sample=SAMPLE)
    centers = np.asarray(found.centers)
    values.append(centers if second is None else np.linalg.solve(root.T, centers.T).T)
    assigned.append(np.asarray(found.assignment))
  return np.stack(values), np.stack(assigned, axis=1)


def rotated_kmeans(
  rows: Float[np.ndarray, "V D"],
  codes: int,
  subspaces: int,
  *,
  key: PRNGKeyArray,
  weights: Float[np.ndarray, "V"] | None = None,
  second: Float[np.ndarray, "D D"] | None = None,
) -> tuple[Float[np.ndarray, "M K C"], Int[np.ndarray, "V M"], Float[np.ndarray, "P D"]]:
  """The values, the codes and the basis of optimised product quantisation; P = M · C >= D.

  A row is its concatenated values times the basis, whose numbers float16 holds. Rotation and values
  are learned in turn from a sample of the rows, in the metric of `second`: values by a step of
  k-means, and the rotation that takes the rows nearest to what they compose. Source: Ge, He, Ke and
  Sun, Optimized product quantization, 2013, Sections 3.1 and 3.2.
  """
  root = np.eye(rows.shape[1]) if second is None else np.linalg.cholesky(second)
  draw_key, first_key = jax.random.split(key)
  rng = np.random.default_rng(int(jax.random.bits(draw_key)))
  count, p = min(len(rows), SAMPLE * codes // 2), None
  if weights is not None:
    p = weights / weights.sum()
  drawn = np.sort(rng.choice(len(rows), count, replace=p is not None, p=p))
  points_ND = np.asarray(rows[drawn], np.float32) @ root.astype(np.float32)
  rotation_DP = _parted_axes(points_ND, subspaces)
  values_MKC, _ = product_kmeans(
    points_ND @ rotation_DP, codes, subspaces, key=first_key, iterations=2
  )
  part = np.arange(subspaces)
  for _ in range(TURNS):
    values_MKC, codes_NM = _lloyd(points_ND, rotation_DP, values_MKC, np.ones(count))
    composed_NP = values_MKC[part, codes_NM].reshape(count, -1)
    left, _, right = np.linalg.svd(points_ND.T @ composed_NP, full_matrices=False)
    rotation_DP = left @ right
  basis_PD = np.linalg.solve(root.T, rotation_DP.astype(np.float64)).T
  scale = np.abs(basis_PD).max()
  basis_PD, values_MKC = (basis_PD / scale).astype(np.float16), values_MKC * np.float32(scale)
  # Coordinates that the rounded basis turns into the rows.
  forward_DP = np.linalg.pinv(basis_PD.astype(np.float64)).astype(np.float32)
  for _ in range(2):
    own = np.ones(len(rows)) if weights is None else weights
    values_MKC, codes_VM = _lloyd(rows, forward_DP, values_MKC, own)
  return values_MKC, codes_VM, basis_PD.astype(np.float32)


def _parted_axes(points_ND, subspaces) -> Float[np.ndarray, "D P"]:
  """Principal axes in parts whose variances have about equal products."""
  variances, axes_DD = np.linalg.eigh(np.cov(points_ND.T))
  dim, width = len(variances), product.part_width(len(variances), subspaces)
  # At least 0, so that a part with more axes has the larger sum.
  logs = np.log(np.maximum(variances, 1e-9 * variances[-1]))
  logs -= logs.min()
  room = dim // subspaces + (np.arange(subspaces) < dim % subspaces)
  total, filled = np.zeros(subspaces), np.zeros(subspaces, int)
  rotation_DP = np.zeros((dim, subspaces * width), np.float32)
  for axis in reversed(range(dim)):
    part = np.where(filled < room, total, np.inf).argmin()
    rotation_DP[:, part * width + filled[part]] = axes_DD[:, axis]
    total[part] += logs[axis]
    filled[part] += 1
  return rotation_DP


def _lloyd(rows, forward_DP, values_MKC, weights_V):
  """Values after a step of k-means of the rows times `forward`, and the codes of the rows."""
  subspaces, codes, _ = values_MKC.shape
  sums, mass, found = 0.0, 0.0, []
  for first in range(0, len(rows), BLOCK):
    block = np.asarray(rows[first : first + BLOCK], np.float32) @ forward_DP
    # Of one size, so that one program is compiled.
    weights = np.zeros(BLOCK, np.float32)
    weights[: len(block)] = weights_V[first : first + BLOCK]
    padded = np.pad(block, ((0, BLOCK - len(block)), (0, 0)))
    own_codes, *own = map(np.asarray, _sums(padded, values_MKC, weights))
    sums, mass = sums + own[0], mass + own[1]
    found.append(own_codes[: len(block)])
  mass = mass.reshape(subspaces, codes, 1)
  means = sums.reshape(values_MKC.shape) / np.where(mass > 0, mass, 1)
  return np.where(mass > 0, means, values_MKC), np.concatenate(found)


@jax.jit
def _sums(points_NP, values_MKC, weights_N):
  """Codes of points, and weighted sums and masses of the points of each value."""
  subspaces, codes, width = values_MKC.shape
  codes_NM = product.nearest_codes(points_NP, values_MKC)
  place_NM = codes_NM + codes * jnp.arange(subspaces)
  weights_NM1 = jnp.broadcast_to(weights_N[:, None, None], (*codes_NM.shape, 1))
  parts_NMC = weights_NM1 * points_NP.reshape(*codes_NM.shape, width)
  zeros = lambda width: jnp.zeros((subspaces * codes, width), jnp.float32)
  sums, mass = (zeros(x.shape[-1]).at[place_NM].add(x) for x in (parts_NMC, weights_NM1))
  return codes_NM, sums, mass
