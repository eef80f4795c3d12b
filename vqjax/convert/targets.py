"""Variables of compressed heads from the rows of a dense head.

A target is a frozen dataclass that is called as `target(stats, head)` and returns the head's own
variables, {"params": {...}, "codes": {...}}, in NumPy. Each target makes one class of head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import checked_rows
from vqjax.assign.multiple import code_dtype
from vqjax.assign.rows import code_means, low_rank, nearest_codes
from vqjax.convert.from_table import product_codes
from vqjax.convert.mappings import Mapping, TokenStats, as_mapping
from vqjax.heads import (
  CodebookHead,
  DenseHead,
  Head,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
  UnigramBias,
)

__all__ = [
  "ToCodebook",
  "ToDense",
  "ToLearnedCodebook",
  "ToLearnedProduct",
  "ToLowRank",
  "ToProduct",
  "ToResidual",
]


def check_kind(head: Head, kind: type[Head], target: Any) -> None:
  """Raise ValueError if `head` is not of the class that `target` makes."""
  if not isinstance(head, kind):
    raise ValueError(
      f"`head` must be a {kind.__name__} for {type(target).__name__}; got a {type(head).__name__}."
      " Use the target of that class."
    )


def unigram_bias(stats: TokenStats, code: Int[np.ndarray, "V"]) -> Float[np.ndarray, "V"]:
  """The token bias that divides a code's probability by the counts of its tokens."""
  return np.asarray(UnigramBias(stats.counts, code)(None, stats.counts.shape))


def _bias(stats: TokenStats, head: Head) -> dict[str, np.ndarray]:
  """The trained output bias, or zeros, as the head's own."""
  name = "token_bias" if hasattr(head, "token_bias") else "use_bias"
  if getattr(head, name):
    bias = np.zeros(head.vocab) if stats.bias is None else stats.bias
    return {"token_bias" if name == "token_bias" else "bias": bias}
  if stats.bias is not None:
    raise ValueError(
      f"`head` must have a bias, because the rows were trained with one; got a"
      f" {type(head).__name__} without. Give {name}=True."
    )
  return {}


def _code_bias(stats: TokenStats, head: Head, code: Int[np.ndarray, "V"]) -> dict[str, np.ndarray]:
  """The trained output bias of a head with shared codes, or that of the counts."""
  if head.token_bias and stats.bias is None:
    return {"token_bias": unigram_bias(stats, code)}
  return _bias(stats, head)


@dataclasses.dataclass(frozen=True)
class ToDense:
  """`DenseHead` variables: the rows themselves."""

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, DenseHead, self)
    return {"params": {"weight": stats.output} | _bias(stats, head)}


@dataclasses.dataclass(frozen=True)
class ToCodebook:
  """`CodebookHead` variables: a codeword is the mean row of its tokens by counts.

  If the head has a token bias, it is the trained one; without one, the tokens of a code share its
  probability as their counts do. Source: VQ-Logits, Section 3.3, Option A.

  Attributes:
    mapping: assigns the tokens to codes; or the assignment itself, an array [V].
  """

  mapping: Mapping | ArrayLike

  def __post_init__(self):
    object.__setattr__(self, "mapping", as_mapping(self.mapping))

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, CodebookHead, self)
    code = self.mapping(stats, head.codes)
    params = {"codebook": code_means(stats.output, stats.counts + 1.0, code, head.codes)}
    params |= _code_bias(stats, head, code)
    return {"params": params, "codes": {"assignment": code}}


@dataclasses.dataclass(frozen=True)
class ToResidual:
  """`ResidualCodebookHead` variables: codewords and the best low-rank remainder.

  The low-rank part approximates the rows minus their codewords in squared error, weighted by
  (count + 1)^power.

  Attributes:
    mapping: assigns the tokens to codes; or the assignment itself, an array [V].
    power: exponent of the weights.
  """

  mapping: Mapping | ArrayLike
  power: float = 0.5

  def __post_init__(self):
    object.__setattr__(self, "mapping", as_mapping(self.mapping))

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, ResidualCodebookHead, self)
    code = self.mapping(stats, head.codes)
    weights = (stats.counts + 1.0) ** self.power
    codebook = code_means(stats.output, weights, code, head.codes)
    low, up = low_rank(stats.output - codebook[code], weights, head.rank)
    params = {"codebook": codebook, "low": low, "up": up} | _bias(stats, head)
    return {"params": params, "codes": {"assignment": code.astype(code_dtype(head.codes))}}


@dataclasses.dataclass(frozen=True)
class ToLowRank:
  """`LowRankHead` variables: the best approximation of the rows in squared error.

  Attributes:
    power: the weight of a row is (count + 1)^power.
  """

  power: float = 0.5

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, LowRankHead, self)
    weights = (stats.counts + 1.0) ** self.power
    low, up = low_rank(stats.output, weights, head.rank)
    return {"params": {"weight": low, "down": up} | _bias(stats, head)}


@dataclasses.dataclass(frozen=True)
class ToProduct:
  """The variables of a `ProductHead`: weighted k-means of the rows in each subspace.

  Attributes:
    power: the weight of a row is (count + 1)^power: frequent tokens are approximated best.
    seed: seed of the initial centroids.
    iterations: maximum number of Lloyd iterations.
  """

  power: float = 1.0
  seed: int = 0
  iterations: int = 25

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, ProductHead, self)
    tables, codes = self.clustered(stats, head)
    params = {"tables": tables} | _bias(stats, head)
    return {"params": params, "codes": {"codes": codes.astype(code_dtype(head.codes))}}

  def clustered(self, stats: TokenStats, head: Head) -> tuple[np.ndarray, np.ndarray]:
    """The codebooks [M, K, D/M] and the codes [V, M]."""
    return product_codes(
      checked_rows(stats.output, head.codes),
      head.codes,
      head.subspaces,
      key=jax.random.key(self.seed),
      weights=(stats.counts + 1.0) ** self.power,
      iterations=self.iterations,
    )


@dataclasses.dataclass(frozen=True)
class ToLearnedProduct:
  """The variables of a `LearnedProductHead`, whose latent rows are the dense rows.

  Attributes:
    start: makes the initial codebooks.
  """

  start: ToProduct = dataclasses.field(default_factory=ToProduct)

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, LearnedProductHead, self)
    tables, _ = self.start.clustered(stats, head)
    return {"params": {"tables": tables, "latent": stats.output} | _bias(stats, head)}


@dataclasses.dataclass(frozen=True)
class ToLearnedCodebook:
  """`LearnedCodebookHead` variables whose candidates are the nearest codewords.

  Attributes:
    mapping: assigns each token its first candidate, whose initial score is 1 where others have 0;
      or the assignment itself, an array [V]. The codebook is that of `ToCodebook`.
  """

  mapping: Mapping | ArrayLike

  def __post_init__(self):
    object.__setattr__(self, "mapping", as_mapping(self.mapping))

  def __call__(self, stats: TokenStats, head: Head) -> dict:
    check_kind(head, LearnedCodebookHead, self)
    code = self.mapping(stats, head.codes)
    codebook = code_means(stats.output, stats.counts + 1.0, code, head.codes)
    candidates = nearest_codes(stats.output, codebook, code, head.candidates)
    choice = np.zeros(candidates.shape)
    choice[:, 0] = 1  # the mapping's code begins as the most likely one
    params = {"codebook": codebook, "choice": choice}
    params |= _code_bias(stats, head, code)
    return {"params": params, "codes": {"candidates": candidates.astype(code_dtype(head.codes))}}
