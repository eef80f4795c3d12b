"""What does a bidirectional encoder look like whose vocabulary layers are fields, and its tasks?"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lab.models.attention import ENCODER_AXES, NORM_AXES, EncoderBlock, stacked
from vqjax.models.base import check_heads, named
from vqjax.types import Dtype

Terms = dict[str, Float[Array, ""]]

MASKED = -2
"""Token id of a masked position: it has a token, which the model predicts. -1 is padding."""


class Encoder(nn.Module):
  """Every token's vector, having seen the whole row: the body of BERT.

  Learned positions and segments, LayerNorm, blocks of attention and a feed-forward layer with GELU,
  LayerNorm. Source: Devlin et al., BERT, 2019, whose norms are behind the branches, where these are
  in front of them.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    dim: width, D.
    layers: number of blocks.
    heads: of an attention.
    context: most tokens of a segment.
    hidden: width of the feed-forward layers.
    segments: kinds of segments: 2 for pairs of texts.
    dropout: probability of zeroing an entry, after the embedding and of every branch's output.
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
    if self.embedding.dim != self.dim:
      raise ValueError(
        f"embedding has dim {self.embedding.dim} in a model of dim {self.dim}; give it that"
      )
    normal = nn.initializers.normal(0.02)
    self.position = self.param("position", normal, (self.context, self.dim))
    self.segment = self.param("segment", normal, (self.segments, self.dim))
    self.mask_vector = self.param("mask_vector", normal, (self.dim,))
    options = self.dim, self.heads, self.hidden, self.dropout, self.dtype, nn.gelu
    self.blocks = stacked(EncoderBlock, self.layers, 2)(*options)
    self.first_norm, self.final_norm = (nn.LayerNorm(dtype=self.dtype) for _ in range(2))
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, tokens: Integer[Array, "B S T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B S T D"], Terms]:
    """The vectors of rows of segments, and the embedding's terms of the loss."""
    rows, segments, length = tokens.shape
    if segments > self.segments or length > self.context:
      raise ValueError(
        f"{segments} segments of {length} tokens exceed the model's {self.segments} of"
        f" {self.context}"
      )
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, self.mask_vector)
    place = self.position[:length] + self.segment[:segments, None]
    x_BND = (vectors + place).reshape(rows, -1, self.dim)
    x_BND = self.drop(self.first_norm(x_BND.astype(self.dtype)), deterministic)
    real = ((tokens >= 0) | (tokens == MASKED)).reshape(rows, 1, 1, -1)
    # A hidden token is there; what is behind the end is not.
    x_BND, _ = self.blocks(x_BND, None, real, deterministic)
    return self.final_norm(x_BND).reshape(*tokens.shape, self.dim), terms

  def logical_axes(self) -> dict:
    """Names of the axes of every variable."""
    own = {
      "position": ("positions", "embed"),
      "segment": ("norm", "embed"),
      "mask_vector": ("embed",),
      "blocks": ENCODER_AXES,
      "first_norm": NORM_AXES,
      "final_norm": NORM_AXES,
    }
    axes: dict[str, Any] = {"params": own}
    for collection, tree in self.embedding.logical_axes().items():
      axes.setdefault(collection, {})["embedding"] = tree
    return axes


class _Task(nn.Module):
  """What pre-training and fine-tuning share: an encoder."""

  encoder: Encoder

  @property
  def embedding(self) -> Embedding:
    """The encoder's."""
    return self.encoder.embedding

  @property
  def context(self) -> int:
    """The encoder's."""
    return self.encoder.context

  def logical_axes(self) -> dict:
    """The encoder's, and those of what a task adds."""
    axes = {name: {"encoder": tree} for name, tree in self.encoder.logical_axes().items()}
    for collection, tree in self.own_axes().items():
      axes[collection] = axes.get(collection, {}) | tree
    return axes

  def own_axes(self) -> dict:
    """Axes of what a task adds."""
    raise TypeError(f"{type(self).__name__} does not name its axes: define own_axes")


class MaskedLanguageModel(_Task):
  """The tokens that are hidden, from all others of a row: BERT's pre-training.

  Attributes:
    encoder: the body.
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
    """Log-probability, in nats, of each target; nan where there is none."""
    return self.head.log_prob(self._hidden(tokens, deterministic)[0], targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self._hidden(tokens, deterministic)
    log_prob, of_head = self.head.loss_terms(hidden, targets)
    return log_prob, named("embedding", terms) | named("head", of_head)

  def own_axes(self) -> dict:
    """Axes of the transformation before the head, and the head's."""
    own = {"transform": {"kernel": ("embed", "norm"), "bias": ("norm",)}, "norm": NORM_AXES}
    axes = {"params": own}
    for collection, tree in self.head.logical_axes().items():
      axes.setdefault(collection, {})["head"] = tree
    return axes


class PairClassifier(_Task):
  """The class of a pair of texts, from the mean of the encoder's vectors.

  Attributes:
    encoder: the body.
    classes: number of classes.
    dropout: of the mean.
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
    """Whether the likeliest class is the pair's."""
    return {"accuracy": self._scores(tokens, True)[0].argmax(axis=-1) == targets}

  def own_axes(self) -> dict:
    """Axes of the scores."""
    return {"params": {"output": {"kernel": ("embed", "norm"), "bias": ("norm",)}}}


class SpanFinder(_Task):
  """The first and the last token of a stretch of a text: two choices among its places.

  Attributes:
    encoder: the body.
  """

  def setup(self):
    self.output = nn.Dense(2)

  def _scores(self, tokens, deterministic):
    """[B, 2, T]: of each place to be the first, and the last."""
    x_B1TD, terms = self.encoder(tokens[:, None], deterministic)
    scores = jnp.moveaxis(self.output(x_B1TD[:, 0]).astype(jnp.float32), -1, 1)
    return jnp.where((tokens >= 0)[:, None], scores, -1e30), terms

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B 2"], deterministic: bool = True
  ) -> Float[Array, "B 2"]:
    """Log-probability, in nats, of the first and of the last place."""
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
    """Whether both places are right, for each of the two: an exact match."""
    right = self._scores(tokens, True)[0].argmax(axis=-1) == targets
    return {"accuracy": jnp.broadcast_to(right.all(axis=-1, keepdims=True), right.shape)}

  def own_axes(self) -> dict:
    """Axes of the scores."""
    return {"params": {"output": {"kernel": ("embed", "norm"), "bias": ("norm",)}}}


def _chosen(scores, targets):
  """The log-probabilities of the targets; of the first choice where there is none."""
  log_prob = jax.nn.log_softmax(scores, axis=-1)
  return jnp.take_along_axis(log_prob, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
