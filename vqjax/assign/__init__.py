"""Assignments of tokens to codes, and the perplexity floor that they imply.

An assignment is int32 [V], token -> code. `CodebookHead(assignment_init=...)` takes the array, or a
function (vocab, codes) -> assignment: `contiguous`, `Random`, `FrequentAlone`.
"""

from vqjax.assign.bisection import bisected
from vqjax.assign.blocks import FrequentAlone, Random, contiguous, equal_count, equal_mass
from vqjax.assign.checks import Assignment, Given, check_shape, checked_assignment
from vqjax.assign.clusters import (
  Clustering,
  assigned_within,
  balanced_kmeans,
  by_kmeans,
  frequent_alone,
)
from vqjax.assign.exchange import Exchanged, bigrams, exchange
from vqjax.assign.groups import Grouping, grouping, memory_groups
from vqjax.assign.lower_bound import Floor, Offender, floor

__all__ = [
  "Assignment",
  "Clustering",
  "Exchanged",
  "Floor",
  "FrequentAlone",
  "Given",
  "Grouping",
  "Offender",
  "Random",
  "assigned_within",
  "balanced_kmeans",
  "bigrams",
  "bisected",
  "by_kmeans",
  "check_shape",
  "checked_assignment",
  "contiguous",
  "equal_count",
  "equal_mass",
  "exchange",
  "floor",
  "frequent_alone",
  "grouping",
  "memory_groups",
]
