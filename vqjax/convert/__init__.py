"""How does a trained dense model become one with a compressed head or embedding?"""

from vqjax.convert.compress import CODEBOOK, FULL, HEAD, compress, converted
from vqjax.convert.distilled import Distilled, FromTeacher
from vqjax.convert.grouped import Regrouped, ToGrouped
from vqjax.convert.mappings import (
  Balanced,
  Brown,
  ContextKMeans,
  Fixed,
  FrequencyBins,
  KMeans,
  Known,
  Mapping,
)
from vqjax.convert.orders import ByClusters, ByFrequency, Shuffled, in_order
from vqjax.convert.shared import to_head
from vqjax.convert.starts import FromDense, FromStudent, Frozen, Mapped, MappedProduct
from vqjax.convert.tables import ClusteredCentroids, Codes, FromTable, Guide, clustered
from vqjax.convert.targets import (
  ToCodebook,
  ToLearnedCodebook,
  ToLearnedProduct,
  ToLowRank,
  ToProduct,
  ToResidual,
)

__all__ = [
  "CODEBOOK",
  "FULL",
  "HEAD",
  "Balanced",
  "Brown",
  "ByClusters",
  "ByFrequency",
  "ClusteredCentroids",
  "Codes",
  "ContextKMeans",
  "Distilled",
  "Fixed",
  "FrequencyBins",
  "FromDense",
  "FromStudent",
  "FromTable",
  "FromTeacher",
  "Frozen",
  "Guide",
  "KMeans",
  "Known",
  "Mapped",
  "MappedProduct",
  "Mapping",
  "Regrouped",
  "Shuffled",
  "ToCodebook",
  "ToGrouped",
  "ToLearnedCodebook",
  "ToLearnedProduct",
  "ToLowRank",
  "ToProduct",
  "ToResidual",
  "clustered",
  "compress",
  "converted",
  "in_order",
  "to_head",
]
