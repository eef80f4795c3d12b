"""Which output heads are there?"""

from vqjax.heads.base import Head
from vqjax.heads.codebook import CodebookHead
from vqjax.heads.dense import DenseHead
from vqjax.heads.grouped import GroupedHead
from vqjax.heads.low_rank import LowRankHead
from vqjax.heads.product import LearnedProductHead, ProductHead
from vqjax.heads.residual import ResidualCodebookHead

__all__ = [
  "CodebookHead",
  "DenseHead",
  "GroupedHead",
  "Head",
  "LearnedProductHead",
  "LowRankHead",
  "ProductHead",
  "ResidualCodebookHead",
]
