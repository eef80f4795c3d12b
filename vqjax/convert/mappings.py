"""Mappings of tokens to codes from counts, neighbours or trained vectors.

A mapping is a frozen dataclass, so that it can be a field of a config and part of a run's identity.
It is called as `mapping(stats, codes)` and returns an assignment, int32 [V].
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax import assign
from vqjax.assign.rows import unit_rows

__all__ = [
  "Balanced",
  "Brown",
  "ContextKMeans",
  "ContextVectors",
  "Fixed",
  "FrequencyBins",
  "KMeans",
  "Mapping",
  "TokenStats",
]


class TokenStats(NamedTuple):
  """Statistics and vectors of the tokens, from which layers are converted.

  Attributes:
    tokens: the training text.
    counts: number of occurrences of each token in `tokens`, int64 [V].
    output: the trained rows of a dense head, [V, D]; None before training.
    inputs: the vectors of the input embedding, trained or initial, [V, E]; None without a table.
    bias: the trained output bias, which the converted head keeps, [V]; None: there is none.
  """

  tokens: Int[np.ndarray, "N"]
  counts: Int[np.ndarray, "V"]
  output: Float[np.ndarray, "V D"] | None
  inputs: Float[np.ndarray, "V E"] | None
  bias: Float[np.ndarray, "V"] | None = None


Mapping = Callable[[TokenStats, int], Int[np.ndarray, "V"]]


def as_mapping(given: Mapping | ArrayLike) -> Mapping:
  """The mapping, or the `Fixed` mapping of an assignment [V]."""
  return given if callable(given) else Fixed(given)


def _embeddings(stats: TokenStats, inputs: bool) -> Float[np.ndarray, "V D"]:
  """The vectors to cluster: output rows if given, else (or on request) the inputs."""
  rows = stats.inputs if inputs or stats.output is None else stats.output
  if rows is None:
    raise ValueError(
      "`stats.output` or `stats.inputs` must hold vectors to cluster; got None. Use FrequencyBins"
      " or Brown, which need counts only."
    )
  return rows


@dataclasses.dataclass(frozen=True)
class KMeans:
  """K-means on the output embeddings, or on the input embeddings.

  Before training there are no output embeddings, and the input embeddings are clustered.

  Attributes:
    power: the weight of a token is (count + 1)^power; 0 gives all tokens equal weight.
    alone: fraction of the codes, in [0, 1), that hold one frequent token each.
    inputs: cluster the input embeddings even if there are output embeddings.
    seed: seed of the initial centroids.
    iterations: maximum number of Lloyd iterations.
  """

  power: float = 0.0
  alone: float = 0.0
  inputs: bool = False
  seed: int = 0
  iterations: int = 20

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Assignment, int32 [V]; raises ValueError as `assign.frequent_alone` does."""
    return assign.frequent_alone(
      _embeddings(stats, self.inputs),
      codes,
      stats.counts,
      alone=int(self.alone * codes),
      key=jax.random.key(self.seed),
      weights=(stats.counts + 1.0) ** self.power,
      iterations=self.iterations,
    ).assignment


@dataclasses.dataclass(frozen=True)
class Balanced:
  """Balanced k-means on the output embeddings: at most ceil(V/K) tokens on a code.

  Attributes:
    seed: seed of the initial centroids.
    iterations: maximum number of alternations between assignment and means.
  """

  seed: int = 0
  iterations: int = 20

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    """Assignment, int32 [V]; raises ValueError as `assign.balanced_kmeans` does."""
    key = jax.random.key(self.seed)
    rows = _embeddings(stats, inputs=False)
    return assign.balanced_kmeans(rows, codes, key=key, iterations=self.iterations).assignment


@dataclasses.dataclass(frozen=True)
class FrequencyBins:
  """Bins of tokens of similar frequency.

  Attributes:
    equal_mass: the bins have equal total counts; False: equal numbers of tokens.
  """

  equal_mass: bool = False

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    bins = assign.equal_mass if self.equal_mass else assign.equal_count
    return bins(stats.counts, codes)


@dataclasses.dataclass(frozen=True)
class Brown:
  """Classes of least class-bigram loss, by exchange of single tokens.

  Attributes:
    token_bias: p(token | code) is the relative frequency; False: one over the number of tokens.
    sweeps: maximum number of passes over the vocabulary.
  """

  token_bias: bool = False
  sweeps: int = 5

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    pairs = assign.bigrams(stats.tokens, len(stats.counts))
    return assign.exchange(pairs, codes, token_bias=self.token_bias, sweeps=self.sweeps).assignment


@dataclasses.dataclass(frozen=True)
class Fixed:
  """An assignment that ignores the statistics, such as `assign.Random()`.

  Attributes:
    assignment: (vocab, codes) -> int [V], or the array itself.
  """

  assignment: assign.Assignment | ArrayLike

  def __post_init__(self):
    if not callable(self.assignment):
      object.__setattr__(self, "assignment", assign.Given(self.assignment))

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    vocab = len(stats.counts)
    return assign.checked_assignment(self.assignment(vocab, codes), vocab, codes)


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """Tokens that equal others by their digest."""

  digest: bytes
  tokens: np.ndarray = dataclasses.field(compare=False)


def _embedded_contexts(stats: TokenStats, width: int, seed: int) -> Float[np.ndarray, "V D"]:
  tokens = np.ascontiguousarray(stats.tokens)
  digest = hashlib.sha256(f"{tokens.dtype}".encode())
  digest.update(tokens)
  return _context_vectors(_Tokens(digest.digest(), tokens), len(stats.counts), width, seed)


# The trials of a tuning begin from one text, and the vectors take longer than a short trial.
@functools.lru_cache(maxsize=4)
def _context_vectors(text: _Tokens, vocab: int, width: int, seed: int) -> Float[np.ndarray, "V D"]:
  rows = assign.context_vectors(assign.bigrams(text.tokens, vocab), width, seed=seed)
  rows.flags.writeable = False
  return rows


@dataclasses.dataclass(frozen=True)
class ContextVectors:
  """Vectors of the tokens' neighbours in the text, on the scale of a new head.

  They are the embeddings that `ContextKMeans` clusters. Their mean square length is 1, as that of
  rows that `variables.row_init` draws; those of frequent tokens are many times longer, the more so
  where few tokens of the vocabulary occur.

  Attributes:
    seed: seed of the embeddings.
    equal_lengths: whether every vector that is not zero has length 1. A model that normalises its
      hidden states needs it: there the standard deviation of a token's initial logit is the length
      of its row.
  """

  seed: int = 0
  equal_lengths: bool = False

  def __call__(self, stats: TokenStats, width: int) -> Float[np.ndarray, "V D"]:
    """A row of `width` numbers for each token; zeros for one whose neighbours tell nothing.

    Raises:
      ValueError: this holds for all tokens.
    """
    rows = _embedded_contexts(stats, width, self.seed)
    squared = (rows**2).sum(axis=1)
    if not squared.any():
      raise ValueError(
        "`stats.tokens` must have tokens that follow some others more often than by chance; got"
        f" {len(stats.tokens)} tokens of which none does. Give more text, or begin at random."
      )
    return unit_rows(rows) if self.equal_lengths else rows / np.sqrt(squared.mean())


@dataclasses.dataclass(frozen=True)
class ContextKMeans:
  """K-means on embeddings of the tokens from their neighbours in the text.

  Attributes:
    width: width of the embeddings.
    power: the weight of a token is (count + 1)^power.
    alone: fraction of the codes, in [0, 1), that hold one frequent token each.
    seed: seed of the embeddings and of the initial centroids.
    iterations: maximum number of Lloyd iterations.
  """

  width: int = 64
  power: float = 0.5
  alone: float = 0.0
  seed: int = 0
  iterations: int = 20

  def __call__(self, stats: TokenStats, codes: int) -> Int[np.ndarray, "V"]:
    stats = stats._replace(output=_embedded_contexts(stats, self.width, self.seed))
    kmeans = KMeans(power=self.power, alone=self.alone, seed=self.seed, iterations=self.iterations)
    return kmeans(stats, codes)
