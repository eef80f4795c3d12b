"""What a text tells about its tokens: how often they occur, and next to which others."""

# One pass over the ids gives counts [V] and bigrams [V, V], sparse. What layers begin with follows:
#
#   counts    --> log_frequencies [V]              biases of tokens
#   bigrams   --> contexts [V, D]                  rows: the singular vectors of PPMI
#             --> exchanged [V]                    codes and classes, by the exchange algorithm
#   contexts  --> k-means, or products of k-means  groups, and codes of product quantisation
#
# Layers ask for these in `_of_text`. Where only counts are known, codes are bins of frequency, and
# there are no contexts.

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import scipy  # its parts load when they are used
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax.assign.blocks import contiguous, equal_mass, zipf_mass
from vqjax.assign.checks import Assignment, Given, checked_assignment, checked_counts
from vqjax.assign.clusters import by_kmeans
from vqjax.assign.exchange import exchange
from vqjax.assign.groups import in_order, ordered_in_groups
from vqjax.assign.rows import code_means, product_kmeans, unit_rows

__all__ = ["TextStats", "context_vectors"]

MOST = 2**23
"""Number of tokens that are read of a longer text: it bounds the time and the memory."""

STRETCH = 2**16
"""Length of the stretches that are read of a longer text, at equal distances."""

SMOOTHING = 0.1
"""Added to the count of each token, whose bias would be -inf without."""

RANK = 256
"""Largest rank of contexts: a higher one of 50,000 tokens takes minutes."""

POWER_ITERATIONS = 2
"""Power iterations behind contexts that layers begin with; 7 gained 0.02 nats of a training."""

SWEEPS = 3
"""Passes of the exchange over the vocabulary; two more gained 0.005 nats of bigrams."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextStats:
  """Counts and bigrams of a text, from which a layer begins.

  `from_tokens` of a layer makes them of ids and takes them in place of ids, so that a head and an
  embedding share one pass over the text.

  Attributes:
    counts: number of occurrences of each token, int64 [V].
    bigrams: how often token i is followed by token j, int64 [V, V], sparse; None: not known.
  """

  counts: Int[np.ndarray, "V"]
  bigrams: scipy.sparse.csr_array | None = None

  @classmethod
  def of(cls, ids: Any, vocab: int, *, most: int | None = MOST) -> "TextStats":
    """The statistics of a text.

    Args:
      ids: token ids: an array [N] or [rows, N], which may be a memory map, an iterable of such
        arrays, or statistics, which are returned. No bigram joins two rows or two arrays.
      vocab: number of tokens, V.
      most: number of tokens that are read, of a long array in stretches at equal distances, of an
        iterable from its beginning; None: all of them.

    Raises:
      ValueError: the ids are not integers in [0, V), or fewer than two in a row; or the statistics
        are of another vocabulary.
    """
    if isinstance(ids, TextStats):
      checked_counts(ids.counts, vocab)
      return ids
    count_V = np.zeros(vocab, np.int64)
    following = scipy.sparse.csr_array((vocab, vocab), dtype=np.int64)
    for rows in _blocks(ids, most):
      _check_ids(rows, vocab)
      count_V += np.bincount(np.concatenate(rows, axis=None), minlength=vocab)
      first, second = (
        np.concatenate([row[..., part] for row in rows], axis=None).astype(np.int64)
        for part in (slice(None, -1), slice(1, None))
      )
      pairs = np.ones(len(first), np.int64), (first, second)
      following += scipy.sparse.coo_array(pairs, (vocab, vocab)).tocsr()
    if not following.nnz:
      raise ValueError(
        f"`ids` must have at least 2 tokens in a row, for a bigram; got {count_V.sum()} tokens."
        " Give a longer text, or from_counts(counts, ...)."
      )
    return cls(count_V, following)

  @classmethod
  def of_counts(cls, counts: ArrayLike, vocab: int) -> "TextStats":
    """The statistics where only the number of occurrences of each token is known."""
    return cls(checked_counts(counts, vocab))

  @property
  def vocab(self) -> int:
    """The number of tokens, V."""
    return len(self.counts)

  def log_frequencies(self) -> Float[np.ndarray, "V"]:
    """The log-probability of each token in the text, smoothed."""
    smoothed = self.counts + SMOOTHING
    return np.log(smoothed / smoothed.sum()).astype(np.float32)

  def codes(
    self, codes: int, *, token_bias: bool = True, init: Assignment = zipf_mass
  ) -> Int[np.ndarray, "V"]:
    """A code for each token: by exchange, or bins of equal mass where bigrams are not known.

    Where a layer's `init` is not the default, its codes are what that gives.
    """
    if init is not zipf_mass and init is not contiguous:
      return checked_assignment(init(self.vocab, codes), self.vocab, codes)
    if self.bigrams is None:
      return equal_mass(self.counts, codes)
    return _exchanged(self, codes, token_bias)

  def contexts(self, width: int) -> Float[np.ndarray, "V {width}"] | None:
    """Rows of length 1 from the tokens' neighbours; None where bigrams are not known.

    A token that no other one tells apart has a row of zeros.
    """
    return None if self.bigrams is None else _contexts(self, width)

  def products(
    self, codes: int, subspaces: int, width: int
  ) -> tuple[Float[np.ndarray, "M K C"], Int[np.ndarray, "V M"]] | tuple[None, None]:
    """The tables and the codes of product-quantised contexts; None without contexts.

    A vocabulary of fewer tokens than codes has none either.
    """
    if self.bigrams is None or self.vocab < codes:
      return None, None
    return _products(self, codes, subspaces, width)

  def order(self, sizes: Int[np.ndarray, "G"], init: Any = None) -> Int[np.ndarray, "V"] | None:
    """The tokens, group after group: clusters of contexts, or by falling count.

    Where a layer's `init` is an array, that is the order; another function of a key gives None,
    since its order is not known here.
    """
    if isinstance(init, Given):
      return np.asarray(init.table)
    if init not in (None, in_order):
      return None
    if self.bigrams is None:
      return np.argsort(-self.counts, kind="stable").astype(np.int32)
    return _order(self, tuple(np.asarray(sizes).tolist()))

  def weights(self) -> Float[np.ndarray, "V"]:
    """What the error of a token's row counts in clusters: the root of its count."""
    return (self.counts + 1.0) ** 0.5

  def means(
    self, code: Int[np.ndarray, "V"], codes: int, width: int
  ) -> Float[np.ndarray, "K {width}"] | None:
    """The mean context of the tokens on each code, by counts; None without contexts."""
    rows = self.contexts(width)
    return None if rows is None else code_means(rows, self.counts + 1.0, code, codes)


# Kept, since a head and its embedding often ask for the same.
@functools.lru_cache(maxsize=4)
def _exchanged(stats, codes, token_bias):
  return exchange(stats.bigrams, codes, token_bias=token_bias, sweeps=SWEEPS).assignment


@functools.lru_cache(maxsize=2)
def _contexts(stats, width):
  rows = context_vectors(stats.bigrams, width, rank=RANK, iterations=POWER_ITERATIONS)
  return unit_rows(rows).astype(np.float32)


@functools.lru_cache(maxsize=2)
def _products(stats, codes, subspaces, width):
  rows, key = _contexts(stats, width), jax.random.key(0)
  return product_kmeans(rows, codes, subspaces, key=key, weights=stats.weights())


@functools.lru_cache(maxsize=2)
def _order(stats, sizes):
  rows = context_vectors(stats.bigrams, min(64, stats.vocab), iterations=POWER_ITERATIONS)
  clusters = by_kmeans(rows, len(sizes), key=jax.random.key(0), weights=stats.weights())
  return ordered_in_groups(clusters.assignment, stats.counts, np.asarray(sizes)).astype(np.int32)


def _blocks(ids: Any, most: int | None) -> Iterator[list[np.ndarray]]:
  """Lists of arrays of some `STRETCH` · 16 tokens, and of about `most` tokens in all."""
  arrays = ids if isinstance(ids, Iterable) and not hasattr(ids, "shape") else [ids]
  if isinstance(arrays, list | tuple) and arrays and np.ndim(arrays[0]) == 0:
    arrays = [np.asarray(arrays)]
  rest, block = most, []
  for array in arrays:
    for part in _stretches(array, rest):
      block.append(part)
      rest = None if rest is None else rest - part.size
      if sum(x.size for x in block) >= 16 * STRETCH:
        yield block
        block = []
    if rest is not None and rest <= 0:
      break
  if block:
    yield block


def _stretches(array: Any, most: int | None) -> Iterator[np.ndarray]:
  """An array, or stretches of it at equal distances with `most` tokens together."""
  array = array if hasattr(array, "shape") else np.asarray(array)
  if len(array.shape) not in (1, 2):
    raise ValueError(
      f"`ids` must be an array [N] or [rows, N], or an iterable of them; got shape {array.shape}."
      " Give the ids of the text."
    )
  size, total = math.prod(array.shape), array.shape[0]
  if most is None or size <= most:
    yield np.asarray(array)
    return
  length = max(1, STRETCH * total // size)
  for start in np.linspace(0, total - length, max(1, most // STRETCH)).astype(int):
    yield np.asarray(array[start : start + length])


def _check_ids(rows: list[np.ndarray], vocab: int) -> None:
  for row in rows:
    if not np.issubdtype(row.dtype, np.integer):
      raise ValueError(f"`ids` must be integers; got {row.dtype}. Give the ids of a tokenizer.")
    if row.size and (row.min() < 0 or row.max() >= vocab):
      wrong = row[(row < 0) | (row >= vocab)][0]
      raise ValueError(
        f"`ids` must be in [0, {vocab}); got {wrong}. Give the vocab of the tokenizer that made"
        " them, and leave out padding."
      )


def context_vectors(
  bigrams: scipy.sparse.csr_array,
  width: int,
  *,
  seed: int = 0,
  rank: int | None = None,
  iterations: int | None = None,
) -> Float[np.ndarray, "V D"]:
  """Vectors of the tokens from their neighbours in the text.

  The leading singular vectors, scaled by the square roots of the singular values, of the positive
  pointwise mutual information between a token and the tokens before and after it. A random rotation
  then spreads the variance over all `width` dimensions. Source: Levy and Goldberg, Neural word
  embedding as implicit matrix factorization, 2014.

  Args:
    bigrams: how often token i is followed by token j, [V, V].
    width: width of the vectors, D.
    seed: seed of the decomposition and of the rotation.
    rank: number of singular vectors; None: `width`, or V - 1 where that is less.
    iterations: power iterations of the decomposition; None: 7 for a low rank, 4 for others.

  Raises:
    ValueError: there are fewer than two tokens.
  """
  vocab = bigrams.shape[0]
  if vocab < 2:
    raise ValueError(f"`bigrams` must be of two tokens or more; got {vocab}. Give a vocabulary.")
  pairs = scipy.sparse.csr_array(bigrams).astype(np.float64)
  both = scipy.sparse.hstack([pairs, pairs.T.tocsr()]).tocoo()
  row, column = np.asarray(both.sum(axis=1)).ravel(), np.asarray(both.sum(axis=0)).ravel()
  information = np.log(both.data * both.data.sum() / (row[both.row] * column[both.col]))
  positive = scipy.sparse.csr_array(
    (np.maximum(information, 0), (both.row, both.col)), shape=both.shape
  )
  rank = min(width, vocab - 1, width if rank is None else rank)
  left, value = _leading_vectors(positive, rank, seed, iterations)
  rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
  return (left * np.sqrt(value)) @ rotation[:rank]


def _leading_vectors(matrix, rank, seed, iterations):
  """The leading left singular vectors and the singular values of a sparse matrix.

  A random range with power iterations. Source: Halko, Martinsson and Tropp, Finding structure with
  randomness, 2011, Algorithms 4.4 and 5.1.
  """
  if iterations is None:
    iterations = 7 if rank < 0.1 * min(matrix.shape) else 4
  transposed, shape = matrix.T.tocsr(), (matrix.shape[0], rank + 10)
  basis = np.random.RandomState(seed).normal(size=shape)
  # Normalised by LU, which is cheaper than QR and as stable here.
  for _ in range(iterations):
    other, _ = scipy.linalg.lu(transposed @ basis, permute_l=True)
    basis, _ = scipy.linalg.lu(matrix @ other, permute_l=True)
  basis, _ = np.linalg.qr(transposed @ basis)
  _, value, left = np.linalg.svd((matrix @ basis).T, full_matrices=False)
  left, value = left[:rank].T, value[:rank]
  # The sign of a vector is arbitrary; that of its largest number is made positive.
  largest = np.take_along_axis(left, np.abs(left).argmax(axis=0)[None], axis=0)
  return left * np.sign(largest), value
