"""Which embeddings are there?"""

from vqjax.embeddings.base import Embedding
from vqjax.embeddings.dense import DenseEmbedding

__all__ = ["DenseEmbedding", "Embedding"]
