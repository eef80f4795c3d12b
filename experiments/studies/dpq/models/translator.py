"""The translator: an encoder-decoder Transformer whose vocabulary layers are fields."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Integer

from experiments.studies.dpq.models.attention import XAVIER, stacked
from experiments.studies.dpq.models.outputs import HeadModel
from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lm.models.base import Terms, check_dim, check_dropout, check_heads, named

Memory = tuple[Float[Array, "L B S H C"], Float[Array, "L B S H C"], Bool[Array, "B S"]]
"""Keys and values of the source for each layer of the decoder, and which tokens are real."""


class Translator(HeadModel):
  """The Transformer of Vaswani et al., with a LayerNorm before each residual branch.

  The inputs are {"source": text, "target": its translation, one token behind}, [B, T] each, and
  tokens below 0 are padding. Encoder and decoder share the embedding, and end with a LayerNorm.
  Positions are sinusoids. Source: Vaswani et al., Attention is all you need, 2017.

  Attributes:
    embedding: tokens of both languages -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D.
    layers: number of layers of the encoder, and of the decoder.
    heads: number of attention heads, which divides `dim`.
    context: largest number of tokens in a sentence.
    hidden: width of the feed-forward layers.
    dropout: probability of zeroing an entry, after the embedding and in every branch's output.
  """

  embedding: Embedding
  head: Head
  dim: int
  layers: int
  heads: int
  context: int
  hidden: int
  dropout: float = 0.0

  def setup(self):
    check_heads(self.dim, self.heads)
    check_dropout(self.dropout)
    for name in ("embedding", "head"):
      check_dim(name, getattr(self, name), self.dim)
    options = self.layers, self.heads, self.hidden, self.dropout
    self.encoder, self.decoder = stacked(*options), stacked(*options)
    self.encoder_norm, self.decoder_norm = nn.LayerNorm(), nn.LayerNorm()
    # The keys and values of all of the decoder's layers are one matrix product.
    shape = self.layers, 2, self.heads, self.dim // self.heads
    self.memory_key_value = nn.DenseGeneral(shape, kernel_init=XAVIER)
    self.drop = nn.Dropout(self.dropout)

  def _embedded(self, tokens, deterministic):
    """Token vectors times sqrt(D), 0 for padding, plus positions; and the loss terms."""
    vectors, terms = self.embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, 0.0) * self.dim**0.5
    position = sinusoids(tokens.shape[1], self.dim)
    return self.drop(vectors + position, deterministic), terms

  def encode(
    self, source: Integer[Array, "B S"], deterministic: bool = True
  ) -> tuple[Memory, Terms]:
    """The memory of the sources, and the embedding's terms of the loss."""
    real_BS = source >= 0
    x_BSD, terms = self._embedded(source, deterministic)
    x_BSD, _ = self.encoder(x_BSD, None, real_BS[:, None, None], deterministic)
    both_BSL2HC = self.memory_key_value(self.encoder_norm(x_BSD))
    key, value = jnp.moveaxis(both_BSL2HC, (3, 2), (0, 1))
    return (key, value, real_BS), terms

  def decode(
    self, target: Integer[Array, "B T"], memory: Memory, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """Hidden vectors of a target, and the embedding's terms of the loss."""
    *key_value, real_BS = memory
    x_BTD, terms = self._embedded(target, deterministic)
    x_BTD, _ = self.decoder(x_BTD, tuple(key_value), real_BS[:, None, None], deterministic)
    return self.decoder_norm(x_BTD), terms

  def hidden_and_terms(self, inputs, deterministic=True):
    memory, source_terms = self.encode(inputs["source"], deterministic)
    hidden, target_terms = self.decode(inputs["target"], memory, deterministic)
    mean = {name: (source_terms[name] + target_terms[name]) / 2 for name in source_terms}
    return hidden, named("embedding", mean)

  def next_tokens(
    self, target: Integer[Array, "B T"], at: Int[Array, ""], memory: Memory, count: int
  ) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Log-probabilities and tokens of the `count` most likely ones that follow position `at`."""
    return self.head.top_k(self.decode(target, memory)[0][:, at], count)


def sinusoids(length: int, dim: int) -> Float[np.ndarray, "T D"]:
  """Sines, then cosines of positions at wavelengths from 2π to 10,000·2π.

  Source: Vaswani et al., Attention is all you need, 2017, Section 3.5.
  """
  rate = 10_000.0 ** -(np.arange(dim // 2) / max(dim // 2 - 1, 1))
  angle = np.arange(length)[:, None] * rate
  table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
  return np.pad(table, ((0, 0), (0, dim % 2))).astype(np.float32)
