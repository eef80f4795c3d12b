"""Conversions of arrays [V, D] to variables of compressed layers.

A `Mapping` assigns tokens to codes, an `Ordering` sorts them for a grouped head, and a target
(`ToCodebook`, `ToGrouped`, ...) makes a head's variables, all from `TokenStats`. The functions
`to_levels`, `to_int8`, `to_clusters` and `reconstruct` make an embedding's variables from a trained
table.
"""

from vqjax.convert.from_table import (
  Guide,
  LearnedCodes,
  clustered,
  reconstruct,
  squared_error,
  to_clusters,
  to_int8,
  to_levels,
)
from vqjax.convert.grouped import (
  ByClusters,
  ByFrequency,
  Ordering,
  Shuffled,
  ToGrouped,
  in_order,
)
from vqjax.convert.mappings import (
  Balanced,
  Brown,
  ContextKMeans,
  ContextVectors,
  Fixed,
  FrequencyBins,
  KMeans,
  Mapping,
  TokenStats,
)
from vqjax.convert.routes import LikelyTokens, likely_tokens, train_routes
from vqjax.convert.targets import (
  ToCodebook,
  ToDense,
  ToLearnedCodebook,
  ToLearnedProduct,
  ToLowRank,
  ToProduct,
  ToResidual,
)
from vqjax.convert.trained_variables import frozen, head_of, merged, part_of, to_head, with_part

__all__ = [
  "Balanced",
  "Brown",
  "ByClusters",
  "ByFrequency",
  "ContextKMeans",
  "ContextVectors",
  "Fixed",
  "FrequencyBins",
  "Guide",
  "KMeans",
  "LearnedCodes",
  "LikelyTokens",
  "Mapping",
  "Ordering",
  "Shuffled",
  "ToCodebook",
  "ToDense",
  "ToGrouped",
  "ToLearnedCodebook",
  "ToLearnedProduct",
  "ToLowRank",
  "ToProduct",
  "ToResidual",
  "TokenStats",
  "clustered",
  "frozen",
  "head_of",
  "in_order",
  "likely_tokens",
  "merged",
  "part_of",
  "reconstruct",
  "squared_error",
  "to_clusters",
  "to_head",
  "to_int8",
  "to_levels",
  "train_routes",
  "with_part",
]
