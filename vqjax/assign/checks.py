"""Checks of assignments, counts, embeddings and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from vqjax.ops.vocabulary import host_array

__all__ = ["Assignment", "Given", "check_shape", "checked_assignment"]

Assignment = (
  Callable[[int, int], Int[np.ndarray, "V"]] | np.ndarray | Array | Sequence[int | np.integer]
)
"""A function (vocab, codes) -> int32 [V], token -> code, or the integers themselves."""

REMEDY = "Build it with assign.zipf_mass(vocab, codes) or another function of vqjax.assign."


def table_of(given: Any) -> Any:
  """The table of a result such as `exchange(...)`, `by_kmeans(...)` or `grouping(...)`.

  That is its assignment or, where it has none, its order; what is not such a result stays.
  """
  # Of no other object an attribute is read: that of a module would set the module up.
  if isinstance(given, tuple):
    for name in ("assignment", "order"):
      if name in getattr(given, "_fields", ()):
        return getattr(given, name)
  return given


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
  """A given array in place of a function that would make it.

  Layers wrap the arrays that their fields named `*_init` get, since only then can the layers be
  compared and hashed.

  Attributes:
    table: the array, with its first axis in the order of the token ids, or what `table_of` takes.
  """

  table: Any

  def __post_init__(self):
    object.__setattr__(self, "table", table_of(self.table))

  def __call__(self, *request: Any) -> np.ndarray:
    """The array; for arguments (vocab, codes), an assignment that is checked."""
    return checked_assignment(self.table, *request) if len(request) == 2 else np.asarray(self.table)

  def __eq__(self, other: object) -> bool:
    """Whether the arrays are equal, since modules are compared by their fields."""
    # Copies of a layer share the array: most comparisons, as before each call, look at no number.
    return isinstance(other, Given) and (
      self.table is other.table or np.array_equal(self.table, other.table)
    )

  def __hash__(self) -> int:
    """Hash of the content of the array."""
    table = np.asarray(self.table)
    # Equal numbers of different types make equal tables, as 0.0 and -0.0 do; the first numbers tell
    # most tables apart.
    return hash((table.shape, (table.ravel()[:4096].astype(np.float64) + 0.0).tobytes()))


def check_shape(shape: tuple[int, ...], vocab: int) -> None:
  """Raise ValueError unless an assignment has one code for each token."""
  if shape != (vocab,):
    raise ValueError(f"`assignment` must have shape ({vocab},), as vocab; got {shape}. {REMEDY}")


def checked_assignment(
  assignment: ArrayLike | tuple, vocab: int, codes: int
) -> Int[np.ndarray, "{vocab}"]:
  """The assignment as int32 [V].

  Raises:
    ValueError: it has another length than `vocab`, is not of integers, or has codes outside [0, K).
  """
  table = np.asarray(table_of(assignment))
  check_shape(table.shape, vocab)
  if not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f"`assignment` must hold integers; got {table.dtype}. {REMEDY}")
  outside = np.flatnonzero((table < 0) | (table >= codes))
  if outside.size:
    token = outside[0]
    raise ValueError(
      f"`assignment` must hold codes in [0, {codes}); got {table[token]} for token {token}"
      f" ({outside.size} such tokens). {REMEDY}"
    )
  return table.astype(np.int32)


def check_codes(vocab: int, codes: int) -> None:
  """Raise ValueError unless there are at least one and at most V codes."""
  if not 1 <= codes <= vocab:
    raise ValueError(
      f"`codes` must be in [1, vocab]; got {codes} for vocab {vocab}. Give fewer codes than tokens."
    )


def checked_counts(counts: ArrayLike, vocab: int | None = None) -> Int[np.ndarray, "V"]:
  """The number of occurrences of each token, as int64 [V].

  Raises:
    ValueError: the counts are not one integer for each token, are negative or all zero, or add up
      to more than int64 holds.
  """
  table = host_array("counts", counts)
  remedy = "Count with np.bincount(tokens, minlength=vocab)."
  if table.ndim != 1 or vocab not in (None, table.size):
    shape = "(V,)" if vocab is None else f"({vocab},)"
    raise ValueError(f"`counts` must have shape {shape}; got {table.shape}. {remedy}")
  if not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f"`counts` must hold integers; got {table.dtype}. {remedy}")
  negative = np.flatnonzero(table < 0)
  if negative.size:
    token = negative[0]
    raise ValueError(f"`counts` must be at least 0; got {table[token]} for token {token}. {remedy}")
  if not table.any():
    raise ValueError(f"`counts` must not be all zero; got 0 for all {table.size} tokens. {remedy}")
  if (total := table.sum(dtype=np.float64)) >= 2**63:
    raise ValueError(f"`counts` must add up to less than 2**63; got {total:.3g}. Scale them down.")
  return table.astype(np.int64)


def checked_rows(embeddings: ArrayLike, codes: int) -> Float[np.ndarray, "V D"]:
  """Check embeddings, float32 [V, D], that are clustered into `codes` clusters.

  Raises:
    ValueError: the embeddings are not a matrix of real numbers, are fewer than the codes, or have
      a row with nan or infinity.
  """
  rows = host_array("embeddings", embeddings)
  if rows.ndim != 2:
    raise ValueError(
      f"`embeddings` must have shape [V, D], a row for each token; got {rows.shape}. Reshape them."
    )
  check_codes(len(rows), codes)
  rows = rows.astype(np.float32)
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if broken.size:
    first = ", ".join(map(str, broken[:8])) + (", ..." if broken.size > 8 else "")
    raise ValueError(
      f"`embeddings` must be finite; got nan or infinity in {broken.size} of {len(rows)} rows:"
      f" {first}. Use an earlier checkpoint, or set these rows to zero."
    )
  return rows


def checked_weights(weights: ArrayLike | None, vocab: int) -> Float[np.ndarray, "{vocab}"]:
  """The weight of each token, float32 [V]; None gives all tokens weight 1.

  Raises:
    ValueError: the weights are not one for each token, or are negative, nan, infinite or all zero,
      as given or in float32.
  """
  if weights is None:
    return np.ones(vocab, np.float32)
  table = host_array("weights", weights)
  if table.shape != (vocab,):
    raise ValueError(
      f"`weights` must have shape ({vocab},); got {table.shape}. Give one weight for each token."
    )
  with np.errstate(over="ignore"):
    narrow = table.astype(np.float32)
  wrong = np.flatnonzero(~(np.isfinite(narrow) & (table >= 0)))
  if wrong.size:
    raise ValueError(
      f"`weights` must be at least 0 and finite in float32; got {table[wrong[0]]} for token"
      f" {wrong[0]}. Use 0 for a token that does not count."
    )
  if not narrow.any():
    raise ValueError(
      f"`weights` must not be all zero in float32; got 0 for all {vocab} tokens. Give the counts of"
      " a text."
    )
  return narrow
