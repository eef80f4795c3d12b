"""Assignments that minimise a class-bigram loss, by exchange of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy  # its parts load when they are used
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.blocks import by_frequency
from vqjax.assign.checks import check_codes, checked_assignment

__all__ = ["Exchanged", "bigrams", "exchange"]


class Exchanged(NamedTuple):
  """An assignment that `exchange` found, and how its loss fell.

  Attributes:
    assignment: the code of each token, int32 [V].
    nats: loss in nats per token, at the start and after each sweep over the vocabulary.
  """

  assignment: Int[np.ndarray, "V"]
  nats: tuple[float, ...]


def bigrams(tokens: ArrayLike, vocab: int) -> scipy.sparse.csr_array:
  """Number of times that token i is followed by token j, int64 [V, V], sparse.

  Raises:
    ValueError: `tokens` is not one row of at least two integers in [0, V).
  """
  row = np.asarray(tokens)
  if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
    raise ValueError(
      f"`tokens` must be one row of integers; got {row.dtype}{list(row.shape)}. Concatenate the"
      " documents."
    )
  if row.size < 2:
    raise ValueError(
      f"`tokens` must have at least 2 tokens, for a bigram; got {row.size}. Give a longer text."
    )
  outside = np.flatnonzero((row < 0) | (row >= vocab))
  if outside.size:
    raise ValueError(
      f"`tokens` must be in [0, {vocab}); got {row[outside[0]]} at position {outside[0]}. Give the"
      " vocab of the tokenizer that made the tokens."
    )
  row = row.astype(np.int64)
  pairs = row[:-1] * vocab + row[1:]
  pair, count = np.unique(pairs, return_counts=True)
  return scipy.sparse.csr_array((count, (pair // vocab, pair % vocab)), shape=(vocab, vocab))


def exchange(
  counts: scipy.sparse.sparray,
  codes: int,
  *,
  start: ArrayLike | tuple | None = None,
  token_bias: bool = False,
  sweeps: int = 10,
) -> Exchanged:
  """The assignment of least class-bigram loss, by moving one token at a time.

  The loss is -E[log p(c | c') + log p(v | c)] over the bigrams (v', v) with codes c' and c: that of
  a model which knows the previous code only and predicts by relative frequencies. p(v | c) is 1/n
  for n tokens on the code, as in a codebook head without a token bias, or the relative frequency
  within the code, as with the best token bias.

  Tokens are processed by falling frequency, and each moves to the code that lowers the loss most.
  The result is deterministic. A sweep costs O(K · distinct bigrams), and the counts of class
  bigrams are [K, K].

  Source: Martin, Liermann and Ney, "Algorithms for bigram and trigram word clustering", Speech
  Communication 24 (1998), Section 3; its criterion is the one with `token_bias`.

  Args:
    counts: result of `bigrams(tokens, vocab)`, [V, V].
    codes: number of codes, K.
    start: initial assignment, integers [V]; None: the K - 1 most frequent tokens have a code each
      and all others the last code, as in the source.
    token_bias: p(v | c) is the relative frequency, as in a head with a token bias.
    sweeps: maximum number of passes over the vocabulary; it ends early when no token moves.

  Raises:
    ValueError: the counts are not square, are not integers or are all zero; there are more codes
      than tokens; `start` is not a valid assignment.
  """
  vocab = _checked_vocab(counts)
  check_codes(vocab, codes)
  # Counts are subtracted when a token leaves a code, so that they must be signed.
  following = scipy.sparse.csr_array(counts).astype(np.int64)
  if start is None:
    table = np.full(vocab, codes - 1)
    table[by_frequency(following.sum(axis=0))[: codes - 1]] = np.arange(codes - 1)
  else:
    table = checked_assignment(start, vocab, codes).copy()
  clusters = _Clusters(following, table, codes, token_bias)
  order = by_frequency(clusters.predicted_V).tolist()
  nats = [clusters.loss()]
  for _ in range(sweeps):
    moved = sum(clusters.move(token) for token in order)
    nats.append(clusters.loss())
    if not moved:
      break
  return Exchanged(clusters.table.astype(np.int32), tuple(nats))


def _checked_vocab(counts: scipy.sparse.sparray) -> int:
  rows, columns = counts.shape
  if rows != columns or not np.issubdtype(counts.dtype, np.integer):
    raise ValueError(
      f"`counts` must be integers [V, V]; got {counts.dtype}{list(counts.shape)}. Build them with"
      " assign.bigrams(tokens, vocab)."
    )
  if counts.sum() == 0 or counts.min() < 0:
    raise ValueError(
      "`counts` must be at least 0 and not all zero; got other numbers. Build them with"
      " assign.bigrams(tokens, vocab)."
    )
  return rows


def _sparse_rows(matrix: scipy.sparse.csr_array) -> list[tuple[np.ndarray, np.ndarray]]:
  """The columns and counts of each row, without the diagonal."""
  matrix = matrix - scipy.sparse.diags_array(matrix.diagonal(), dtype=matrix.dtype)
  matrix = scipy.sparse.csr_array(matrix)
  matrix.eliminate_zeros()
  ends = matrix.indptr[1:-1]
  return list(zip(np.split(matrix.indices, ends), np.split(matrix.data, ends), strict=True))


class _Clusters:
  """The codes of all tokens, and the counts from which the loss is computed.

  pairs_KK[g, h] counts code h after code g; a transposed copy makes its columns contiguous.
  `before` counts a token or code as the first of a bigram, `predicted` as the second.
  """

  def __init__(
    self,
    following: scipy.sparse.csr_array,
    table: Int[np.ndarray, "V"],
    codes: int,
    token_bias: bool,
  ):
    self.table = table.astype(np.int64)
    self.codes, self.token_bias = codes, token_bias
    self.before_V, self.predicted_V = following.sum(axis=1), following.sum(axis=0)
    self.itself_V = following.diagonal()
    self.next, self.previous = _sparse_rows(following), _sparse_rows(following.T.tocsr())
    members = scipy.sparse.csr_array(
      (np.ones(len(table), np.int64), (self.table, np.arange(len(table)))), (codes, len(table))
    )
    self.pairs_KK = (members @ following @ members.T).toarray()
    self.transposed_KK = self.pairs_KK.T.copy()
    self.before_K, self.predicted_K = self.pairs_KK.sum(axis=1), self.pairs_KK.sum(axis=0)
    self.size_K = np.bincount(self.table, minlength=codes)
    whole = np.arange(following.sum() + 1, dtype=np.float64)
    self.n_log_n = whole * np.log(np.maximum(whole, 1))

  def loss(self) -> float:
    """The loss in nats per token."""
    phi = self.n_log_n
    gained = phi[self.pairs_KK].sum() - phi[self.before_K].sum()
    gained += self._within(self.predicted_K, self.size_K).sum()
    if self.token_bias:
      gained += phi[self.predicted_V].sum()
    return float(-gained / self.predicted_K.sum())

  def _within(self, predicted_K, size_K):
    """The log-likelihood within each code, up to a constant that no exchange changes."""
    if self.token_bias:
      return -self.n_log_n[predicted_K]
    return -predicted_K * np.log(np.maximum(size_K, 1))

  def move(self, token: int) -> bool:
    """Move a token to its best code; return whether the code changed."""
    old = self.table[token]
    previous, count_p = self._by_code(*self.previous[token])
    following, count_f = self._by_code(*self.next[token])
    self._add(token, old, previous, -count_p, following, -count_f, -1)
    gain_K = self._gain(token, previous, count_p, following, count_f)
    best = gain_K.argmax()
    # A token stays if the gain is no more than rounding, so that ties do not move it forever.
    if gain_K[best] <= gain_K[old] + 1e-6:
      best = old
    self._add(token, best, previous, count_p, following, count_f, 1)
    self.table[token] = best
    return bool(best != old)

  def _by_code(self, tokens, counts):
    count_K = np.bincount(self.table[tokens], counts, self.codes).astype(np.int64)
    some = np.flatnonzero(count_K)
    return some, count_K[some]

  def _add(self, token, code, previous, count_p, following, count_f, sign):
    for pairs, column, row, count_c, count_r in (
      (self.pairs_KK, previous, following, count_p, count_f),
      (self.transposed_KK, following, previous, count_f, count_p),
    ):
      pairs[column, code] += count_c
      pairs[code, row] += count_r
      pairs[code, code] += sign * self.itself_V[token]
    self.before_K[code] += sign * self.before_V[token]
    self.predicted_K[code] += sign * self.predicted_V[token]
    self.size_K[code] += sign

  def _gain(self, token, previous, count_p, following, count_f):
    """The gain in log-likelihood if the token, now without a code, joins each code."""
    phi = self.n_log_n
    gain_K = np.zeros(self.codes)
    own_K = self.pairs_KK.diagonal()
    joined_K = own_K + self.itself_V[token]
    for pairs, codes, counts in (
      (self.pairs_KK, previous, count_p),
      (self.transposed_KK, following, count_f),
    ):
      rows = pairs[codes]
      gain_K += (phi[rows + counts[:, None]] - phi[rows]).sum(axis=0)
      # Bigrams of a code with itself change by three counts at once and are added below.
      gain_K[codes] -= phi[own_K[codes] + counts] - phi[own_K[codes]]
      joined_K[codes] += counts
    gain_K += phi[joined_K] - phi[own_K]
    gain_K -= phi[self.before_K + self.before_V[token]] - phi[self.before_K]
    joined = self.predicted_K + self.predicted_V[token], self.size_K + 1
    return gain_K + self._within(*joined) - self._within(self.predicted_K, self.size_K)
