"""BERT: a bidirectional encoder whose vocabulary layers are fields, and its tasks."""

import abc

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from experiments.studies.dpq.models.attention import ENCODER_AXES, EncoderBlock, stacked
from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lm.models.base import NORM_AXES, Terms, check_dim, check_heads, named, vocabulary_axes
from vqjax.types import Dtype

MASKED = -2
"""Token id of a masked position, whose token the model predicts; -1 is padding."""


OUTPUT_AXES = {"kernel": ("embed", "norm"), "bias": ("norm",)}
"""Logical axes of a dense layer whose output is replicated."""


class BertEncoder(nn.Module):
  """The encoder of BERT: a vector for each token, which depends on the whole row.

  Learned positions and segments, LayerNorm, blocks of attention and a GELU feed-forward layer,
  LayerNorm. Each branch has its LayerNorm in front, where that of BERT is behind it. Source: Devlin
  et al., BERT: pre-training of deep bidirectional transformers, 2019.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    dim: model width, D, which the parts share.
    layers: number of blocks.
    heads: number of attention heads, which divides `dim`.
    context: largest number of tokens in a segment.
    hidden: width of the feed-forward layers.
    segments: largest number of segments in a row; 2 for pairs of texts.
    dropout: probability of zeroing an entry, after the embedding and in every branch's output.
    dtype: dtype of the computation; parameters are float32.
  """

  embedding: Embedding
  dim: int
  layers: int
  heads: int
  context: int
  hidden: int
  segments: int = 2
  dropout: float = 0.0
  dtype: Dtype = jnp.float32

  def setup(self):
    check_heads(self.dim, self.heads)
    check_dim("embedding", self.embedding, self.dim)
    normal = nn.initializers.normal(0.02)
    self.position = self.param("position", normal, (self.context, self.dim))
    self.segment = self.param("segment", normal, (self.segments, self.dim))
    self.mask_vector = self.param("mask_vector", normal, (self.dim,))
    options = self.dim, self.heads, self.hidden, self.dropout, self.dtype, nn.gelu
    self.blocks = stacked(EncoderBlock, self.layers)(*options)
    self.first_norm, self.final_norm = (nn.LayerNorm(dtype=self.dtype) for _ in range(2))
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, tokens: Integer[Array, "B S T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B S T D"], Terms]:
    """The vectors of rows of segments, and the embedding's terms of the loss."""
    rows, segments, length = tokens.shape
    if segments > self.segments or length > self.context:
      raise ValueError(
        f"`tokens` must have at most segments {self.segments} x context {self.context} in a row;"
        f" got {segments} x {length}. Raise the encoder's segments or context."
      )
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, self.mask_vector)
    position = self.position[:length] + self.segment[:segments, None]
    x_BND = (vectors + position).reshape(rows, -1, self.dim)
    x_BND = self.drop(self.first_norm(x_BND.astype(self.dtype)), deterministic)
    # Masked positions are attended to, padding is not.
    real = ((tokens >= 0) | (tokens == MASKED)).reshape(rows, 1, 1, -1)
    x_BND, _ = self.blocks(x_BND, None, real, deterministic)
    return self.final_norm(x_BND).reshape(*tokens.shape, self.dim), terms

  def logical_axes(self) -> dict:
    """Names of the axes of every variable; tuples are the leaves."""
    own = {
      "position": ("positions", "embed"),
      "segment": ("norm", "embed"),
      "mask_vector": ("embed",),
      "blocks": ENCODER_AXES,
      "first_norm": NORM_AXES,
      "final_norm": NORM_AXES,
    }
    return vocabulary_axes(self, {"params": own})


class _Task(nn.Module, metaclass=abc.ABCMeta):
  """An encoder with the output layers of a task, which subclasses define."""

  encoder: BertEncoder

  @property
  def embedding(self) -> Embedding:
    """The encoder's embedding."""
    return self.encoder.embedding

  @property
  def context(self) -> int:
    """The encoder's context."""
    return self.encoder.context

  def logical_axes(self) -> dict:
    """Names of the axes of every variable; tuples are the leaves."""
    axes = {name: {"encoder": tree} for name, tree in self.encoder.logical_axes().items()}
    for collection, tree in self.own_axes().items():
      axes[collection] = axes.get(collection, {}) | tree
    return axes

  @abc.abstractmethod
  def own_axes(self) -> dict:
    """Logical axes of the variables of the task's output layers."""


class MaskedLanguageModel(_Task):
  """BERT's pre-training: the masked tokens are predicted from the others of a row.

  Attributes:
    encoder: tokens -> vectors.
    head: vectors of the encoder's width -> a distribution over the vocabulary.
  """

  head: Head

  def setup(self):
    self.transform = nn.Dense(self.encoder.dim)
    self.norm = nn.LayerNorm()

  def _hidden(self, tokens, deterministic):
    x_B1TD, terms = self.encoder(tokens[:, None], deterministic)
    return self.norm(nn.gelu(self.transform(x_B1TD[:, 0]))), terms

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target; nan for a negative target."""
    return self.head.log_prob(self._hidden(tokens, deterministic)[0], targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self._hidden(tokens, deterministic)
    log_prob, head_terms = self.head.loss_terms(hidden, targets)
    return log_prob, named("embedding", terms) | named("head", head_terms)

  def own_axes(self) -> dict:
    """Logical axes of the transformation before the head, and of the head."""
    axes = {"params": {"transform": OUTPUT_AXES, "norm": NORM_AXES}}
    for collection, tree in self.head.logical_axes().items():
      axes.setdefault(collection, {})["head"] = tree
    return axes


class PairClassifier(_Task):
  """A classifier of pairs of texts, from the mean of the encoder's vectors.

  Attributes:
    encoder: tokens -> vectors.
    classes: number of classes.
    dropout: probability of zeroing an entry of the mean.
  """

  classes: int
  dropout: float = 0.1

  def setup(self):
    self.output = nn.Dense(self.classes)
    self.drop = nn.Dropout(self.dropout)

  def _scores(self, tokens, deterministic):
    x_BSTD, terms = self.encoder(tokens, deterministic)
    real = (tokens >= 0)[..., None]
    count = jnp.maximum(real.sum(axis=(1, 2)), 1)
    mean_BD = jnp.where(real, x_BSTD, 0).sum(axis=(1, 2)) / count
    return self.output(self.drop(mean_BD, deterministic)), terms

  def log_prob(
    self, tokens: Integer[Array, "B S T"], targets: Int[Array, "B"], deterministic: bool = True
  ) -> Float[Array, "B"]:
    """Log-probability, in nats, of each pair's class."""
    return _chosen(self._scores(tokens, deterministic)[0], targets)

  def loss_terms(
    self, tokens: Integer[Array, "B S T"], targets: Int[Array, "B"], deterministic: bool = True
  ) -> tuple[Float[Array, "B"], Terms]:
    """`log_prob`, and the embedding's terms of the loss as "embedding/NAME"."""
    scores, terms = self._scores(tokens, deterministic)
    return _chosen(scores, targets), named("embedding", terms)

  def hits(
    self, tokens: Integer[Array, "B S T"], targets: Int[Array, "B"]
  ) -> dict[str, Bool[Array, "B"]]:
    """Whether the most likely class is that of the pair."""
    return {"accuracy": self._scores(tokens, True)[0].argmax(axis=-1) == targets}

  def own_axes(self) -> dict:
    """Logical axes of the output layer."""
    return {"params": {"output": OUTPUT_AXES}}


class SpanFinder(_Task):
  """The first and the last position of a span, each by a softmax over positions.

  Attributes:
    encoder: tokens -> vectors.
  """

  def setup(self):
    self.output = nn.Dense(2)

  def _scores(self, tokens, deterministic):
    """Scores of each position as the first and as the last, [B, 2, T]."""
    x_B1TD, terms = self.encoder(tokens[:, None], deterministic)
    scores = jnp.moveaxis(self.output(x_B1TD[:, 0]).astype(jnp.float32), -1, 1)
    return jnp.where((tokens >= 0)[:, None], scores, -1e30), terms

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B 2"], deterministic: bool = True
  ) -> Float[Array, "B 2"]:
    """Log-probability, in nats, of the first and of the last position."""
    return _chosen(self._scores(tokens, deterministic)[0], targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B 2"], deterministic: bool = True
  ) -> tuple[Float[Array, "B 2"], Terms]:
    """`log_prob`, and the embedding's terms of the loss as "embedding/NAME"."""
    scores, terms = self._scores(tokens, deterministic)
    return _chosen(scores, targets), named("embedding", terms)

  def hits(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B 2"]
  ) -> dict[str, Bool[Array, "B 2"]]:
    """Whether both positions are right (exact match), repeated for each of the two."""
    right = self._scores(tokens, True)[0].argmax(axis=-1) == targets
    return {"accuracy": jnp.broadcast_to(right.all(axis=-1, keepdims=True), right.shape)}

  def own_axes(self) -> dict:
    """Logical axes of the output layer."""
    return {"params": {"output": OUTPUT_AXES}}


def _chosen(scores, targets):
  """The log-probabilities of the targets; of class 0 for a negative target."""
  log_prob = jax.nn.log_softmax(scores, axis=-1)
  return jnp.take_along_axis(log_prob, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
