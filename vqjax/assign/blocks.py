"""Assignments from token ids or frequencies: blocks, bins and random assignments."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from vqjax.assign.checks import check_codes, checked_counts

__all__ = ["FrequentAlone", "Random", "contiguous", "equal_count", "equal_mass", "zipf_mass"]


def contiguous(vocab: int, codes: int) -> Int[np.ndarray, "V"]:
  """Equal blocks of consecutive token ids: token v has code floor(v·K / V).

  Source: VQ-Logits, Section 3.3, Option B, for training without prior embeddings.
  """
  check_codes(vocab, codes)
  return (np.arange(vocab, dtype=np.int64) * codes // vocab).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Random:
  """A random assignment with equally many tokens on each code.

  Source: VQ-Logits, Table 6, "Random assignment (then fixed)".

  Attributes:
    seed: seed of the permutation.
  """

  seed: int = 0

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    return np.random.default_rng(self.seed).permutation(contiguous(vocab, codes))


@dataclasses.dataclass(frozen=True)
class FrequentAlone:
  """A code for each of the first tokens; the others share the rest in equal blocks.

  Token ids must be sorted by falling frequency, as those of word-level tokenizers are and those of
  BPE merges roughly are.

  Tokens on one code are equally likely, so that no model with `contiguous` codes has a perplexity
  below V/K. The most frequent words are most of the text: on codes of their own they lower that
  floor.

  Attributes:
    fraction: fraction of the codes, in [0, 1), that have one frequent token each.
  """

  fraction: float = 0.75

  def __call__(self, vocab: int, codes: int) -> Int[np.ndarray, "V"]:
    if not 0 <= self.fraction < 1:
      raise ValueError(
        f"`fraction` must be in [0, 1), so that the other tokens have a code; got {self.fraction}."
        " 0.5 is usual."
      )
    check_codes(vocab, codes)
    alone = int(codes * self.fraction)
    rest = alone + contiguous(vocab - alone, codes - alone)
    return np.concatenate([np.arange(alone, dtype=np.int32), rest.astype(np.int32)])


def by_frequency(counts: Int[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
  """The tokens by falling count, with ties by token id."""
  return np.argsort(-counts, kind="stable")


def equal_count(counts: ArrayLike, codes: int) -> Int[np.ndarray, "V"]:
  """Bins of equally many tokens, by falling count.

  Source: VQ-Logits, Table 6, "Frequency-based binning".

  Raises:
    ValueError: the counts are not valid (see `checked_counts`), or the codes exceed the tokens.
  """
  counts = checked_counts(counts)
  table = np.empty(len(counts), np.int32)
  table[by_frequency(counts)] = contiguous(len(counts), codes)
  return table


def equal_mass(counts: ArrayLike, codes: int) -> Int[np.ndarray, "V"]:
  """Bins of nearly equal total count, by falling count.

  Each bin takes an equal share of the mass that the bins before it left, and at least one token:
  the most frequent tokens have a bin of their own, the rarest share one with many others.

  Raises:
    ValueError: the counts are not valid (see `checked_counts`), or the codes exceed the tokens.
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
    target = mass_before[start] + share
    end = np.searchsorted(mass_before, target)
    end -= end > 0 and target - mass_before[end - 1] < mass_before[end] - target
    starts[code] = np.clip(end, start + 1, vocab - (codes - code))
  table = np.empty(vocab, np.int32)
  table[order] = np.searchsorted(starts, np.arange(vocab), side="right") - 1
  return table


def zipf_counts(vocab: int) -> Int[np.ndarray, "V"]:
  """Counts under Zipf's law: token v occurs 1/(v + 1) times as often as token 0."""
  if vocab < 1:
    raise ValueError(f"`vocab` must be at least 1; got {vocab}. Give the number of tokens.")
  return np.maximum(10**9 // np.arange(1, vocab + 1, dtype=np.int64), 1)


def zipf_mass(vocab: int, codes: int) -> Int[np.ndarray, "V"]:
  """Bins of equal mass under Zipf's law: frequent tokens alone, the rarest with many others.

  The best assignment that is known without data, for token ids in order of falling frequency, as
  those of word-level tokenizers are and those of BPE merges roughly are.
  """
  check_codes(vocab, codes)
  return equal_mass(zipf_counts(vocab), codes)
