"""How does a trained dense model become one with a compressed head?"""

from vqjax.convert.compress import CODEBOOK, FULL, HEAD, compress, converted
from vqjax.convert.distilled import Distilled, FromTeacher
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
from vqjax.convert.starts import FromDense, FromStudent, Frozen, Mapped, MappedProduct
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
  "ContextKMeans",
  "Distilled",
  "Fixed",
  "FrequencyBins",
  "FromDense",
  "FromStudent",
  "FromTeacher",
  "Frozen",
  "KMeans",
  "Known",
  "Mapped",
  "MappedProduct",
  "Mapping",
  "ToCodebook",
  "ToLearnedCodebook",
  "ToLearnedProduct",
  "ToLowRank",
  "ToProduct",
  "ToResidual",
  "compress",
  "converted",
]
