"""BERT: a bidirectional encoder whose vocabulary layers are fields, its pre-training and a task."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Integer

from experiments.studies.dpq.models.attention import stacked
from experiments.studies.dpq.models.outputs import ClassModel, HeadModel
from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lm.models.base import Terms, check_dim, check_heads, named

MASKED = -2
"""Token id of a masked position, whose token the model predicts; -1 is padding."""


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
    dropout: probability of zeroing an entry, after the embedding and in every branch's output.
  """

  embedding: Embedding
  dim: int
  layers: int
  heads: int
  context: int
  hidden: int
  dropout: float = 0.0

  def setup(self):
    check_heads(self.dim, self.heads)
    check_dim("embedding", self.embedding, self.dim)
    normal = nn.initializers.normal(0.02)
    self.position = self.param("position", normal, (self.context, self.dim))
    self.segment = self.param("segment", normal, (2, self.dim))
    self.mask_vector = self.param("mask_vector", normal, (self.dim,))
    self.blocks = stacked(self.layers, self.heads, self.hidden, self.dropout, nn.gelu)
    self.first_norm, self.final_norm = nn.LayerNorm(), nn.LayerNorm()
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, tokens: Integer[Array, "B S T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B S T D"], Terms]:
    """The vectors of rows of at most two segments, and the embedding's terms of the loss."""
    rows, segments, length = tokens.shape
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, self.mask_vector)
    position = self.position[:length] + self.segment[:segments, None]
    x_BND = (vectors + position).reshape(rows, -1, self.dim)
    x_BND = self.drop(self.first_norm(x_BND), deterministic)
    # Masked positions are attended to, padding is not.
    real = ((tokens >= 0) | (tokens == MASKED)).reshape(rows, 1, 1, -1)
    x_BND, _ = self.blocks(x_BND, None, real, deterministic)
    return self.final_norm(x_BND).reshape(*tokens.shape, self.dim), terms


class _Task:
  """What a model with a field `encoder` has of it."""

  @property
  def embedding(self) -> Embedding:
    """The encoder's embedding."""
    return self.encoder.embedding

  @property
  def context(self) -> int:
    """The encoder's context."""
    return self.encoder.context


class MaskedLanguageModel(_Task, HeadModel):
  """BERT's pre-training: the masked tokens are predicted from the others of a row.

  Attributes:
    encoder: tokens -> vectors.
    head: vectors of the encoder's width -> a distribution over the vocabulary.
  """

  encoder: BertEncoder
  head: Head

  def setup(self):
    self.transform = nn.Dense(self.encoder.dim)
    self.norm = nn.LayerNorm()

  def hidden_and_terms(self, inputs, deterministic=True):
    x_B1TD, terms = self.encoder(inputs[:, None], deterministic)
    return self.norm(nn.gelu(self.transform(x_B1TD[:, 0]))), named("embedding", terms)


class PairClassifier(_Task, ClassModel):
  """A classifier of pairs of texts, [B, 2, T], from the mean of the encoder's vectors.

  Attributes:
    encoder: tokens -> vectors.
    classes: number of classes.
    dropout: probability of zeroing an entry of the mean.
  """

  encoder: BertEncoder
  classes: int
  dropout: float = 0.1

  def setup(self):
    self.output = nn.Dense(self.classes)
    self.drop = nn.Dropout(self.dropout)

  def scores(self, tokens, deterministic=True):
    x_BSTD, terms = self.encoder(tokens, deterministic)
    real = (tokens >= 0)[..., None]
    count = jnp.maximum(real.sum(axis=(1, 2)), 1)
    mean_BD = jnp.where(real, x_BSTD, 0).sum(axis=(1, 2)) / count
    return self.output(self.drop(mean_BD, deterministic)), terms
