"""Conversions of trained arrays [V, D] to compressed heads and embeddings."""

from vqjax.convert.grouped import ToGrouped
from vqjax.convert.mappings import (
  Balanced,
  Brown,
  ContextKMeans,
  Fixed,
  FrequencyBins,
  KMeans,
  Mapping,
  TokenStats,
)
from vqjax.convert.orders import ByClusters, ByFrequency, Shuffled, in_order
from vqjax.convert.product_head import to_head
from vqjax.convert.targets import (
  ToCodebook,
  ToLearnedCodebook,
  ToLearnedProduct,
  ToLowRank,
  ToProduct,
  ToResidual,
)

__all__ = [
  "Balanced",
  "Brown",
  "ByClusters",
  "ByFrequency",
  "ContextKMeans",
  "Fixed",
  "FrequencyBins",
  "KMeans",
  "Mapping",
  "Shuffled",
  "ToCodebook",
  "ToGrouped",
  "ToLearnedCodebook",
  "ToLearnedProduct",
  "ToLowRank",
  "ToProduct",
  "ToResidual",
  "TokenStats",
  "in_order",
  "to_head",
]
