"""When is a table token -> code right, and what it is made from too?"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

Assignment = Callable[[int, int], Int[np.ndarray, "V"]]

REMEDY = "; build it with assign.contiguous(vocab, codes) or another function of vqjax.assign"


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
  """The assignment that is this table, whatever it was computed from.

  Attributes:
    table: the code of each token, integers [V].
  """

  table: ArrayLike

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]; ValueError where the table is of another vocabulary or codes."""
    return checked(self.table, vocab, codes)

  def __eq__(self, other: object) -> bool:
    """Whether the tables are equal: modules are compared and hashed by their fields."""
    return isinstance(other, Given) and np.array_equal(self.table, other.table)

  def __hash__(self) -> int:
    """Of the table's content."""
    return hash(np.asarray(self.table, np.int64).tobytes())


def check_shape(shape: tuple[int, ...], vocab: int) -> None:
  """ValueError where an assignment has not exactly one code for each token."""
  if shape != (vocab,):
    raise ValueError(f"vocab {vocab} has an assignment of shape {shape}{REMEDY}")


def checked(assignment: ArrayLike, vocab: int, codes: int) -> Int[np.ndarray, "{vocab}"]:
  """The assignment as int32 [V]; ValueError if it is of another length or names an absent code."""
  table = np.asarray(assignment)
  check_shape(table.shape, vocab)
  if not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f"an assignment of {table.dtype} names no codes: it holds integers{REMEDY}")
  outside = np.flatnonzero((table < 0) | (table >= codes))
  if outside.size:
    token = outside[0]
    raise ValueError(
      f"token {token} is assigned to code {table[token]}, outside [0, {codes}) ({outside.size} such"
      f" tokens){REMEDY}"
    )
  return table.astype(np.int32)


def check_codes(vocab: int, codes: int) -> None:
  """ValueError where there is no code, or more codes than tokens to sit on them."""
  if not 1 <= codes <= vocab:
    raise ValueError(f"codes {codes} for a vocabulary of {vocab}; give 1 to {vocab} codes")


def checked_counts(counts: ArrayLike, vocab: int | None = None) -> Int[np.ndarray, "V"]:
  """How often each token occurs, as int64 [V].

  Raises:
    ValueError: not one number a token, not integers, a negative one, no token occurs at all, or
      more than int64 can count.
  """
  table = np.asarray(counts)
  remedy = "; count with np.bincount(tokens, minlength=vocab)"
  if table.ndim != 1 or vocab not in (None, table.size):
    wanted = "(V,)" if vocab is None else f"({vocab},)"
    raise ValueError(f"counts of shape {table.shape}, where {wanted} is wanted{remedy}")
  if not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f"counts of {table.dtype} are no counts: they are integers{remedy}")
  negative = np.flatnonzero(table < 0)
  if negative.size:
    raise ValueError(f"token {negative[0]} has the count {table[negative[0]]}{remedy}")
  if not table.any():
    raise ValueError(f"the counts of all {table.size} tokens are zero{remedy} of some text")
  if (total := table.sum(dtype=np.float64)) >= 2**63:
    raise ValueError(f"the counts add up to {total:.3g}, more than int64 holds; scale them down")
  return table.astype(np.int64)


def checked_rows(embeddings: ArrayLike, codes: int) -> Float[np.ndarray, "V D"]:
  """One embedding a token, float32 [V, D], of which `codes` clusters can be made.

  Raises:
    ValueError: not a matrix, not numbers, fewer rows than codes, or a row with nan or infinity.
  """
  rows = np.asarray(embeddings)
  if rows.ndim != 2:
    raise ValueError(f"embeddings of shape {rows.shape}, where [V, D] is wanted: a row a token")
  if not np.can_cast(rows.dtype, np.float64, "same_kind"):
    raise ValueError(f"embeddings of {rows.dtype} are no numbers; give float32 rows")
  check_codes(len(rows), codes)
  rows = rows.astype(np.float32)
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if broken.size:
    first = ", ".join(map(str, broken[:8])) + (", ..." if broken.size > 8 else "")
    raise ValueError(
      f"{broken.size} of {len(rows)} embeddings hold nan or infinity: rows {first}; take an earlier"
      " checkpoint, or set these rows to zero"
    )
  return rows


def checked_weights(weights: ArrayLike | None, vocab: int) -> Float[np.ndarray, "{vocab}"]:
  """How much each token matters, float32 [V]; None: all alike.

  Raises:
    ValueError: not one number a token, one that is negative, nan or infinite, or all zero, as
      given or in float32.
  """
  if weights is None:
    return np.ones(vocab, np.float32)
  table = np.asarray(weights)
  if table.shape != (vocab,):
    raise ValueError(f"weights of shape {table.shape}, where ({vocab},) is wanted: one a token")
  with np.errstate(over="ignore"):
    narrow = table.astype(np.float32)
  wrong = np.flatnonzero(~(np.isfinite(narrow) & (table >= 0)))
  if wrong.size:
    raise ValueError(
      f"token {wrong[0]} has the weight {table[wrong[0]]}; give finite ones, at least 0, that"
      " float32 holds"
    )
  if not narrow.any():
    raise ValueError(f"the weights of all {vocab} tokens are zero; give counts of some text")
  return narrow
