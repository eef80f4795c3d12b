"""NNX modules with the names, fields, methods and numbers of the Linen layers.

  head = vqjax.nnx.CodebookHead(vocab=50_257, dim=64, codes=1024, rngs=nnx.Rngs(0))
  loss = -head.log_prob(hidden, tokens).mean()

A layer has its variables from the start. Parameters are `nnx.Param`, integer tables `Codes`, other
state `nnx.BatchStat` or `LayerState`. A head is tied by sharing an embedding of this package, an
`nnx.Embed` or an `nnx.Param` [V, D].
"""

from vqjax import embeddings, heads, quantizers
from vqjax.nnx.layer import AxisRules, Codes, Layer, LayerState


class SoftmaxQuantizer(Layer, of=quantizers.SoftmaxQuantizer): ...


class CentroidQuantizer(Layer, of=quantizers.CentroidQuantizer): ...


class EncoderQuantizer(Layer, of=quantizers.EncoderQuantizer): ...


class FreeQuantizer(Layer, of=quantizers.FreeQuantizer): ...


class DenseEmbedding(Layer, of=embeddings.DenseEmbedding): ...


class CodebookEmbedding(Layer, of=embeddings.CodebookEmbedding): ...


class ProductEmbedding(Layer, of=embeddings.ProductEmbedding): ...


class QuantizedEmbedding(Layer, of=embeddings.QuantizedEmbedding): ...


class Int8Embedding(Layer, of=embeddings.Int8Embedding): ...


class LowRankEmbedding(Layer, of=embeddings.LowRankEmbedding): ...


class ScalarEmbedding(Layer, of=embeddings.ScalarEmbedding): ...


class DPQEmbedding(Layer, of=embeddings.DPQEmbedding): ...


class ComposedEmbedding(Layer, of=embeddings.ComposedEmbedding): ...


class GuidedEmbedding(Layer, of=embeddings.GuidedEmbedding): ...


class DenseHead(Layer, of=heads.DenseHead): ...


class SampledSoftmaxHead(Layer, of=heads.SampledSoftmaxHead): ...


class CodebookHead(Layer, of=heads.CodebookHead): ...


class LearnedCodebookHead(Layer, of=heads.LearnedCodebookHead): ...


class ResidualCodebookHead(Layer, of=heads.ResidualCodebookHead): ...


class ProductHead(Layer, of=heads.ProductHead): ...


class QuantizedHead(Layer, of=heads.QuantizedHead): ...


class LearnedProductHead(Layer, of=heads.LearnedProductHead): ...


class DPQHead(Layer, of=heads.DPQHead): ...


class GroupedHead(Layer, of=heads.GroupedHead): ...


class UnsharedGroupedHead(Layer, of=heads.UnsharedGroupedHead): ...


class AdaptiveHead(Layer, of=heads.AdaptiveHead): ...


class LowRankHead(Layer, of=heads.LowRankHead): ...


class MixtureHead(Layer, of=heads.MixtureHead): ...


class CertifiedHead(Layer, of=heads.CertifiedHead): ...


class RoutedHead(Layer, of=heads.RoutedHead): ...


class ClassBasedHead(Layer, of=heads.ClassBasedHead): ...


class HierarchicalHead(Layer, of=heads.HierarchicalHead): ...


from_linen = Layer.from_linen

__all__ = [
  "AdaptiveHead",
  "AxisRules",
  "CentroidQuantizer",
  "CertifiedHead",
  "ClassBasedHead",
  "CodebookEmbedding",
  "CodebookHead",
  "Codes",
  "ComposedEmbedding",
  "DPQEmbedding",
  "DPQHead",
  "DenseEmbedding",
  "DenseHead",
  "EncoderQuantizer",
  "FreeQuantizer",
  "GroupedHead",
  "GuidedEmbedding",
  "HierarchicalHead",
  "Int8Embedding",
  "Layer",
  "LayerState",
  "LearnedCodebookHead",
  "LearnedProductHead",
  "LowRankEmbedding",
  "LowRankHead",
  "MixtureHead",
  "ProductEmbedding",
  "ProductHead",
  "QuantizedEmbedding",
  "QuantizedHead",
  "ResidualCodebookHead",
  "RoutedHead",
  "SampledSoftmaxHead",
  "ScalarEmbedding",
  "SoftmaxQuantizer",
  "UnsharedGroupedHead",
  "from_linen",
]
