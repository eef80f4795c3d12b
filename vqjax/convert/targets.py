"""Which variables does a compressed head begin with, given the rows of a dense one?

A target is a frozen dataclass that is called with what is known and the head, and gives the head's
own variables, {"params": {...}, "codes": {...}}, in NumPy. Each is for one kind of head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from vqjax.assign.multiple import code_dtype
from vqjax.assign.table import checked_rows
from vqjax.convert.mappings import Mapping, TokenStats
from vqjax.heads import (
  CodebookHead,
  Head,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
  UnigramBias,
)
from vqjax.ops.kmeans import kmeans


def check_kind(head: Head, kind: type[Head], target: Any) -> None:
  """TypeError where a target is for another kind of head."""
  if not isinstance(head, kind):
    raise TypeError(
      f"{type(target).__name__} gives a {kind.__name__} its variables, not a"
      f" {type(head).__name__}; give the conversion that is for it"
    )


def _means(
  rows: Float[np.ndarray, "V D"],
  weights: Float[np.ndarray, "V"],
  code: Int[np.ndarray, "V"],
  k: int,
) -> Float[np.ndarray, "K D"]:
  """The weighted mean of the rows on each code; 0 for a code without tokens."""
  mass = np.bincount(code, weights, k)
  sums = np.zeros((k, rows.shape[1]))
  np.add.at(sums, code, rows * weights[:, None])
  return sums / np.where(mass > 0, mass, 1)[:, None]


def _own_bias(known: TokenStats, code: Int[np.ndarray, "V"]) -> Float[np.ndarray, "V"]:
  return np.asarray(UnigramBias(known.counts, code)(None, known.counts.shape))


@dataclasses.dataclass(frozen=True)
class ToCodebook:
  """A codebook head: the mapping's codes, each at the mean row of its tokens by their counts.

  A token bias begins so that the tokens of a code share its mass by their counts. Source:
  VQ-Logits, Section 3.3, Option A.

  Attributes:
    mapping: how tokens get their codes.
  """

  mapping: Mapping

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, CodebookHead, self)
    code = self.mapping(known, head.codes)
    params = {"codebook": _means(known.output, known.counts + 1.0, code, head.codes)}
    if head.token_bias:
      params["token_bias"] = _own_bias(known, code)
    return {"params": params, "codes": {"assignment": code}}


@dataclasses.dataclass(frozen=True)
class ToResidual:
  """A codebook head with a low-rank part: what the codes leave of the rows, to the given rank.

  Its best approximation by squared error, weighted by (count + 1)^power.

  Attributes:
    mapping: how tokens get their codes.
    power: of the weights of the low-rank approximation.
  """

  mapping: Mapping
  power: float = 0.5

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, ResidualCodebookHead, self)
    code = self.mapping(known, head.codes)
    weights = (known.counts + 1.0) ** self.power
    codebook = _means(known.output, weights, code, head.codes)
    low, up = _low_rank(known.output - codebook[code], weights, head.rank)
    params = {"codebook": codebook, "low": low, "up": up} | _zero_bias(head)
    return {
      "params": params,
      "codes": {"assignment": code.astype(code_dtype(head.codes))},
    }


def _low_rank(rows, weights, rank) -> tuple[np.ndarray, np.ndarray]:
  """(low [V, R], up [R, D]) whose product is nearest to the rows, row v weighted by weights[v]."""
  rows = np.asarray(rows, np.float64)
  second = (rows * weights[:, None]).T @ rows
  up = np.linalg.eigh(second)[1][:, ::-1][:, :rank].T
  return rows @ up.T, up


@dataclasses.dataclass(frozen=True)
class ToLowRank:
  """A low-rank head: the best approximation of the rows, weighted by (count + 1)^power.

  Attributes:
    power: of the weights.
  """

  power: float = 0.5

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, LowRankHead, self)
    weights = (known.counts + 1.0) ** self.power
    low, up = _low_rank(known.output, weights, head.rank)
    params = {"weight": low, "down": up}
    if head.use_bias:
      params["bias"] = np.zeros(len(low))
    return {"params": params}


@dataclasses.dataclass(frozen=True)
class ToProduct:
  """A product head: k-means of the rows in each subspace, weighted by (count + 1)^power.

  Attributes:
    power: of the weights: frequent tokens get sub-vectors near to their own.
    seed: of the seeding.
    iterations: of Lloyd's algorithm.
  """

  power: float = 1.0
  seed: int = 0
  iterations: int = 25

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, ProductHead, self)
    tables, codes = self.clustered(known, head)
    params = {"tables": tables} | _zero_bias(head)
    return {"params": params, "codes": {"codes": codes.astype(code_dtype(head.codes))}}

  def clustered(self, known: TokenStats, head: Head) -> tuple[np.ndarray, np.ndarray]:
    """Tables [M, K, D/M] and codes [V, M]."""
    rows = checked_rows(known.output, head.codes)
    weights = jnp.asarray((known.counts + 1.0) ** self.power, jnp.float32)
    keys = jax.random.split(jax.random.key(self.seed), head.subspaces)
    found = [
      kmeans(key, jnp.asarray(part), head.codes, weights=weights, iterations=self.iterations)
      for key, part in zip(keys, np.split(rows, head.subspaces, axis=1))
    ]
    tables = np.stack([np.asarray(part.centers) for part in found])
    return tables, np.stack([np.asarray(part.assignment) for part in found], axis=1)


def _zero_bias(head) -> dict:
  return {"token_bias": np.zeros(head.vocab)} if head.token_bias else {}


@dataclasses.dataclass(frozen=True)
class ToLearnedProduct:
  """A product head that goes on to learn its codes: the dense rows are its latent rows.

  Attributes:
    start: the tables that it begins with.
  """

  start: ToProduct = dataclasses.field(default_factory=ToProduct)

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, LearnedProductHead, self)
    tables, _ = self.start.clustered(known, head)
    return {"params": {"tables": tables, "latent": known.output} | _zero_bias(head)}


@dataclasses.dataclass(frozen=True)
class ToLearnedCodebook:
  """A codebook head that goes on to learn its mapping: the candidates are the nearest codes.

  Attributes:
    mapping: the first candidate of each token; the codebook is that of `ToCodebook`.
    lead: how much higher the first candidate's choice begins than the others'.
  """

  mapping: Mapping
  lead: float = 1.0

  def __call__(self, known: TokenStats, head: Head) -> dict:
    """The head's variables."""
    check_kind(head, LearnedCodebookHead, self)
    code = self.mapping(known, head.codes)
    codebook = _means(known.output, known.counts + 1.0, code, head.codes)
    candidates = _candidates(known.output, codebook, code, head.candidates)
    choice = np.zeros(candidates.shape)
    choice[:, 0] = self.lead
    params = {"codebook": codebook, "choice": choice}
    if head.token_bias:
      params["token_bias"] = _own_bias(known, code)
    return {"params": params, "codes": {"candidates": candidates.astype(code_dtype(head.codes))}}


def _candidates(rows, codebook, code, count, chunk=4096) -> Int[np.ndarray, "V C"]:
  """The code of each row, and the nearest others."""
  found = []
  for start in range(0, len(rows), chunk):
    part, own = rows[start : start + chunk], code[start : start + chunk]
    distance = (codebook**2).sum(axis=1) - 2 * part @ codebook.T
    distance[np.arange(len(part)), own] = -np.inf
    near = np.argpartition(distance, count - 1, axis=1)[:, :count]
    order = np.take_along_axis(distance, near, axis=1).argsort(axis=1, kind="stable")
    found.append(np.take_along_axis(near, order, axis=1))
  return np.concatenate(found)
