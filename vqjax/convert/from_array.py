"""Compression of any array [V, D] to a compact embedding: one call, and a report.

A method is a frozen dataclass that is called as `method(table, key=..., weights=..., second=...)`
and returns a `CompactEmbedding`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int, PRNGKeyArray

from vqjax.assign.checks import checked_counts
from vqjax.convert.from_table import to_clusters
from vqjax.embeddings import CompactEmbedding, ProductEmbedding
from vqjax.ops import bit_packing

__all__ = ["Clusters", "Method", "Product", "Report", "Scalar", "compress"]

Method = Callable[..., CompactEmbedding]
"""(table, *, key, weights, second) -> the compact embedding; see `Product`."""

MOST_BITS = 8
"""Largest number of bits of a code that a budget chooses: k-means takes time in 2^bits."""

BLOCK = 2**12
"""Rows that are read at a time, so that no second copy of a large table exists."""


@dataclasses.dataclass(frozen=True)
class Product:
  """Product quantisation: each of M parts of a row is one of K codewords.

  It takes V·M·ceil(log2 K)/8 bytes of codes and 4·K·D bytes of codewords.

  Attributes:
    codes: codewords of a subspace, K, at most V; powers of 2 use all bits of a code.
    subspaces: number of parts, M; divides D.
  """

  codes: int
  subspaces: int

  def __call__(
    self,
    table: Float[np.ndarray, "V D"],
    *,
    key: PRNGKeyArray,
    weights: Float[np.ndarray, "V"] | None = None,
    second: Float[np.ndarray, "D D"] | None = None,
  ) -> CompactEmbedding:
    """The compact embedding; see `convert.to_clusters`."""
    embedding = ProductEmbedding(*table.shape, self.codes, self.subspaces)
    return embedding.compact(to_clusters(embedding, table, key=key, weights=weights, second=second))


@dataclasses.dataclass(frozen=True)
class Clusters:
  """Clusters of whole rows: a token is one of K vectors, as in a `CodebookHead`.

  Attributes:
    codes: number of vectors, K, at most V.
  """

  codes: int

  def __call__(self, table: Float[np.ndarray, "V D"], **options: Any) -> CompactEmbedding:
    """The compact embedding; the options are those of `Product`."""
    return Product(self.codes, 1)(table, **options)


@dataclasses.dataclass(frozen=True)
class Scalar:
  """Scalar quantisation: each number is one of 2^bits numbers, chosen by k-means.

  It takes V·D·bits/8 bytes of codes and 4·2^bits bytes of numbers. A `ScalarEmbedding` has equally
  spaced numbers instead, as the baseline of the DPQ paper; see `convert.to_levels`.

  Attributes:
    bits: bits of a number, 1 to 8.
  """

  bits: int

  def __post_init__(self):
    if not 1 <= self.bits <= 8:
      raise ValueError(
        f"`bits` must be in [1, 8]; got {self.bits}. Beyond 8 bits keep the table in bfloat16."
      )

  def __call__(self, table: Float[np.ndarray, "V D"], **options: Any) -> CompactEmbedding:
    """The compact embedding; the options are those of `Product`."""
    vocab, dim = table.shape
    embedding = ProductEmbedding(vocab, dim, 2**self.bits, dim, shared=True)
    return embedding.compact(to_clusters(embedding, table, **options))


@dataclasses.dataclass(frozen=True)
class Report:
  """The size of a compressed table, and its error as the compact embedding reads it.

  Attributes:
    method: the method, given or chosen by the budget.
    bits_per_weight: bits of codes, values and bias over the numbers of the table.
    bytes: bytes of codes, values and bias.
    ratio: bytes of the table as given over `bytes`.
    error: squared distance of the rows to the table over the table's squared length.
    weighted_error: the same measure of what was minimised: rows weighted by count + 1, products
      with the hidden states instead of rows. It is `error` without counts and hidden states.
    median_error: the median of the same measure of each row alone: the mean may be that of a few
      long rows.
    worst_error: the largest of them.
    worst_row: its row.
    seconds: duration of the compression.
  """

  method: Method
  bits_per_weight: float
  bytes: int
  ratio: float
  error: float
  weighted_error: float
  median_error: float
  worst_error: float
  worst_row: int
  seconds: float

  def __str__(self) -> str:
    """The report in one line."""
    hidden = ""
    if self.median_error > 10 * self.error:
      hidden = "; an outlier among the rows, far longer than the others, makes the error look small"
    return (
      f"{self.bits_per_weight:.2f} bits a weight, {self.bytes:,} bytes (1/{self.ratio:.1f});"
      f" relative squared error {self.error:.3g}, weighted {self.weighted_error:.3g}, of a row"
      f" {self.median_error:.3g} in the median and {self.worst_error:.3g} at most (row"
      f" {self.worst_row}); {self.seconds:.1f} s; {self.method}{hidden}"
    )


def compress(
  table: ArrayLike,
  *,
  bytes: float | None = None,
  method: Method | None = None,
  counts: Int[ArrayLike, "V"] | None = None,
  hidden: Float[ArrayLike, "*B D"] | None = None,
  bias: Float[ArrayLike, "V"] | None = None,
  seed: int = 0,
) -> CompactEmbedding:
  """Compress the table of an embedding or the weight of an output head.

  Example:

    small = vqjax.compress(table, bytes=1 / 16)
    print(small.report)
    vectors = small(tokens)
    head, variables = to_head(small)
    small.save("small.safetensors")

  Args:
    table: [V, D], a row for each token: of NumPy, JAX or PyTorch (on the CPU), or a memory map; any
      float dtype. It is read a part at a time; only `hidden` needs a float32 copy of all of it.
    bytes: largest size of the result, codes, values and bias, as a fraction of the bytes of `table`
      in its own dtype: 1/16 leaves 2 bits a weight of float32 and 1 of bfloat16. It chooses the
      `Product` with the most bits a token that fits.
    method: `Product(codes, subspaces)`, `Clusters(codes)` or `Scalar(bits)`, instead of `bytes`.
    counts: occurrences of each token in a text. A row's error is weighted by its count + 1.
    hidden: a sample of the hidden states h that the rows are multiplied by in an output head. The
      error is then E[(h · (row - approximation))²], so that the scores are kept.
    bias: the output bias that was trained with the table; the result and its head keep it.
    seed: seed of the initial centroids.

  Returns:
    The compact embedding, with a `Report` as its `report`.

  Raises:
    ValueError: the table is not a matrix of finite floats, `bytes` is out of reach or both or
      neither of `bytes` and `method` are given, or another array has a wrong shape or value.
    TypeError: the table is not an array with values, or `method` is not a method.
  """
  started = time.perf_counter()
  rows = _matrix(table)
  if (bytes is None) == (method is None):
    got = "neither" if bytes is None else "both"
    raise ValueError(
      f"just one of `bytes` and `method` must be given; got {got}. Give bytes=1/16, or"
      " method=vqjax.Product(codes=256, subspaces=64)."
    )
  if method is not None and (isinstance(method, type) or not callable(method)):
    raise TypeError(
      f"`method` must be a method with its sizes; got {method!r}. Give"
      " vqjax.Product(codes=256, subspaces=64), vqjax.Clusters(codes=1024) or"
      " vqjax.Scalar(bits=4)."
    )
  vocab, dim = rows.shape
  weights = None if counts is None else checked_counts(_host("counts", counts), vocab) + 1.0
  moment, second = (None, None) if hidden is None else _second_moments(hidden, dim)
  if bias is not None:
    bias = np.array(_host("bias", bias), np.float32)  # a copy: the caller may go on training
    if bias.shape != (vocab,) or not np.isfinite(bias).all():
      got = f"shape {bias.shape}" if bias.shape != (vocab,) else "nan or infinity"
      raise ValueError(
        f"`bias` must be {vocab} finite numbers, one for each row; got {got}. Give the bias of the"
        " head whose weight the table is."
      )
  if method is None:
    method = _within(bytes, rows, 0 if bias is None else bias.nbytes)
  small = method(rows, key=jax.random.key(seed), weights=weights, second=second)
  small = dataclasses.replace(small, bias=bias)
  errors = _errors(small, rows, weights, moment)
  report = Report(
    method=method,
    bits_per_weight=8 * small.nbytes / rows.size,
    bytes=small.nbytes,
    ratio=rows.nbytes / small.nbytes,
    **errors,
    seconds=time.perf_counter() - started,
  )
  return dataclasses.replace(small, report=report)


def _host(name: str, array: Any) -> np.ndarray:
  """A NumPy view of an array of any library, without a copy where memory allows it."""
  if hasattr(array, "get_shape") and hasattr(array, "get_dtype"):
    array = array[:]  # a slice of a safetensors file
  if hasattr(array, "detach"):
    array = array.detach()  # PyTorch exports no tensor that requires a gradient
    if array.device.type != "cpu":
      raise ValueError(
        f"`{name}` must be in the memory of the CPU; got a tensor on {array.device}. Give"
        f" {name}.cpu()."
      )
    try:
      return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
      # NumPy has no bfloat16 of its own; JAX reads it.
      return np.asarray(jnp.from_dlpack(array.contiguous()))
  return np.asarray(array)


def _matrix(table: Any) -> np.ndarray:
  if isinstance(table, jax.core.Tracer):
    raise TypeError("`table` must have values; got a traced array. Call compress outside of jit.")
  rows = _host("table", table)
  if rows.dtype.kind in "OUS":
    raise TypeError(
      f"`table` must be an array; got {type(table).__name__}. Give the array itself, such as"
      " embed.embedding, or a tensor of a file that is open."
    )
  if rows.ndim != 2 or not rows.size:
    raise ValueError(
      f"`table` must have shape [V, D], a row for each token; got {list(rows.shape)}. Reshape it;"
      " a kernel [D, V] is transposed, kernel.T."
    )
  if not jnp.issubdtype(rows.dtype, jnp.floating):
    raise ValueError(
      f"`table` must hold floating-point numbers; got {rows.dtype}. Convert it to float32."
    )
  for first in range(0, len(rows), BLOCK):
    broken = np.flatnonzero(~np.isfinite(rows[first : first + BLOCK]).all(axis=1))
    if broken.size:
      raise ValueError(
        f"`table` must be finite; got nan or infinity in row {first + broken[0]}. Use an earlier"
        " checkpoint, or set such rows to zero."
      )
  return rows


def _second_moments(hidden: Any, dim: int) -> tuple[np.ndarray, np.ndarray]:
  """E[h hᵀ] of the sample, and the positive definite matrix that is minimised."""
  states = _host("hidden", hidden)
  if not states.ndim or states.shape[-1] != dim or not states.size:
    raise ValueError(
      f"`hidden` must have shape [..., {dim}], vectors as wide as the table's rows; got"
      f" {list(states.shape)}. Give the inputs of the output head."
    )
  states, moment = states.reshape(-1, dim), np.zeros((dim, dim))
  for first in range(0, len(states), BLOCK):
    block = np.asarray(states[first : first + BLOCK], np.float64)
    moment += block.T @ block
  moment /= len(states)
  if not np.isfinite(moment).all() or not moment.any():
    got = "only zeros" if np.isfinite(moment).all() else "nan or infinity"
    raise ValueError(f"`hidden` must be finite and not all zero; got {got}. Sample other states.")
  # A sample of N vectors says little about D directions unless N is much larger: shrink towards the
  # identity, as Ledoit and Wolf do, with the weight D / (N + D).
  share = dim / (len(states) + dim)
  return moment, (1 - share) * moment + share * np.trace(moment) / dim * np.eye(dim)


def _within(fraction: float, rows: np.ndarray, bias_bytes: int) -> Product:
  """The product quantisation with the most bits a token within a budget."""
  if not 0 < fraction <= 1:
    raise ValueError(
      f"`bytes` must be a fraction of the table's bytes, in (0, 1]; got {fraction}. Give 1/16."
    )
  (vocab, dim), budget = rows.shape, fraction * rows.nbytes
  cost = {}
  for subspaces in (m for m in range(1, dim + 1) if dim % m == 0):
    for codes in {min(2**bits, vocab) for bits in range(1, MOST_BITS + 1)}:
      packed = bit_packing.bit_packed_bytes(vocab, subspaces, bit_packing.bits_for(codes))
      cost[Product(codes, subspaces)] = packed + 4 * codes * dim + bias_bytes
  reached = [product for product, size in cost.items() if size <= budget]
  if not reached:
    # Rounded up, so that the fraction of the message is reachable.
    least = 1.01 * min(cost.values()) / rows.nbytes
    remedy = "Give more." if least <= 1 else "The table is too small to be compressed."
    raise ValueError(
      f"`bytes` must be at least {least:.3g} for a table of {vocab} x {dim} {rows.dtype}; got"
      f" {fraction:.3g}. {remedy}"
    )
  # Among equally many bits, few long codes: vectors of more dimensions are quantised better.
  return max(reached, key=lambda p: (p.subspaces * math.log2(p.codes), p.codes))


def _errors(small, rows, weights, moment) -> dict[str, float]:
  """The relative squared errors of a `Report` by name."""
  vectors = jax.jit(CompactEmbedding.__call__)
  sums, of_rows = np.zeros((2, 2)), np.zeros(len(rows))
  for first in range(0, len(rows), BLOCK):
    block = np.asarray(rows[first : first + BLOCK], np.float64)
    # One shape for all blocks, so that one program is compiled.
    tokens = np.minimum(np.arange(first, first + min(BLOCK, len(rows))), len(rows) - 1)
    error = block - np.asarray(vectors(small, tokens), np.float64)[: len(block)]
    own = np.ones(len(block)) if weights is None else weights[first : first + BLOCK]
    for column, x in enumerate((error, block)):
      sums[0, column] += (x**2).sum()
      sums[1, column] += own @ ((x if moment is None else x @ moment) * x).sum(axis=1)
    length = (block**2).sum(axis=1)
    # A row of zeros has no relative error.
    of_rows[first : first + BLOCK] = (error**2).sum(axis=1) / np.where(length > 0, length, np.inf)
  plain, weighted = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1)
  return {
    "error": float(plain),
    "weighted_error": float(weighted),
    "median_error": float(np.median(of_rows)),
    "worst_error": float(of_rows.max()),
    "worst_row": int(of_rows.argmax()),
  }
