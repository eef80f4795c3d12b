"""Which code does each token of the vocabulary sit on?

An assignment is a function (vocab, codes) -> int32 [V]: what `CodebookHead(assignment_init=...)`
expects. Token ids are taken to be in order of falling frequency, as word-level tokenizers and,
roughly, BPE merges number them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

Assignment = Callable[[int, int], Int[np.ndarray, "V"]]


def contiguous(vocab: int, codes: int) -> Int[np.ndarray, "V"]:
  """Equal blocks of consecutive tokens: token v on code floor(v·K / V).

  Source: VQ-Logits, Section 3.3, Option B, for training without prior embeddings.
  """
  return (np.arange(vocab, dtype=np.int64) * codes // vocab).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class FrequentAlone:
  """The first tokens have a code each; the others share what codes remain, in equal blocks.

  Tokens on one code are equally likely, so no model with `contiguous` codes has a perplexity below
  V/K. The most frequent words carry most of the text: alone on their codes they escape that floor.

  Attributes:
    fraction: the part of the codes that one frequent token each has, in [0, 1).
  """

  fraction: float = 0.75

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    if not 0 <= self.fraction < 1:
      raise ValueError(f"fraction {self.fraction} is outside [0, 1): the rest needs a code too")
    alone = min(int(codes * self.fraction), vocab)
    rest = alone + contiguous(vocab - alone, codes - alone)
    return np.concatenate([np.arange(alone, dtype=np.int32), rest.astype(np.int32)])


REMEDY = "; build it with assign.contiguous(vocab, codes) or another function of vqjax.assign"


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
