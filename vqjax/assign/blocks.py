"""Which code has a token by its number or its frequency alone?"""

import dataclasses

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.table import check_codes, checked_counts


def contiguous(vocab: int, codes: int) -> Int[np.ndarray, "V"]:
  """Equal blocks of consecutive tokens: token v on code floor(v·K / V).

  Source: VQ-Logits, Section 3.3, Option B, for training without prior embeddings.
  """
  check_codes(vocab, codes)
  return (np.arange(vocab, dtype=np.int64) * codes // vocab).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Random:
  """Equally many tokens on each code, drawn at random.

  Source: VQ-Logits, Table 6, "Random assignment (then fixed)".

  Attributes:
    seed: of the draw.
  """

  seed: int = 0

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    """Token -> code, int32 [V]."""
    return np.random.default_rng(self.seed).permutation(contiguous(vocab, codes))


@dataclasses.dataclass(frozen=True)
class FrequentAlone:
  """The first tokens have a code each; the others share what codes remain, in equal blocks.

  Token ids are taken to be in order of falling frequency, as word-level tokenizers and, roughly,
  BPE merges number them.

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
    check_codes(vocab, codes)
    alone = int(codes * self.fraction)
    rest = alone + contiguous(vocab - alone, codes - alone)
    return np.concatenate([np.arange(alone, dtype=np.int32), rest.astype(np.int32)])


def by_frequency(counts: Int[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
  """The tokens from the most frequent one on; ties in the order of their numbers."""
  return np.argsort(-counts, kind="stable")


def equal_count(counts: ArrayLike, codes: int) -> Int[np.ndarray, "V"]:
  """Blocks of equally many tokens, of the tokens [V] sorted by falling count.

  Source: VQ-Logits, Table 6, "Frequency-based binning".

  Raises:
    ValueError: counts that are none (see `checked_counts`), or more codes than tokens.
  """
  counts = checked_counts(counts)
  table = np.empty(len(counts), np.int32)
  table[by_frequency(counts)] = contiguous(len(counts), codes)
  return table


def equal_mass(counts: ArrayLike, codes: int) -> Int[np.ndarray, "V"]:
  """Blocks of as nearly equal total count as can be, of the tokens [V] sorted by falling count.

  Each code takes its share of what the codes before it left, and at least one token: the most
  frequent tokens are alone on their codes, the rarest share one with many.

  Raises:
    ValueError: counts that are none (see `checked_counts`), or more codes than tokens.
  """
  counts = checked_counts(counts)
  vocab = len(counts)
  check_codes(vocab, codes)
  order = by_frequency(counts)
  mass_before = np.concatenate([[0], np.cumsum(counts[order])])
  starts = np.zeros(codes, np.int64)
  for code in range(1, codes):
    start = starts[code - 1]
    share = (mass_before[-1] - mass_before[start]) / (codes - code + 1)
    wanted = mass_before[start] + share
    end = np.searchsorted(mass_before, wanted)
    end -= end > 0 and wanted - mass_before[end - 1] < mass_before[end] - wanted
    starts[code] = np.clip(end, start + 1, vocab - (codes - code))
  table = np.empty(vocab, np.int32)
  table[order] = np.searchsorted(starts, np.arange(vocab), side="right") - 1
  return table
