"""What other projects make of a trained table, at 1/16 of its bytes or as near as they come.

All have what this library's forms have: the counts of tokens, and the second moments of hidden
states and of gradients by input vectors. None is trained again.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.studies.comparison.compressed import DIVISOR, SixteenthOfBytes, TrainedTable
from vqjax.tables.coded import probabilities, row_group_steps


class _Rounded(SixteenthOfBytes):
  """Other rows in place of the table, which are float32 where the model computes."""

  def settings(self) -> dict[str, Any]:
    """The method with its fields, and the size."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    own = {name: value for name, value in fields.items() if name not in ("of", "label")}
    return {"method": type(self).__name__, "divisor": DIVISOR, **own}

  @abc.abstractmethod
  def rows(self, table: TrainedTable) -> tuple[np.ndarray, float]:
    """Return the rows [V, D] and their bytes, without the biases."""

  def compressed(self, table: TrainedTable) -> tuple[nn.Module, Mapping[str, Any], int]:
    rows, used = self.rows(table)
    made = {"params": {"weight": np.asarray(rows, np.float32)}}
    replaced = table.replaced(made, table.model.head, table.model.embedding)
    return *replaced, math.ceil(used) + 2 * len(rows)


@dataclasses.dataclass(frozen=True)
class UniformBlocks(_Rounded):
  """Integers of a few bits, and a float16 scale for each block of a row: the best of 24 scales.

  Attributes:
    bits: of an integer. 4 levels lie at ±1/2 and ±3/2, more of them at whole numbers.
    block: numbers that share a scale; 0: a row.
  """

  bits: int = 2
  block: int = 0

  def rows(self, table: TrainedTable) -> tuple[np.ndarray, float]:
    weight = table.weight
    size = self.block or weight.shape[1]
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % size)))
    blocks = padded.reshape(len(weight), -1, size)
    shift, most = (0.5, 1.5) if self.bits == 2 else (0.0, 2 ** (self.bits - 1) - 1)
    best, least = np.zeros_like(blocks), np.full(blocks.shape[:2], np.inf)
    largest = np.abs(blocks).max(axis=2, keepdims=True) / most
    for part in np.linspace(0.3, 1.05, 24):
      scale = np.maximum((part * largest).astype(np.float16).astype(np.float32), 1e-12)
      levels = np.clip(np.round(blocks / scale - shift) + shift, -most, most)
      error = np.square(levels * scale - blocks).sum(axis=2)
      is_better = error < least
      best[is_better], least[is_better] = (levels * scale)[is_better], error[is_better]
    rows = best.reshape(padded.shape)[:, : weight.shape[1]]
    return rows, weight.size * self.bits / 8 + 2 * largest.size


@dataclasses.dataclass(frozen=True)
class LowRankInt8(_Rounded):
  """Two factors of 8 bits, each row with a float16 scale, of the least error in the metric."""

  def rows(self, table: TrainedTable) -> tuple[np.ndarray, float]:
    weight, (vocab, dim) = table.weight.astype(np.float64), table.weight.shape
    of_tokens = np.sqrt(probabilities(table.moments.counts))[:, None]
    root, inverse = _roots(table.moments.metric())
    left, values, right = np.linalg.svd(of_tokens * weight @ root, full_matrices=False)
    rank = int((table.size - 4 * vocab - 2 * dim) / (vocab + dim))
    left = left[:, :rank] * np.sqrt(values[:rank]) / of_tokens
    right = (np.sqrt(values[:rank])[:, None] * right[:rank]) @ inverse
    # Columns of one length, so that a scale for each row suffices.
    length = np.sqrt(np.square(left).mean(axis=0))
    left, right = _int8(left / length), _int8((right * length[:, None]).T).T
    return left @ right, rank * (vocab + dim) + 2 * (vocab + dim)


def _int8(rows: np.ndarray) -> np.ndarray:
  scale = (np.abs(rows).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
  return np.round(rows / scale) * scale


@dataclasses.dataclass(frozen=True)
class Feedback(_Rounded):
  """GPTQ: columns are rounded in turn, and what is left of the row makes up for the error.

  Its steps follow the counts as those of this library do, and its bits are those of an ideal coder
  with a histogram for each row group. Source: Frantar et al., GPTQ, 2023 (arXiv 2210.17323).
  """

  def rows(self, table: TrainedTable) -> tuple[np.ndarray, float]:
    weight, metric = table.weight.astype(np.float64), table.moments.metric()
    order = np.argsort(-np.diag(metric))
    upper = np.linalg.cholesky(np.linalg.inv(metric[np.ix_(order, order)])).T
    p = probabilities(table.moments.counts)
    low, high, best = 1e-3, 1e3, None
    for _ in range(20):
      step = math.sqrt(low * high)
      groups, steps = row_group_steps(p, step)
      scale = steps[groups].astype(np.float64)
      levels = _with_feedback(weight[:, order] / scale[:, None], upper)
      used = _ideal_bytes(levels, groups) + 2 * len(steps)
      if used <= table.size - 2 * len(weight):
        high, best = step, (levels, scale, used)
      else:
        low = step
    levels, scale, used = best
    rows = np.empty_like(weight)
    rows[:, order] = levels * scale[:, None]
    return rows, used


def _with_feedback(rows: np.ndarray, upper: np.ndarray) -> np.ndarray:
  left, levels = rows.copy(), np.empty_like(rows)
  for j in range(rows.shape[1]):
    levels[:, j] = np.round(left[:, j])
    error = (left[:, j] - levels[:, j]) / upper[j, j]
    left[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
  return levels


def _ideal_bytes(levels: np.ndarray, groups: np.ndarray) -> float:
  bits = 0.0
  for group in np.unique(groups):
    _, counts = np.unique(levels[groups == group], return_counts=True)
    bits -= (counts * np.log2(counts / counts.sum())).sum()
  return bits / 8


@dataclasses.dataclass(frozen=True)
class Additive(_Rounded):
  """Sums of codewords of two codebooks for a few numbers of a row, as in AQLM.

  Codes are chosen together, by a beam, and codebooks by least squares, in turn; rows are weighed by
  their probabilities, and turned into the basis in which all errors cost alike. Source: Egiazarian
  et al., Extreme compression of large language models via additive quantization, 2024.

  Attributes:
    codes: codewords of a codebook, K.
    width: adjoining numbers that a sum stands for.
    rounds: rounds of codes and codebooks.
    beam: pairs of codewords that are kept.
  """

  codes: int = 256
  width: int = 8
  rounds: int = 12
  beam: int = 8

  def rows(self, table: TrainedTable) -> tuple[np.ndarray, float]:
    root, inverse = _roots(table.moments.metric())
    weight = (table.weight @ root).astype(np.float32)
    vocab, dim = weight.shape
    weights = np.asarray(probabilities(table.moments.counts) * vocab, np.float32)
    padded = np.pad(weight, ((0, 0), (0, -dim % self.width)))
    rows = []
    for first in range(0, padded.shape[1], self.width):
      part = padded[:, first : first + self.width]
      rows.append(np.asarray(_additive(part, weights, first, self)))
    parts = padded.shape[1] // self.width
    of_codes = 2 * parts * vocab * math.log2(self.codes) / 8
    # Codebooks of float16, in the basis of the table: the map is part of them.
    used = of_codes + 2 * 2 * self.codes * padded.shape[1] + 2 * dim * dim
    return np.concatenate(rows, axis=1)[:, :dim] @ inverse, used


def _roots(metric: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The square root of a metric, and its inverse."""
  values, vectors = np.linalg.eigh(metric)
  root = np.sqrt(np.maximum(values, 1e-9 * values[-1]))
  return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _additive(x, weights, seed, method):
  """The sums that stand for the rows of x [V, W]."""
  rng = np.random.default_rng(seed)
  first = rng.choice(len(x), method.codes, p=weights / weights.sum())
  books = np.stack([x[first], np.zeros_like(x[: method.codes])])
  # The second codebook begins with what the first leaves.
  left = x - books[0][np.asarray(_codes(x, books, method.beam))[:, 0]]
  books[1] = left[rng.choice(len(x), method.codes)]
  for _ in range(method.rounds):
    books = _books(x, weights, _codes(x, books, method.beam), method.codes)
  return _sums(books, _codes(x, books, method.beam))


def _distances(x, book):
  return jnp.square(book).sum(axis=1) - 2 * x @ book.T


@functools.partial(jax.jit, static_argnames="beam")
def _codes(x, books, beam):
  """The best pairs of codewords among those of the `beam` nearest ones of the first, [V, 2]."""
  near = jax.lax.top_k(-_distances(x, books[0]), beam)[1]
  found = []
  for i in range(beam):
    left = x - books[0][near[:, i]]
    second = _distances(left, books[1]).argmin(axis=1)
    error = jnp.square(left - books[1][second]).sum(axis=1)
    found.append((error, near[:, i], second))
  errors, firsts, seconds = map(jnp.stack, zip(*found))
  best = errors.argmin(axis=0)
  take = lambda y: jnp.take_along_axis(y, best[None], axis=0)[0]
  return jnp.stack([take(firsts), take(seconds)], axis=1)


@functools.partial(jax.jit, static_argnames="count")
def _books(x, weights, codes, count):
  """The codebooks of the least weighed error, by the normal equations, [2, K, W]."""
  at = codes + jnp.array([0, count])
  gram = jnp.zeros((2 * count, 2 * count))
  for i in range(2):
    for j in range(2):
      gram = gram.at[at[:, i], at[:, j]].add(weights)
  sums = jnp.zeros((2 * count, x.shape[1]))
  for i in range(2):
    sums = sums.at[at[:, i]].add(weights[:, None] * x)
  # A little of the identity: unused codewords, and what moves between the two codebooks.
  books = jnp.linalg.solve(gram + 1e-3 * jnp.eye(2 * count), sums)
  return books.reshape(2, count, -1)


@jax.jit
def _sums(books, codes):
  return books[0][codes[:, 0]] + books[1][codes[:, 1]]
