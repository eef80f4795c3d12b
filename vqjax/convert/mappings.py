"""From what a run knows, which code does each token get?

A mapping is a frozen dataclass, so that it stands in a config and in a run's identity; it is called
with what is known and the number of codes, and gives int32 [V].
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse
from jaxtyping import Float, Int
from sklearn.utils.extmath import randomized_svd

from vqjax import assign


class TokenStats(NamedTuple):
  """What a mapping may look at.

  Attributes:
    tokens: of the training text.
    counts: how often each token occurs in it, int64 [V].
    output: the trained rows of a dense head, [V, D]; None from scratch.
    inputs: the vectors of the input embedding, [V, D]: trained ones, or from scratch the initial.
  """

  tokens: Int[np.ndarray, "N"]
  counts: Int[np.ndarray, "V"]
  output: Float[np.ndarray, "V D"] | None
  inputs: Float[np.ndarray, "V E"] | None


Mapping = Callable[[TokenStats, int], Int[np.ndarray, "V"]]


def _embeddings(known: TokenStats, inputs: bool) -> Float[np.ndarray, "V D"]:
  rows = known.inputs if inputs or known.output is None else known.output
  if rows is None:
    raise ValueError("there are no embeddings to cluster; use FrequencyBins or Brown, of counts")
  return rows


@dataclasses.dataclass(frozen=True)
class KMeans:
  """K-means on output embeddings; on the input's where asked for, or from scratch.

  Attributes:
    power: a token's weight is (count + 1)^power; 0: all alike.
    alone: part of the codes, in [0, 1), that one frequent token each has; the tail is clustered.
    inputs: cluster the input embeddings.
    seed: of the seeding.
    iterations: of Lloyd's algorithm.
  """

  power: float = 0.0
  alone: float = 0.0
  inputs: bool = False
  seed: int = 0
  iterations: int = 20

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]; ValueError as `assign.frequent_alone`."""
    weights = (known.counts + 1.0) ** self.power
    return assign.frequent_alone(
      *(_embeddings(known, self.inputs), codes, known.counts, int(self.alone * codes)),
      key=jax.random.key(self.seed),
      weights=weights,
      iterations=self.iterations,
    ).assignment


@dataclasses.dataclass(frozen=True)
class Balanced:
  """Balanced k-means on output embeddings: no code has more than ceil(V/K) tokens.

  Attributes:
    seed: of the seeding.
    iterations: of the alternation.
  """

  seed: int = 0
  iterations: int = 20

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]; ValueError as `assign.balanced_kmeans`."""
    key = jax.random.key(self.seed)
    rows = _embeddings(known, inputs=False)
    return assign.balanced_kmeans(rows, codes, key=key, iterations=self.iterations).assignment


@dataclasses.dataclass(frozen=True)
class FrequencyBins:
  """Tokens of like frequency on one code.

  Attributes:
    equal_mass: bins of equal total count; False: of equally many tokens.
  """

  equal_mass: bool = False

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    bins = assign.equal_mass if self.equal_mass else assign.equal_count
    return bins(known.counts, codes)


@dataclasses.dataclass(frozen=True)
class Brown:
  """Classes that minimise the loss of a class-bigram model, by exchange of single tokens.

  Attributes:
    token_bias: whether a token's share of its code is its frequency, or one over its tokens.
    sweeps: passes over the vocabulary, at most.
  """

  token_bias: bool = False
  sweeps: int = 5

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    pairs = assign.bigrams(known.tokens, len(known.counts))
    return assign.exchange(pairs, codes, token_bias=self.token_bias, sweeps=self.sweeps).assignment


@dataclasses.dataclass(frozen=True)
class Fixed:
  """An assignment that looks at nothing: `assign.Random()`, `assign.FrequentAlone()`, ...

  Attributes:
    assignment: (vocab, codes) -> int [V].
  """

  assignment: assign.Assignment

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    vocab = len(known.counts)
    return assign.checked(self.assignment(vocab, codes), vocab, codes)


def contexts(known: TokenStats, width: int, seed: int) -> Float[np.ndarray, "V D"]:
  """Embeddings of tokens by their neighbours in the text: no trained model is needed.

  The leading singular vectors, each as long as the root of its value, of the positive pointwise
  mutual information of a token with the tokens before and after it; then turned at random, so that
  no part of the width holds more than another. Source: Levy and Goldberg, Neural word embedding as
  implicit matrix factorization, 2014.
  """
  pairs = assign.bigrams(known.tokens, len(known.counts)).tocsr().astype(np.float64)
  both = scipy.sparse.hstack([pairs, pairs.T.tocsr()]).tocoo()
  row, column = np.asarray(both.sum(axis=1)).ravel(), np.asarray(both.sum(axis=0)).ravel()
  information = np.log(both.data * both.data.sum() / (row[both.row] * column[both.col]))
  positive = scipy.sparse.csr_array(
    (np.maximum(information, 0), (both.row, both.col)), shape=both.shape
  )
  rank = min(width, len(known.counts) - 1)
  left, value, _ = randomized_svd(positive, rank, random_state=seed)
  turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
  return np.pad(left * np.sqrt(value), ((0, 0), (0, width - rank))) @ turn


@dataclasses.dataclass(frozen=True)
class ContextKMeans:
  """K-means on embeddings of the tokens by their neighbours in the text.

  Attributes:
    width: of the embeddings.
    power: a token's weight is (count + 1)^power.
    alone: part of the codes, in [0, 1), that one frequent token each has; the tail is clustered.
    seed: of the seeding.
    iterations: of Lloyd's algorithm.
  """

  width: int = 64
  power: float = 0.5
  alone: float = 0.0
  seed: int = 0
  iterations: int = 20

  def __call__(self, known: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    found = known._replace(output=contexts(known, self.width, self.seed))
    return KMeans(self.power, self.alone, False, self.seed, self.iterations)(found, codes)
