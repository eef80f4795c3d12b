"""vqjax: vocabulary layers of language models, small and fast, in JAX and Flax."""

from vqjax.embeddings import CodebookEmbedding, DenseEmbedding, Embedding
from vqjax.heads import (
  CodebookHead,
  DenseHead,
  GroupedHead,
  Head,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
)
from vqjax.ops.distillation import SoftTargetLoss, linear_soft_target_loss
from vqjax.ops.softmax import (
  LinearSoftmax,
  linear_cross_entropy,
  linear_log_prob,
  linear_softmax,
)
from vqjax.types import Size

__all__ = [
  "CodebookEmbedding",
  "CodebookHead",
  "DenseEmbedding",
  "DenseHead",
  "Embedding",
  "GroupedHead",
  "Head",
  "LearnedProductHead",
  "LinearSoftmax",
  "LowRankHead",
  "ProductHead",
  "ResidualCodebookHead",
  "Size",
  "SoftTargetLoss",
  "linear_cross_entropy",
  "linear_log_prob",
  "linear_soft_target_loss",
  "linear_softmax",
]
