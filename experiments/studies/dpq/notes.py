"""Which of the DPQ paper's numbers and claims contradict its own formulas?

Each correction is computed here, from the formula of its Section 3: 32·n·d bits of the full table
over n·D·log2 K bits of codes and 32·K·d of values (32·K·d/D where subspaces share them).
"""

import math
from typing import NamedTuple


class Table(NamedTuple):
  """A table of embeddings: n rows of d numbers."""

  n: int
  d: int


PTB_MEDIUM = Table(10_000, 650)
WMT = Table(32_000, 512)


def ratio(table: Table, codes: int, subspaces: int, shared: bool = False) -> float:
  """The paper's compression ratio of a product code, K and D as it calls them."""
  values = 32 * codes * table.d / (subspaces if shared else 1)
  bits = table.n * subspaces * math.log2(codes) + values
  return 32 * table.n * table.d / bits


def rank_bound(codes: int, subspaces: int) -> int:
  """The most that the rank of n rows of D one-hot blocks of K can be."""
  return subspaces * (codes - 1) + 1


def notes() -> str:
  """What does not hold, and why."""
  clusters = [ratio(PTB_MEDIUM, codes, PTB_MEDIUM.d // 2) for codes in (64, 128, 256)]
  printed = ", ".join(f"{x:.2f}" for x in clusters)
  rebuilt = [ratio(WMT, codes, 128) for codes in (32, 128)]
  small = ratio(PTB_MEDIUM, 32, 25, shared=True)
  lines = (
    "- Theorem 1 concludes that the embedding matrix has full rank from that of B, the n x K·D",
    "  matrix of the one-hot codes. For D > 1 and n >= K·D no B has it: the K columns of each of",
    "  its D blocks add up to the column of ones, so that its rank is at most D·(K - 1) + 1. With",
    "  K·D = d, as the paper suggests, the embedding's is no more:",
    f"  K = 2, D = 3 give {rank_bound(2, 3)}, not 6.",
    "- Table 9 gives product quantisation with K = 64, 128, 256 the ratios 8.3, 6.7, 5.3. By the",
    f"  formula, with d/2 subspaces, they are {printed}; and 4 bits a number are 8.0, not 8.3.",
    "- Table 11 has K = 32, D = 128 twice, at 25.0 and 17.0. The formula gives",
    f"  {rebuilt[0]:.2f} for K = 32 and {rebuilt[1]:.2f} for K = 128: the second is K = 128.",
    "- Most ratios are the formula's times (d + 1)/d:",
    f"  Table 3's 163.2 is {small:.2f} · 651/650 = {small * 651 / 650:.2f} (K = 32, D = 25,"
    " shared).",
    "  No setting gives WikiText-2's 95.25 for DPQ-VQ, nor WMT19's 18.00.",
    "- Algorithm 1 takes the arg max of a distance; it means the arg min.",
    "- Eq. 5 as printed gives the values the gradient of the soft weights. The reference",
    "  implementation gives them that of the one-hot choice, which is exact, and so does this one.",
    "- Not in the paper, but in its reference implementation, and here: each code's responses are",
    "  normalised over the tokens of a batch and the subspaces, DPQ-VQ's too, before the arg max.",
  )
  return "## What the paper gets wrong by its own formulas\n\n" + "\n".join(lines) + "\n"
