"""vqjax: vocabulary layers of language models, small and fast, in JAX and Flax."""

from vqjax.embeddings import (
  CodebookEmbedding,
  CompactEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  Embedding,
)
from vqjax.heads import (
  AdaptiveHead,
  ClassBasedHead,
  CodebookHead,
  DenseHead,
  GroupedHead,
  Head,
  HierarchicalHead,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
  SampledSoftmaxHead,
  UnigramBias,
  UnigramProposal,
)
from vqjax.ops.distillation import SoftTargetLoss, linear_soft_target_loss
from vqjax.ops.softmax import (
  LinearSoftmax,
  linear_cross_entropy,
  linear_log_prob,
  linear_softmax,
)
from vqjax.quantizers import CentroidQuantizer, MovingAverage, Quantizer, SoftmaxQuantizer
from vqjax.types import Size

__all__ = [
  "AdaptiveHead",
  "CentroidQuantizer",
  "ClassBasedHead",
  "CodebookEmbedding",
  "CodebookHead",
  "CompactEmbedding",
  "DPQEmbedding",
  "DenseEmbedding",
  "DenseHead",
  "Embedding",
  "GroupedHead",
  "Head",
  "HierarchicalHead",
  "LearnedCodebookHead",
  "LearnedProductHead",
  "LinearSoftmax",
  "LowRankHead",
  "MovingAverage",
  "ProductHead",
  "Quantizer",
  "ResidualCodebookHead",
  "SampledSoftmaxHead",
  "Size",
  "SoftTargetLoss",
  "SoftmaxQuantizer",
  "UnigramBias",
  "UnigramProposal",
  "linear_cross_entropy",
  "linear_log_prob",
  "linear_soft_target_loss",
  "linear_softmax",
]
