"""Which codes leave the least loss to a model that knows the code before and predicts the next?"""

from typing import NamedTuple

import numpy as np
import scipy.sparse
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.blocks import by_frequency
from vqjax.assign.table import check_codes, checked


class Exchanged(NamedTuple):
  """An assignment found by exchange.

  Attributes:
    assignment: the code of each token, int32 [V].
    nats: the bound, in nats a token: of the start, then after each sweep over the vocabulary.
  """

  assignment: Int[np.ndarray, "V"]
  nats: tuple[float, ...]


def bigrams(tokens: ArrayLike, vocab: int) -> scipy.sparse.csr_array:
  """How often each token is followed by each other one: int64 [V, V], sparse.

  Raises:
    ValueError: no row of integers, fewer than two of them, or one outside the vocabulary.
  """
  row = np.asarray(tokens)
  if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
    raise ValueError(f"tokens of shape {row.shape} and {row.dtype}; give one row of integers")
  if row.size < 2:
    raise ValueError(f"{row.size} tokens hold no bigram; give at least 2")
  outside = np.flatnonzero((row < 0) | (row >= vocab))
  if outside.size:
    raise ValueError(
      f"token {row[outside[0]]} at {outside[0]} is outside the vocabulary of {vocab}; count with"
      " the tokenizer that made the tokens"
    )
  row = row.astype(np.int64)
  pairs = row[:-1] * vocab + row[1:]
  pair, count = np.unique(pairs, return_counts=True)
  return scipy.sparse.csr_array((count, (pair // vocab, pair % vocab)), shape=(vocab, vocab))


def exchange(
  counts: scipy.sparse.sparray,
  codes: int,
  *,
  start: ArrayLike | None = None,
  token_bias: bool = False,
  sweeps: int = 10,
) -> Exchanged:
  """Codes that minimise the loss of the class-bigram model, by moving one token at a time.

  The bound is -E[log p(c | c') + log p(v | c)] over all bigrams (v', v) of the counts, c' and c
  their codes: what a body reaches that knows only the code before and predicts the next one as well
  as relative frequencies allow. p(v | c) is 1/n for n tokens on the code, as in a codebook head
  without a token bias, or the relative frequency inside the code, as with the best token bias.

  Tokens are visited by falling frequency; each moves to the code that lowers the bound most.
  Deterministic. A sweep costs O(K · distinct bigrams); the class bigrams are [K, K].

  Source: Martin, Liermann and Ney, "Algorithms for bigram and trigram word clustering", Speech
  Communication 24 (1998), Section 3; its criterion is the one with `token_bias`.

  Args:
    counts: of `bigrams(tokens, vocab)`, [V, V].
    codes: number of codes, K.
    start: the codes to start from, integers [V]; None: the K - 1 most frequent tokens alone and all
      others on the last code, as in the source.
    token_bias: whether the head will have a token bias.
    sweeps: visits of each token at most; it ends earlier where nothing moves.

  Raises:
    ValueError: counts that are not square or empty, more codes than tokens, a wrong start.
  """
  vocab = _checked_vocab(counts)
  check_codes(vocab, codes)
  # Unsigned counts cannot be taken away.
  following = scipy.sparse.csr_array(counts).astype(np.int64)
  table = _first_alone(following, codes) if start is None else checked(start, vocab, codes).copy()
  clusters = _Clusters(following, table, codes, token_bias)
  order = by_frequency(clusters.predicted_V).tolist()
  nats = [clusters.bound()]
  for _ in range(sweeps):
    moved = sum(clusters.visit(token) for token in order)
    nats.append(clusters.bound())
    if not moved:
      break
  return Exchanged(clusters.table.astype(np.int32), tuple(nats))


def _checked_vocab(counts: scipy.sparse.sparray) -> int:
  rows, columns = counts.shape
  if rows != columns or not np.issubdtype(counts.dtype, np.integer):
    raise ValueError(
      f"bigram counts of shape {counts.shape} and {counts.dtype}; make them with"
      " assign.bigrams(tokens, vocab)"
    )
  if counts.sum() == 0 or counts.min() < 0:
    raise ValueError("bigram counts are all zero or negative; count the bigrams of some text")
  return rows


def _first_alone(following: scipy.sparse.csr_array, codes: int) -> Int[np.ndarray, "V"]:
  table = np.full(following.shape[0], codes - 1)
  table[by_frequency(following.sum(axis=0))[: codes - 1]] = np.arange(codes - 1)
  return table


def _sparse_rows(matrix: scipy.sparse.csr_array) -> list[tuple[np.ndarray, np.ndarray]]:
  """The columns and counts of each row, without its diagonal."""
  matrix = matrix - scipy.sparse.diags_array(matrix.diagonal(), dtype=matrix.dtype)
  matrix = scipy.sparse.csr_array(matrix)
  matrix.eliminate_zeros()
  ends = matrix.indptr[1:-1]
  return list(zip(np.split(matrix.indices, ends), np.split(matrix.data, ends), strict=True))


class _Clusters:
  """The codes of all tokens, and the counts that the bound is a function of.

  pairs_KK[g, h] counts code h after code g, and its transpose is kept for reading columns. `before`
  counts a token or code as the first of a bigram, `predicted` as the second.
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

  def bound(self) -> float:
    """The loss in nats a token."""
    phi = self.n_log_n
    gained = phi[self.pairs_KK].sum() - phi[self.before_K].sum()
    gained += self._within(self.predicted_K, self.size_K).sum()
    if self.token_bias:
      gained += phi[self.predicted_V].sum()
    return float(-gained / self.predicted_K.sum())

  def _within(self, predicted_K, size_K):
    """The log-likelihood inside each code, less what no exchange changes."""
    if self.token_bias:
      return -self.n_log_n[predicted_K]
    return -predicted_K * np.log(np.maximum(size_K, 1))

  def visit(self, token: int) -> bool:
    """Moves a token to its best code; whether that is another one than it had."""
    old = self.table[token]
    previous, count_p = self._by_code(*self.previous[token])
    following, count_f = self._by_code(*self.next[token])
    self._add(token, old, previous, -count_p, following, -count_f, -1)
    gain_K = self._gain(token, previous, count_p, following, count_f)
    best = gain_K.argmax()
    # What rounding makes of a tie is no reason to move.
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
    """What the log-likelihood gains where the token, which is on no code now, joins each code."""
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
      # A code's bigrams with itself change by both sides and the token's own at once: see below.
      gain_K[codes] -= phi[own_K[codes] + counts] - phi[own_K[codes]]
      joined_K[codes] += counts
    gain_K += phi[joined_K] - phi[own_K]
    gain_K -= phi[self.before_K + self.before_V[token]] - phi[self.before_K]
    joined = self.predicted_K + self.predicted_V[token], self.size_K + 1
    return gain_K + self._within(*joined) - self._within(self.predicted_K, self.size_K)
