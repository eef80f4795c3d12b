"""Which code does each token of the vocabulary sit on, and what does that cost at least?

An assignment is a function (vocab, codes) -> int32 [V]: what `CodebookHead(assignment_init=...)`
expects. `contiguous`, `Random` and `FrequentAlone` are such functions; a table that was computed
from counts, embeddings or bigrams becomes one by `Given(table)`.
"""

from vqjax.assign.balanced import assigned_within, balanced_kmeans
from vqjax.assign.blocks import FrequentAlone, Random, contiguous, equal_count, equal_mass
from vqjax.assign.clusters import Clustering, by_kmeans, frequent_alone
from vqjax.assign.exchange import Exchanged, bigrams, exchange
from vqjax.assign.files import FromFile, load, save
from vqjax.assign.groups import Grouping, grouping, memory_groups
from vqjax.assign.lower_bound import Floor, Offender, floor
from vqjax.assign.table import Assignment, Given, check_shape, checked

__all__ = [
  "Assignment",
  "Clustering",
  "Exchanged",
  "Floor",
  "FrequentAlone",
  "FromFile",
  "Given",
  "Grouping",
  "Offender",
  "Random",
  "assigned_within",
  "balanced_kmeans",
  "bigrams",
  "by_kmeans",
  "check_shape",
  "checked",
  "contiguous",
  "equal_count",
  "equal_mass",
  "exchange",
  "floor",
  "frequent_alone",
  "grouping",
  "load",
  "memory_groups",
  "save",
]
