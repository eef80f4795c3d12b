"""Embeddings: maps from tokens to vectors."""

from vqjax.embeddings.base import Embedding
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.embeddings.compact import CompactEmbedding
from vqjax.embeddings.composed import ComposedEmbedding
from vqjax.embeddings.dense import DenseEmbedding
from vqjax.embeddings.dpq import DPQEmbedding
from vqjax.embeddings.guided import GuidedEmbedding
from vqjax.embeddings.int8 import Int8Embedding
from vqjax.embeddings.low_rank import LowRankEmbedding
from vqjax.embeddings.packed import PackedEmbedding
from vqjax.embeddings.product import ProductEmbedding
from vqjax.embeddings.scalar import ScalarEmbedding

__all__ = [
  "CodebookEmbedding",
  "CompactEmbedding",
  "ComposedEmbedding",
  "DPQEmbedding",
  "DenseEmbedding",
  "Embedding",
  "GuidedEmbedding",
  "Int8Embedding",
  "LowRankEmbedding",
  "PackedEmbedding",
  "ProductEmbedding",
  "ScalarEmbedding",
]
