"""Compression of any array [V, D] to a small table: one call, one result, and a report.

A method is a frozen dataclass that is called with a `Problem` and returns a form of `SmallTable`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from vqjax.assign.checks import checked_counts
from vqjax.convert.from_table import to_clusters
from vqjax.convert.packed_table import PackedTable
from vqjax.embeddings import CompactEmbedding, ProductEmbedding
from vqjax.layer import wanted
from vqjax.ops import bit_packing, product
from vqjax.ops.distillation import linear_divergence
from vqjax.ops.vocabulary import check_numbers, host_array, is_count
from vqjax.tables.container import CompressedTable
from vqjax.tables.moments import Moments
from vqjax.tables.search import PackedTables, Point, Tables, search
from vqjax.tables.small_table import Int8Table, SmallTable

__all__ = [
  "Clusters",
  "Int8",
  "Integers",
  "Method",
  "Packed",
  "Problem",
  "Product",
  "Report",
  "Scalar",
  "byte_budget",
  "compress",
]

MOST_BITS = 8
"""Largest number of bits of a code that a budget chooses: k-means takes time in 2^bits."""

BASIS_SHARE, BASIS_GAIN = 1 / 16, 0.95
"""The part of the codes' bytes that a basis may take, and the error with one over that without."""

BLOCK = 2**12
"""Rows that are read at a time, so that no second copy of a large table exists."""

MOST_STATES = 2**11
"""Hidden states on which a divergence is measured."""

ROUNDED = 1 / 64
"""Largest error, in nats, with which a bias is kept in float16."""

HIDDEN = 4
"""Ratio of the median error to the error from which a report says that an outlier hides it."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class Problem:
  """A table, and what the result of its compression must keep.

  Attributes:
    rows: the table, [V, D], of its own dtype.
    moments: what errors cost.
    weights: weight of each row's error, [V], for methods of k-means; None: all alike.
    second: matrix of the products that are kept, [D, D], for methods of k-means; None: identity.
    size: most bytes of the form; None: there is no such bound.
    kl: most divergence, nats a token; None: there is no such bound.
    divergence: rows of the table [V, D] -> the divergence that they give.
    seed: seed of the initial centroids.
  """

  rows: Float[np.ndarray, "V D"]
  moments: Moments
  weights: Float[np.ndarray, "V"] | None = None
  second: Float[np.ndarray, "D D"] | None = None
  size: int | None = None
  kl: float | None = None
  divergence: Callable[[Float[np.ndarray, "V D"]], float] | None = None
  seed: int = 0

  def check_unbounded(self, method: "Method") -> None:
    """Raise ValueError where there is a bound, for a method that has its own size."""
    if self.size is not None or self.kl is not None:
      bound = "bytes" if self.kl is None else "kl"
      raise ValueError(
        f"`{bound}` must be left out for a method that has its own size; got both, with {method}."
        " Give one of them."
      )


Method = Callable[[Problem], Any]
"""Problem -> a form of `SmallTable`; see `Integers`."""


@dataclasses.dataclass(frozen=True)
class Integers:
  """Integers behind an entropy coder, in the metric of the table's use: the least error a byte.

  It needs `bytes` or `kl`. Errors of frequent tokens and in directions of large hidden states cost
  more. See `vqjax.tables.coded`.
  """

  def __call__(self, problem: Problem) -> CompressedTable:
    """The coded table.

    Raises:
      ValueError: there is no bound, or it is out of reach.
    """
    coded, _ = _searched(Tables, problem, self)
    return CompressedTable(coded)


@dataclasses.dataclass(frozen=True)
class Packed:
  """Whole bits for each number, which a `PackedHead` scores where they lie.

  It needs `bytes` or `kl`, and more bytes than `Integers` for the same error.
  """

  def __call__(self, problem: Problem) -> PackedTable:
    """The packed table; errors as of `Integers`."""
    return _searched(PackedTables, problem, self)[1]


def _searched(kind, problem, method):
  """The parts of the table at the step that meets a bound, and the table."""
  if (problem.size is None) == (problem.kl is None):
    raise ValueError(
      f"one of `bytes` and `kl` must be given with {method}; got"
      f" {'neither' if problem.size is None else 'both'}. Give bytes=1/16."
    )
  made = kind({"table": problem.rows}, {"table": problem.moments})

  def measure(step: float) -> Point:
    size, kl = made.size(step), None
    if problem.kl is not None:
      kl = problem.divergence(made.tables_at(step)["table"].table())
    return Point(step, size, kl)

  best, _ = search(
    measure, kl=problem.kl, size=problem.size, step=made.first_step, limits=made.limits
  )
  _, tables, coded = made.coded(best.step, problem.size)
  return coded["table"], tables["table"]


class _Sized:
  """A method with sizes of its own, which are integers of Python."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      size = getattr(self, field.name)
      if (kind := wanted(field, size)) is not None:
        raise ValueError(
          f"`{field.name}` of {type(self).__name__} must be {kind}; got {size!r}. Give one, or"
          " leave it out where it has a default."
        )
      object.__setattr__(self, field.name, None if size is None else int(size))


@dataclasses.dataclass(frozen=True)
class Int8(_Sized):
  """8 bits for each number, and a scale for a few neighbours: an `Int8Embedding`.

  Attributes:
    group: neighbours that share a scale; a divisor of D, the largest common one with 32 if None.
  """

  group: int | None = None

  def __call__(self, problem: Problem) -> Int8Table:
    """The table of levels and scales."""
    problem.check_unbounded(self)
    dim = problem.rows.shape[1]
    group = math.gcd(dim, 32) if self.group is None else self.group
    if group < 1 or dim % group:
      raise ValueError(f"`group` must divide the width of the table, {dim}; got {group}. Try 32.")
    return Int8Table.of(problem.rows, group)


@dataclasses.dataclass(frozen=True)
class Product(_Sized):
  """Product quantisation: each of M parts of a row is one of K codewords.

  It takes V·M·ceil(log2 K)/8 bytes of codes and 4·K·D bytes of codewords. Where 2·D² bytes are few
  beside those, rows are rotated first by a learned matrix, as in optimised product quantisation (Ge
  et al., 2013), and M need not divide D.

  Attributes:
    codes: codewords of a subspace, K, at most V; powers of 2 use all bits of a code. None: those
      of the least expected error within `bytes`.
    subspaces: number of parts, M. None together with `codes`.
  """

  codes: int | None = None
  subspaces: int | None = None

  def __call__(self, problem: Problem) -> CompactEmbedding:
    """The codes and codewords; see `convert.to_clusters`."""
    if self.codes is None and problem.size is not None:
      codes, subspaces, rotated = _product_within(problem.size, problem.rows)
    elif self.codes is None or self.subspaces is None:
      raise ValueError("`codes` and `subspaces` must be given without `bytes`. Give 256 and D / 8.")
    else:
      problem.check_unbounded(self)
      codes, subspaces = self.codes, self.subspaces
      rotated = _is_worth_a_basis(*problem.rows.shape, codes, subspaces)
    form = ProductEmbedding(*problem.rows.shape, codes, subspaces, rotated=rotated)
    return _clustered(form, problem)


@dataclasses.dataclass(frozen=True)
class Clusters(_Sized):
  """Clusters of whole rows: a token is one of K vectors, as in a `CodebookHead`.

  Attributes:
    codes: number of vectors, K, at most V.
  """

  codes: int

  def __call__(self, problem: Problem) -> CompactEmbedding:
    """The codes and the vectors."""
    return Product(self.codes, 1)(problem)


@dataclasses.dataclass(frozen=True)
class Scalar(_Sized):
  """Scalar quantisation: each number is one of 2^bits numbers, chosen by k-means.

  It takes V·D·bits/8 bytes of codes and 4·2^bits bytes of numbers. A `ScalarEmbedding` has equally
  spaced numbers instead, as the baseline of the DPQ paper; see `convert.to_levels`.

  Attributes:
    bits: bits of a number, 1 to 8.
  """

  bits: int

  def __post_init__(self):
    super().__post_init__()
    if not 1 <= self.bits <= 8:
      raise ValueError(
        f"`bits` must be in [1, 8]; got {self.bits}. Beyond 8 bits keep the table in bfloat16."
      )

  def __call__(self, problem: Problem) -> CompactEmbedding:
    """The codes and the numbers."""
    problem.check_unbounded(self)
    vocab, dim = problem.rows.shape
    return _clustered(ProductEmbedding(vocab, dim, 2**self.bits, dim, shared=True), problem)


def _clustered(embedding, problem):
  key = jax.random.key(problem.seed)
  options = {"weights": problem.weights, "second": problem.second}
  small = embedding.compact(to_clusters(embedding, problem.rows, key=key, **options))
  if small.basis is None:
    return small
  # `to_clusters` has rounded it.
  return dataclasses.replace(small, basis=small.basis.astype(np.float16))


@dataclasses.dataclass(frozen=True)
class Report:
  """The size of a compressed table, and the error of its rows.

  Attributes:
    method: the method, given or chosen.
    bits_per_weight: bits of the form and the bias over the numbers of the table.
    bytes: bytes of the form and the bias.
    ratio: bytes of the table as given over `bytes`.
    dtype: dtype of the table as given, of which the ratio is.
    error: squared distance of the rows to the table over the table's squared length.
    weighted_error: the same measure of what was minimised: rows weighted by count + 1, products
      with the hidden states instead of rows. It is `error` without counts and hidden states.
    median_error: the median of the same measure of each row alone: the mean may be that of a few
      long rows.
    worst_error: the largest of them.
    worst_row: its row.
    median_column_error: the median of the same measure of each column alone: the mean may be that
      of a few large columns.
    centred_error: squared distance of the rows to the table over the table's squared distance to
      its mean row, which adds the same to the scores of all tokens.
    kl: mean divergence of softmax(hidden · rowsᵀ + bias) on the sample of hidden states, in nats;
      None without `hidden`.
    seconds: duration of the compression.
  """

  method: Method
  bits_per_weight: float
  bytes: int
  ratio: float
  dtype: str
  error: float
  weighted_error: float
  median_error: float
  worst_error: float
  worst_row: int
  median_column_error: float
  centred_error: float
  kl: float | None
  seconds: float

  def __str__(self) -> str:
    """The report in one line."""
    outlier, medians = "", {"rows": self.median_error, "columns": self.median_column_error}
    if hidden := [name for name, median in medians.items() if median > HIDDEN * self.error]:
      outlier = (
        f"; an outlier among the {' and the '.join(hidden)}, far longer than the others, makes the"
        f" error look small, which is {medians[hidden[-1]]:.3g} in the median of the {hidden[-1]}"
      )
    if self.centred_error > 10 * self.error:
      outlier += (
        "; a mean row, far longer than what the rows differ by, makes the error look small, which"
        f" is {self.centred_error:.3g} about the mean row"
      )
    divergence = "" if self.kl is None else f"; divergence {self.kl:.3g} nats"
    return (
      f"{self.bits_per_weight:.2f} bits a weight, {self.bytes:,} bytes (1/{self.ratio:.1f} of"
      f" {self.dtype}); relative squared error {self.error:.3g}, weighted"
      f" {self.weighted_error:.3g}, of a row {self.median_error:.3g} in the median and"
      f" {self.worst_error:.3g} at most (row {self.worst_row}){divergence}; {self.seconds:.1f} s;"
      f" {self.method}{outlier}"
    )


def compress(
  table: ArrayLike,
  *,
  bytes: float | str | None = None,
  kl: float | None = None,
  method: Method | None = None,
  counts: Int[ArrayLike, "V"] | None = None,
  hidden: Float[ArrayLike, "*B D"] | None = None,
  moments: Moments | None = None,
  bias: Float[ArrayLike, "V"] | None = None,
  seed: int = 0,
) -> SmallTable:
  """Compress the table of an embedding or the weight of an output head.

  Example:

    small = vqjax.compress(table, bytes=1 / 16)
    print(small.report)
    vectors = small.rows(tokens)
    head, variables = small.to_head()
    small.save("small.safetensors")

  Args:
    table: [V, D], a row for each token: of NumPy, JAX or PyTorch (on the CPU), or a memory map; any
      float dtype. It is read a part at a time.
    bytes: largest size of the result, form and bias; the header of its file takes 1 to 2 kB more. A
      number of bytes, such as 65e6 or "65MB", or a fraction of the bytes of `table` in its own
      dtype, such as 1/16: 2 bits a weight of float32 and 1 of bfloat16.
    kl: largest mean divergence of softmax(hidden · rowsᵀ + bias) from that of the table, nats a
      hidden state, instead of `bytes`; it needs `hidden`.
    method: None: `Integers()`, or for tables so small that their maps would fill the budget
      whichever of `Integers()` and `Product()` loses less. `Packed()` needs a bound too;
      `Int8(group)`, `Product(codes, subspaces)`, `Clusters(codes)` and `Scalar(bits)` have sizes of
      their own.
    counts: occurrences of each token in a text. Rows of frequent tokens err less.
    hidden: a sample of the hidden states h that the rows are multiplied by in an output head. The
      error is then E[(h · (row - approximation))²], so that the scores are kept.
    moments: the moments that `vqjax.tables.Moments` has, instead of `counts` and `hidden`.
    bias: the output bias that was trained with the table; the result and its head keep it, in
      float16 if that is within 1/64 of it.
    seed: seed of the initial centroids of methods of k-means.

  Returns:
    The small table, with a `Report` as its `report`.

  Raises:
    ValueError: the table is not a matrix of finite floats, a bound is out of reach or missing, or
      another array has a wrong shape or value.
    TypeError: the table is not an array with values, or `method` is not a method.
  """
  started = time.perf_counter()
  rows = _matrix(table)
  vocab = len(rows)
  if method is not None and (isinstance(method, type) or not callable(method)):
    raise TypeError(
      f"`method` must be a method with its sizes; got {method!r}. Give"
      " vqjax.Product(codes=256, subspaces=64), vqjax.Clusters(codes=1024) or"
      " vqjax.Scalar(bits=4)."
    )
  if moments is not None and not isinstance(moments, Moments):
    raise TypeError(
      f"`moments` must be vqjax.tables.Moments; got {type(moments).__name__}. Read a file with"
      " Moments.load."
    )
  if not is_count(seed) or not 0 <= seed < 2**32:
    raise ValueError(f"`seed` must be an integer in [0, 2^32); got {seed!r}. 0 is the default.")
  if kl is not None:
    check_numbers(kl=kl)
  if (bytes is not None and kl is not None) or (method is None and bytes is None and kl is None):
    got = "neither" if bytes is None else "both"
    raise ValueError(f"one of `bytes` and `kl` must be given; got {got}. Give bytes=1/16.")
  if kl is not None and (hidden is None or not 0 < kl < math.inf):
    raise ValueError(f"`kl` must be positive, with a sample `hidden`; got {kl}. Give kl=0.01.")
  if moments is not None and (counts is not None or hidden is not None):
    raise ValueError(
      "`moments` must be given without `counts` and `hidden`, which they hold; got both. Give one."
    )
  if bias is not None:
    bias = np.array(_host("bias", bias), np.float32)  # a copy: the caller may go on training
    if bias.shape != (vocab,) or not np.isfinite(bias).all():
      got = f"shape {bias.shape}" if bias.shape != (vocab,) else "nan or infinity"
      raise ValueError(
        f"`bias` must be {vocab} finite numbers, one for each row; got {got}. Give the bias of the"
        " head whose weight the table is."
      )
    bias = _kept(bias)
  size = None if bytes is None else byte_budget(bytes, rows.nbytes) - _nbytes(bias)
  problem, moment, divergence = _problem(rows, counts, hidden, moments, bias)
  problem = dataclasses.replace(problem, size=size, kl=kl, seed=seed)
  weights = problem.weights
  if method is not None:
    small = SmallTable(method(problem), bias)
  else:
    loss = lambda found: _errors(found, rows, weights, moment)["weighted_error"]
    if divergence is not None:
      loss = lambda found: divergence(found.table())
    small, method = _best(problem, bias, loss)
  report = Report(
    method=method,
    bits_per_weight=8 * small.nbytes / rows.size,
    bytes=small.nbytes,
    ratio=rows.nbytes / small.nbytes,
    dtype=rows.dtype.name,
    **_errors(small, rows, weights, moment),
    kl=None if divergence is None else divergence(small.table()),
    seconds=time.perf_counter() - started,
  )
  return dataclasses.replace(small, report=report)


def byte_budget(bytes: float | str, of: int) -> int:
  """The number of bytes of a bound: a fraction of `of`, a number, or a text such as "65MB".

  Raises:
    ValueError: it is none of them.
  """
  text = str(bytes).strip()
  match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)(?:/([0-9.]+))?\s*([a-z]*)", text, re.IGNORECASE)
  try:
    value = float(match[1]) / float(match[2] or 1) * UNITS[match[3].upper()]
    is_fraction = not match[3] and value <= 1
    if not 0 < value < 2**63 or (match[3] and value < 1):
      raise ValueError("no table has so many bytes")
  except (TypeError, KeyError, ValueError, ZeroDivisionError):
    raise ValueError(
      f"`bytes` must be a fraction of the table's bytes, such as 1/16, or a number of bytes, such"
      f" as 65MB; got {text}. Use KB, MB or GB."
    ) from None
  return int(value * of) if is_fraction else int(value)


def _kept(bias: Float[np.ndarray, "V"]) -> Float[np.ndarray, "V"]:
  """The biases as they are kept: a small table's float32 would be an eighth of its bytes."""
  with np.errstate(over="ignore"):
    half = bias.astype(np.float16)
  # Biases far from 0 would be rounded by more than a table's scores are off.
  return half if np.abs(half - bias).max(initial=0) <= ROUNDED else bias


def _nbytes(array: np.ndarray | None) -> int:
  return 0 if array is None else array.nbytes


def _problem(rows, counts, hidden, moments, bias):
  """The problem without its bound, E[h hᵀ] of the sample, and the divergence on it."""
  vocab, dim = rows.shape
  if moments is not None:
    moments.check(vocab, dim)
    problem = Problem(rows, moments, moments.counts + 1.0, moments.metric())
    return problem, moments.hidden, None
  weights = None if counts is None else checked_counts(_host("counts", counts), vocab) + 1.0
  own = np.ones(vocab) if counts is None or not (weights > 1).any() else weights - 1
  if hidden is None:
    return Problem(rows, Moments(np.eye(dim), own, 1), weights), None, None
  states = _states(hidden, dim)
  moment, second = _second_moments(states)
  found = Moments(moment, own, len(states))
  # Evenly many of the whole sample.
  chosen = np.asarray(states[:: -(-len(states) // MOST_STATES)], np.float32)
  divergence = functools.partial(_divergence, chosen, rows, bias)
  return Problem(rows, found, weights, second, divergence=divergence), moment, divergence


@jax.jit
def _kl(hidden, weight, table, bias):
  return linear_divergence(hidden, weight, hidden, table, bias, bias, mixture=0).mean()


def _divergence(hidden, table, bias, weight) -> float:
  """Mean divergence of the softmax of other rows from that of a table, in nats."""
  return float(_kl(hidden, weight, np.asarray(table, np.float32), bias))


def _best(problem, bias, loss):
  """The small table of the least loss within a bound, and its method.

  The map [D, D] and the histograms of integers may take most of a small budget.
  """
  dim = problem.rows.shape[1]
  integers, by_codes = Integers(), Product()
  is_tight = problem.size is not None and problem.size < 4 * (2 * dim * dim + 2000)
  try:
    first = SmallTable(integers(problem), bias)
  except ValueError:
    if not is_tight:
      raise
    return SmallTable(by_codes(problem), bias), by_codes
  if is_tight:
    try:
      second = SmallTable(by_codes(problem), bias)
    except ValueError:
      return first, integers
    if loss(second) < loss(first):
      return second, by_codes
  return first, integers


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
  return host_array(name, array)


def _matrix(table: Any) -> np.ndarray:
  rows = _host("table", table)
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
    with np.errstate(over="ignore"):
      block = np.asarray(rows[first : first + BLOCK], np.float32)
    broken = np.flatnonzero(~np.isfinite(block).all(axis=1))
    if broken.size:
      raise ValueError(
        f"`table` must be finite in float32; got nan or infinity in row {first + broken[0]}. Use an"
        " earlier checkpoint, or set such rows to zero."
      )
  return rows


def _states(hidden: Any, dim: int) -> np.ndarray:
  """The sample of hidden states, [N, D]."""
  states = _host("hidden", hidden)
  if not states.ndim or states.shape[-1] != dim or not states.size:
    raise ValueError(
      f"`hidden` must have shape [..., {dim}], vectors as wide as the table's rows; got"
      f" {list(states.shape)}. Give the inputs of the output head."
    )
  return states.reshape(-1, dim)


def _second_moments(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """E[h hᵀ] of the sample, and the positive definite matrix that is minimised."""
  dim = states.shape[-1]
  moment = np.zeros((dim, dim))
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


def _is_worth_a_basis(vocab: int, dim: int, codes: int, subspaces: int) -> bool:
  """Whether a basis takes few bytes beside the codes."""
  if codes < 1 or not 1 < subspaces <= dim:
    return False
  packed = bit_packing.bit_packed_bytes(vocab, subspaces, bit_packing.bits_for(codes))
  basis = 2 * subspaces * product.part_width(dim, subspaces) * dim
  return basis <= BASIS_SHARE * packed


def _product_bytes(vocab: int, dim: int, codes: int, subspaces: int, rotated: bool) -> int:
  packed = bit_packing.bit_packed_bytes(vocab, subspaces, bit_packing.bits_for(codes))
  width = subspaces * product.part_width(dim, subspaces)
  return packed + 4 * codes * width + rotated * 2 * width * dim


def _product_error(dim: int, codes: int, subspaces: int, rotated: bool) -> float:
  """Expected relative error of uncorrelated columns: 2^-2r for parts with r bits a number."""
  width, wider = divmod(dim, subspaces)
  of = lambda width: width * codes ** (-2 / width)
  error = (subspaces - wider) * of(width) + (wider and wider * of(width + 1))
  return error / dim * (BASIS_GAIN if rotated else 1)


def _product_within(budget: int, rows: np.ndarray) -> tuple[int, int, bool]:
  """Codes, subspaces, and whether there is a basis: of the least error within so many bytes."""
  vocab, dim = rows.shape
  choices = [
    (codes, subspaces, rotated)
    for subspaces in range(1, dim + 1)
    for codes in {min(2**bits, vocab) for bits in range(1, MOST_BITS + 1)}
    for rotated in (False, True)
    if (subspaces > 1 if rotated else dim % subspaces == 0)
  ]
  cost = {choice: _product_bytes(vocab, dim, *choice) for choice in choices}
  reached = [choice for choice, size in cost.items() if size <= budget]
  if not reached:
    # Rounded up, so that the fraction of the message is reachable.
    least = 1.01 * min(cost.values()) / rows.nbytes
    remedy = "Give more." if least <= 1 else "The table is too small to be compressed."
    raise ValueError(
      f"`bytes` must be at least {least:.3g} for a table of {vocab} x {dim} {rows.dtype}; got"
      f" {budget / rows.nbytes:.3g}. {remedy}"
    )
  # Among equal errors, few long codes: vectors of more dimensions are quantised better.
  return min(reached, key=lambda choice: (round(_product_error(dim, *choice), 9), -choice[0]))


def _errors(small, rows, weights, moment) -> dict[str, float]:
  """The relative squared errors of a `Report` by name."""
  sums, of_rows, of_columns = np.zeros((2, 2)), np.zeros(len(rows)), np.zeros((2, rows.shape[1]))
  # Differences from the first row, near the mean in comparison with rows far from 0.
  start, total, second = np.asarray(rows[0], np.float64), 0.0, 0.0
  for first in range(0, len(rows), BLOCK):
    block = np.asarray(rows[first : first + BLOCK], np.float64)
    # One shape for all blocks, so that one program is compiled.
    tokens = np.minimum(np.arange(first, first + min(BLOCK, len(rows))), len(rows) - 1)
    error = block - np.float64(small.rows(tokens))[: len(block)]
    own = np.ones(len(block)) if weights is None else weights[first : first + BLOCK]
    for column, x in enumerate((error, block)):
      sums[0, column] += (x**2).sum()
      of_columns[column] += (x**2).sum(axis=0)
      sums[1, column] += own @ ((x if moment is None else x @ moment) * x).sum(axis=1)
    total, second = total + (block - start).sum(axis=0), second + ((block - start) ** 2).sum()
    length = (block**2).sum(axis=1)
    # A row or a column of zeros has no relative error.
    of_rows[first : first + BLOCK] = (error**2).sum(axis=1) / np.where(length > 0, length, np.inf)
  plain, weighted = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1)
  of_columns = of_columns[0] / np.where(of_columns[1] > 0, of_columns[1], np.inf)
  centred = second - (total**2).sum() / len(rows)
  return {
    "error": float(plain),
    "weighted_error": float(weighted),
    "median_error": float(np.median(of_rows)),
    "worst_error": float(of_rows.max()),
    "worst_row": int(of_rows.argmax()),
    "median_column_error": float(np.median(of_columns)),
    "centred_error": float(sums[0, 0] / centred) if centred > 0 else 0.0,
  }
