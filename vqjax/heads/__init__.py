"""Output heads: distributions over the vocabulary for hidden vectors."""

from __future__ import annotations

from vqjax.heads.adaptive import AdaptiveHead
from vqjax.heads.base import Head
from vqjax.heads.certified import CertifiedHead
from vqjax.heads.class_based import ClassBasedHead
from vqjax.heads.codebook import CodebookHead
from vqjax.heads.dense import DenseHead
from vqjax.heads.dpq import DPQHead
from vqjax.heads.grouped import GroupedHead
from vqjax.heads.hierarchical import HierarchicalHead
from vqjax.heads.learned_codebook import LearnedCodebookHead
from vqjax.heads.low_rank import LowRankHead
from vqjax.heads.mixture import MixtureHead
from vqjax.heads.packed import PackedHead
from vqjax.heads.product import LearnedProductHead, ProductHead
from vqjax.heads.residual import ResidualCodebookHead
from vqjax.heads.routed import RoutedHead
from vqjax.heads.sampled import SampledSoftmaxHead
from vqjax.heads.unigram import UnigramBias, UnigramProposal
from vqjax.heads.unshared import UnsharedGroupedHead
from vqjax.ops.scores import SigmoidCap, SigSoftmax

__all__ = [
  "AdaptiveHead",
  "CertifiedHead",
  "ClassBasedHead",
  "CodebookHead",
  "DPQHead",
  "DenseHead",
  "GroupedHead",
  "Head",
  "HierarchicalHead",
  "LearnedCodebookHead",
  "LearnedProductHead",
  "LowRankHead",
  "MixtureHead",
  "PackedHead",
  "ProductHead",
  "ResidualCodebookHead",
  "RoutedHead",
  "SampledSoftmaxHead",
  "SigSoftmax",
  "SigmoidCap",
  "UnigramBias",
  "UnigramProposal",
  "UnsharedGroupedHead",
]
