"""What codes are made of, where each token has a row: means, products, low ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from vqjax.ops.kmeans import kmeans

__all__ = []

SAMPLE = 2**8
"""Rows for each code from which the codes of a large table are learned."""


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
