"""Which embeddings are there?"""

from vqjax.embeddings.base import Embedding
from vqjax.embeddings.codebook import CodebookEmbedding
from vqjax.embeddings.dense import DenseEmbedding

__all__ = ["CodebookEmbedding", "DenseEmbedding", "Embedding"]
