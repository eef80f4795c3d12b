"""Assignments of tokens to codes, and the perplexity floor that they imply.

An assignment is int32 [V], token -> code. `CodebookHead(assignment_init=...)` takes the array, or a
function (vocab, codes) -> assignment, such as `zipf_mass`. What a text tells is in `TextStats`.
"""

from vqjax.assign.bisection import bisected
from vqjax.assign.blocks import (
  FrequentAlone,
  Random,
  contiguous,
  equal_count,
  equal_mass,
  zipf_mass,
)
from vqjax.assign.checks import Assignment, Given, check_shape, checked_assignment
from vqjax.assign.clusters import (
  Clustering,
  assigned_within,
  balanced_kmeans,
  by_kmeans,
  frequent_alone,
)
from vqjax.assign.exchange import Exchanged, bigrams, exchange
from vqjax.assign.groups import Grouping, grouping, memory_groups, ordered_in_groups
from vqjax.assign.lower_bound import Floor, Offender, floor, least_floor
from vqjax.assign.text import TextStats, context_vectors

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
  "TextStats",
  "assigned_within",
  "balanced_kmeans",
  "bigrams",
  "bisected",
  "by_kmeans",
  "check_shape",
  "checked_assignment",
  "context_vectors",
  "contiguous",
  "equal_count",
  "equal_mass",
  "exchange",
  "floor",
  "frequent_alone",
  "grouping",
  "least_floor",
  "memory_groups",
  "ordered_in_groups",
  "zipf_mass",
]
