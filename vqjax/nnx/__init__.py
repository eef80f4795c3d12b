"""NNX modules with the names, fields, methods and numbers of the Linen layers.

  head = vqjax.nnx.CodebookHead(vocab=50_257, dim=64, codes=1024, rngs=nnx.Rngs(0))
  loss = -head.log_prob(hidden, tokens).mean()

A layer has its variables from the start. Parameters are `nnx.Param`, integer tables `Codes`, other
state `nnx.BatchStat` or `LayerState`. A head is tied by sharing an embedding of this package, an
`nnx.Embed` or an `nnx.Param` [V, D].
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax import embeddings, heads, ngrams, quantizers
from vqjax.embeddings import CompactEmbedding
from vqjax.ngrams import MemoryCache
from vqjax.nnx.layer import AxisRules, Codes, Layer, LayerState, VocabularyLayer
from vqjax.ops.certified import Best
from vqjax.ops.gradient_share import GradientShare
from vqjax.ops.row_factory import RowFactory
from vqjax.quantizers import Quantized
from vqjax.types import Size

# Methods are written out, although each only names the Linen method that it calls: what an editor
# completes and a type checker knows is what stands here. Layers whose methods are those of their
# base class have no body; the signature of their constructor is set in `Layer.__init_subclass__`.

# Terms of the training loss by name.
Terms = dict[str, Float[Array, ""]]


class Head(VocabularyLayer, of=heads.Head):
  """A distribution over the vocabulary for each hidden vector."""

  def __call__(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B V"]:
    """Return `logits(hidden)`."""
    return self.logits(hidden)

  def logits(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B V"]:
    """Scores whose softmax is the distribution; the only method that builds [*B, V]."""
    return self._call("logits", hidden)

  def log_prob(
    self,
    hidden: Float[ArrayLike, "*B D"],
    tokens: Integer[ArrayLike, "*B"],
    temperature: float | int | Float[ArrayLike, "..."] = 1.0,
    mask: Bool[ArrayLike, "*B"] | None = None,
    ignore_index: int | None = None,
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; see `vqjax.Head.log_prob`."""
    return self._call("log_prob", hidden, tokens, temperature, mask, ignore_index)

  def loss_terms(
    self,
    hidden: Float[ArrayLike, "*B D"],
    tokens: Integer[ArrayLike, "*B"],
    mask: Bool[ArrayLike, "*B"] | None = None,
    ignore_index: int | None = None,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "*B"], Terms]:
    """`log_prob` and further terms of the training loss; see `vqjax.Head.loss_terms`."""
    return self._call("loss_terms", hidden, tokens, mask, ignore_index, rngs=rngs)

  def sample(
    self,
    hidden: Float[ArrayLike, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int | Float[ArrayLike, "..."] = 1.0,
    top_k: int | None = None,
    top_p: float | int | Float[ArrayLike, "..."] | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """Draw a token from the exact distribution; see `vqjax.Head.sample`."""
    return self._call("sample", hidden, key, temperature, top_k, top_p, allowed)

  def top_k(
    self, hidden: Float[ArrayLike, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and tokens of the k most likely tokens, best first, exactly."""
    return self._call("top_k", hidden, k)

  def gradient_share(
    self, hidden: Float[ArrayLike, "*B D"], tokens: Integer[ArrayLike, "*B"]
  ) -> GradientShare:
    """The share of the logits' gradient that `hidden` receives; see `vqjax.Head`."""
    return self._call("gradient_share", hidden, tokens)


class Embedding(VocabularyLayer, of=embeddings.Embedding):
  """A map from tokens to vectors."""

  def __call__(self, tokens: Integer[ArrayLike, "*B"]) -> Float[Array, "*B D"]:
    """The vector of each token; nan for a token outside [0, V)."""
    return self._call("__call__", tokens)

  def loss_terms(
    self,
    tokens: Integer[ArrayLike, "*B"],
    deterministic: bool = True,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "*B D"], Terms]:
    """The vectors and further terms of the loss; see `vqjax.Embedding.loss_terms`."""
    return self._call("loss_terms", tokens, deterministic, rngs=rngs)

  def table(self) -> Float[Array, "V D"]:
    """The vectors of the whole vocabulary."""
    return self._call("table")

  def inference_size(self) -> Size:
    """The size of what inference needs, which may be less than `size`."""
    return self.layer.inference_size()


class _Compactable(Layer):
  """A layer with a smaller form for inference."""

  def compact(self) -> CompactEmbedding:
    """The form for inference."""
    return self.layer.compact(jax.device_get(self.linen_variables()))


class _Linear(Head):
  """A head whose scores are hidden · rowᵀ + bias."""

  def linear(self) -> tuple[RowFactory, Float[Array, "V"] | None]:
    """The rows and the bias that the head scores with."""
    return self._call("linear")


class _Grouped(Head):
  """A head that predicts a group, then a slot in it."""

  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""
    return self.layer.groups_and_slots()

  def group_of(self, tokens: Integer[ArrayLike, "*B"]) -> Int[Array, "*B"]:
    """The group of each token; -1 for a token outside [0, V)."""
    return self._call("group_of", tokens)

  def log_group(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B G"]:
    """Log-probabilities of the groups in nats."""
    return self._call("log_group", hidden)

  def top_k_visited(
    self, hidden: Float[ArrayLike, "*B D"], k: int
  ) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"], Int[Array, "*B"]]:
    """`top_k`, and the number of groups whose slots were scored."""
    return self._call("top_k_visited", hidden, k)

  def sample_visited(
    self,
    hidden: Float[ArrayLike, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """The token that `sample` draws, and the number of groups whose slots were scored."""
    return self._call("sample_visited", hidden, key, temperature, top_k, top_p, allowed)


class Quantizer(Layer, of=quantizers.Quantizer):
  """A differentiable map from vectors to vectors given by a few codes."""

  dim: int
  width: int

  def __call__(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> Float[Array, "*B D"]:
    """The quantised vectors; what the mask excludes contributes to no statistic."""
    return self._call("__call__", vectors, train, mask, rngs=rngs)

  def quantized(
    self,
    vectors: Float[Array, "*B D"],
    train: bool = False,
    mask: Bool[Array, "*B"] | None = None,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> Quantized:
    """The quantised vectors, their codes and the terms of the training loss."""
    return self._call("quantized", vectors, train, mask, rngs=rngs)

  def encode(self, vectors: Float[Array, "*B D"]) -> Int[Array, "*B M"]:
    """The codes of vectors, computed as outside training."""
    return self._call("encode", vectors)

  def decode(self, codes: Int[Array, "*B M"]) -> Float[Array, "*B D"]:
    """The vectors of codes."""
    return self._call("decode", codes)

  def responses(self, vectors: Float[Array, "*B D"]) -> Float[Array, "*B M K"]:
    """The score of each code for a vector, normalised as outside training."""
    return self._call("responses", vectors)

  def values(self) -> Float[Array, "Q K C"]:
    """The vectors that codes choose from."""
    return self._call("values")


class SoftmaxQuantizer(Quantizer, of=quantizers.SoftmaxQuantizer): ...


class CentroidQuantizer(Quantizer, of=quantizers.CentroidQuantizer): ...


class EncoderQuantizer(Quantizer, of=quantizers.EncoderQuantizer): ...


class FreeQuantizer(Quantizer, of=quantizers.FreeQuantizer): ...


class DenseEmbedding(Embedding, of=embeddings.DenseEmbedding): ...


class CodebookEmbedding(Embedding, of=embeddings.CodebookEmbedding): ...


class ProductEmbedding(_Compactable, Embedding, of=embeddings.ProductEmbedding): ...


class PackedEmbedding(Embedding, of=embeddings.PackedEmbedding): ...


class Int8Embedding(Embedding, of=embeddings.Int8Embedding): ...


class LowRankEmbedding(Embedding, of=embeddings.LowRankEmbedding): ...


class ScalarEmbedding(_Compactable, Embedding, of=embeddings.ScalarEmbedding): ...


class DPQEmbedding(_Compactable, Embedding, of=embeddings.DPQEmbedding):
  def codes_of(self, tokens: Integer[ArrayLike, "*B"]) -> Int[Array, "*B M"]:
    """The codes of tokens in [0, V)."""
    return self._call("codes_of", tokens)

  def values(self) -> Float[Array, "Q K C"]:
    """The values that the codes choose from."""
    return self._call("values")


class ComposedEmbedding(Embedding, of=embeddings.ComposedEmbedding): ...


class GuidedEmbedding(Embedding, of=embeddings.GuidedEmbedding): ...


class DenseHead(_Linear, of=heads.DenseHead): ...


class SampledSoftmaxHead(_Linear, of=heads.SampledSoftmaxHead): ...


class CodebookHead(_Linear, of=heads.CodebookHead): ...


class LearnedCodebookHead(_Linear, of=heads.LearnedCodebookHead): ...


class ResidualCodebookHead(_Linear, of=heads.ResidualCodebookHead): ...


class ProductHead(_Linear, of=heads.ProductHead): ...


class PackedHead(_Linear, of=heads.PackedHead): ...


class LearnedProductHead(_Linear, of=heads.LearnedProductHead): ...


class DPQHead(_Compactable, _Linear, of=heads.DPQHead): ...


class GroupedHead(_Grouped, of=heads.GroupedHead): ...


class UnsharedGroupedHead(_Grouped, of=heads.UnsharedGroupedHead): ...


class AdaptiveHead(Head, of=heads.AdaptiveHead): ...


class LowRankHead(Head, of=heads.LowRankHead): ...


class MixtureHead(Head, of=heads.MixtureHead):
  def log_prior(self, hidden: Float[ArrayLike, "*B D"]) -> Float[Array, "*B M"]:
    """Log-probabilities of the components in nats."""
    return self._call("log_prior", hidden)


class CertifiedHead(_Linear, of=heads.CertifiedHead):
  def best(self, hidden: Float[ArrayLike, "*B D"], k: int = 1) -> Best:
    """The k best tokens and their scores, exactly, and how many rows were in doubt."""
    return self._call("best", hidden, k)


class RoutedHead(Head, of=heads.RoutedHead): ...


class ClassBasedHead(Head, of=heads.ClassBasedHead): ...


class HierarchicalHead(Head, of=heads.HierarchicalHead): ...


class NGramEmbedding(Layer, of=ngrams.NGramEmbedding):
  """The vectors of the n-grams that end at each token."""

  def _create(self, part: Any, rngs: nnx.Rngs, rules: AxisRules | None) -> Any:
    # The table names its rows "vocab", and this layer "ngrams".
    if rules and "ngrams" in rules:
      rules = {**rules, "vocab": rules["ngrams"]}
    return super()._create(part, rngs, rules)

  def __call__(
    self, tokens: Integer[ArrayLike, "*B T"], previous: Integer[ArrayLike, "*B P"] | None = None
  ) -> Float[Array, "*B T E"]:
    """The vectors of the n-grams; see `vqjax.ngrams.NGramEmbedding`."""
    return self._call("__call__", tokens, previous)

  def loss_terms(
    self,
    tokens: Integer[ArrayLike, "*B T"],
    previous: Integer[ArrayLike, "*B P"] | None = None,
    deterministic: bool = True,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "*B T E"], Terms]:
    """The vectors and further terms of the loss; see `vqjax.ngrams.NGramEmbedding`."""
    return self._call("loss_terms", tokens, previous, deterministic, rngs=rngs)


class NGramMemory(Layer, of=ngrams.NGramMemory):
  """What a decoder adds to its residual stream from a table of n-grams."""

  def __call__(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    vectors: Float[ArrayLike, "*B T E"] | None = None,
  ) -> Float[Array, "*B T C"]:
    """What is added to the streams of texts that begin here."""
    return self._call("__call__", hidden, tokens, vectors)

  def loss_terms(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    deterministic: bool = True,
    *,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "*B T C"], Terms]:
    """What is added, and further terms of the loss; see `vqjax.ngrams.NGramMemory`."""
    return self._call("loss_terms", hidden, tokens, deterministic, rngs=rngs)

  def cache(self, *batch: int) -> MemoryCache:
    """The cache of texts that begin, for `step`."""
    return self.layer.cache(*batch)

  def step(
    self,
    hidden: Float[ArrayLike, "*B T C"],
    tokens: Integer[ArrayLike, "*B T"],
    cache: MemoryCache,
    vectors: Float[ArrayLike, "*B T E"] | None = None,
    count: Int[ArrayLike, "*B"] | None = None,
  ) -> tuple[Float[Array, "*B T C"], MemoryCache]:
    """What is added to the streams of the next tokens, and the cache for those after them."""
    return self._call("step", hidden, tokens, cache, vectors, count)


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
  "Embedding",
  "EncoderQuantizer",
  "FreeQuantizer",
  "GroupedHead",
  "GuidedEmbedding",
  "Head",
  "HierarchicalHead",
  "Int8Embedding",
  "Layer",
  "LayerState",
  "LearnedCodebookHead",
  "LearnedProductHead",
  "LowRankEmbedding",
  "LowRankHead",
  "MixtureHead",
  "NGramEmbedding",
  "NGramMemory",
  "PackedEmbedding",
  "PackedHead",
  "ProductEmbedding",
  "ProductHead",
  "Quantizer",
  "ResidualCodebookHead",
  "RoutedHead",
  "SampledSoftmaxHead",
  "ScalarEmbedding",
  "SoftmaxQuantizer",
  "UnsharedGroupedHead",
  "from_linen",
]
