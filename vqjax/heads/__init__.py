"""Which output heads are there?"""

from vqjax.heads.base import Head
from vqjax.heads.codebook import CodebookHead
from vqjax.heads.dense import DenseHead
from vqjax.heads.grouped import GroupedHead

__all__ = ["CodebookHead", "DenseHead", "GroupedHead", "Head"]
