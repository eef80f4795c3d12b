"""What a vocabulary table looks like before it is compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

__all__ = ["Spectrum", "nearest_rows", "norms", "spectrum", "untrained"]

TILE = 2**14
"""Rows that are widened at a time."""


@dataclasses.dataclass(frozen=True)
class Spectrum:
  """How many directions the rows of a table use.

  Attributes:
    eigenvalues: of the covariance of the rows, descending, [D].
    mean_share: share of the rows' mean square that their mean row has.
  """

  eigenvalues: Float[np.ndarray, "D"]
  mean_share: float

  @property
  def participation(self) -> float:
    """(sum λ)² / sum λ²: D for equal eigenvalues, 1 for a single one."""
    return float(self.eigenvalues.sum() ** 2 / np.square(self.eigenvalues).sum())

  @property
  def entropy_dimension(self) -> float:
    """exp of the entropy of the eigenvalues' shares, in [1, D]."""
    share = self.eigenvalues / self.eigenvalues.sum()
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))

  def directions(self, share: float) -> int:
    """The fewest directions that have a share of the variance."""
    held = np.cumsum(self.eigenvalues) / self.eigenvalues.sum()
    return int(min(len(held), 1 + np.searchsorted(held, share - 1e-12)))


def norms(table: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "V"]:
  """The length of every row, float64."""
  _check(table)
  return np.concatenate([np.linalg.norm(wide, axis=1) for _, wide in _tiles(table)])


def spectrum(table: Float[np.ndarray, "V D"]) -> Spectrum:
  """The eigenvalues of the rows' covariance, computed in float64.

  Raises:
    ValueError: all rows are equal, or a number is not finite.
  """
  _check(table)
  total, square = 0.0, 0.0
  for _, wide in _tiles(table):
    total = total + wide.sum(axis=0)
    square = square + wide.T @ wide
  mean = total / len(table)
  covariance = square / len(table) - np.outer(mean, mean)
  eigenvalues = np.maximum(np.linalg.eigvalsh(covariance)[::-1], 0.0)
  if not np.isfinite(square).all() or eigenvalues.sum() <= 1e-12 * np.trace(square) / len(table):
    raise ValueError(
      "`table` must have finite rows that differ; got equal rows or numbers that are not finite."
      " Give a trained table."
    )
  return Spectrum(eigenvalues, float(mean @ mean / (np.trace(square) / len(table))))


def nearest_rows(
  table: Float[np.ndarray, "V D"], tokens: Sequence[int], k: int
) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
  """The k tokens whose rows have the largest cosines with those of `tokens`, and the cosines.

  The mean row is taken off first, because it is part of all of them. A token is not its own
  neighbour.

  Raises:
    ValueError: a token is outside the vocabulary, or `k` outside [1, V - 1].
  """
  _check(table)
  tokens = np.asarray(tokens, np.int64).reshape(-1)
  if not tokens.size or tokens.min() < 0 or tokens.max() >= len(table):
    raise ValueError(
      f"`tokens` must be tokens in [0, vocab {len(table)}); got {tokens.tolist()}. Encode"
      " words with the model's tokenizer."
    )
  if not 1 <= k < len(table):
    raise ValueError(f"`k` must be in [1, vocab - 1 = {len(table) - 1}]; got {k}. 8 is usual.")
  mean = sum(wide.sum(axis=0) for _, wide in _tiles(table)) / len(table)
  unit = lambda rows: rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
  wanted = unit(np.asarray(table[tokens], np.float64) - mean)
  cosines = np.concatenate([wanted @ unit(wide - mean).T for _, wide in _tiles(table)], axis=1)
  cosines[np.arange(len(tokens)), tokens] = -np.inf
  at = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
  found = np.take_along_axis(cosines, at, axis=1)
  order = np.argsort(-found, axis=1, kind="stable")
  return np.take_along_axis(at, order, axis=1), np.take_along_axis(found, order, axis=1)


def untrained(
  table: Float[np.ndarray, "V D"], unused: Sequence[int], *, is_output: bool = True
) -> tuple[Float[np.ndarray, "V"], Int[np.ndarray, "n"]]:
  """How far rows are from those of tokens that no text has, and which are as near as these.

  A softmax moves the rows of all tokens that do not occur alike, so that they stay together, and
  other tokens near them were hardly trained. The rows of a table that is for inputs only have no
  gradient where a token does not occur: they keep a short length, or lose it to weight decay.
  Source: Land and Bartolo, 2024.

  Args:
    unused: tokens that are known not to occur, such as reserved ones; at least two.

  Returns:
    the distance of each row from the mean row of `unused`, or from 0 in a table for inputs only,
    over the root mean square of all these distances, [V]; and the tokens that are not farther than
    nine tenths of `unused` are, nearest first.
  """
  _check(table)
  unused = sorted({*map(int, unused)})  # of any length
  if len(unused) < 2 or unused[0] < 0 or unused[-1] >= len(table):
    raise ValueError(
      f"`unused` must be at least two tokens in [0, vocab {len(table)}); got {unused}."
      " Give reserved tokens of the tokenizer."
    )
  center = np.asarray(table[unused], np.float64).mean(axis=0) if is_output else 0.0
  parts = [np.linalg.norm(wide - center, axis=1) for _, wide in _tiles(table)]
  distance = np.concatenate(parts)
  distance /= max(np.sqrt(np.square(distance).mean()), 1e-30)
  limit = np.quantile(distance[unused], 0.9)
  order = np.argsort(distance, kind="stable")
  return distance, order[distance[order] <= limit * (1 + 1e-9)]


def _tiles(table):
  for first in range(0, len(table), TILE):
    yield first, np.asarray(table[first : first + TILE], np.float64)


def _check(table):
  if getattr(table, "ndim", 0) != 2 or not len(table):
    raise ValueError(
      f"`table` must be rows [V, D]; got shape {getattr(table, 'shape', None)}. Give the"
      " weight of an embedding or a head."
    )
