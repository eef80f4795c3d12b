"""vqjax: vocabulary layers of language models, small and fast, in JAX and Flax."""

from vqjax.embeddings import DenseEmbedding, Embedding
from vqjax.heads import CodebookHead, DenseHead, GroupedHead, Head
from vqjax.ops.softmax import linear_log_prob
from vqjax.types import Size

__all__ = [
  "CodebookHead",
  "DenseEmbedding",
  "DenseHead",
  "Embedding",
  "GroupedHead",
  "Head",
  "Size",
  "linear_log_prob",
]
