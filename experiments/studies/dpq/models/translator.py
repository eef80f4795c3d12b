"""Encoder-decoders, among them the Transformer of Vaswani et al."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from experiments.studies.dpq.models import beam
from experiments.studies.dpq.models.attention import (
  DECODER_AXES,
  ENCODER_AXES,
  XAVIER,
  DecoderBlock,
  EncoderBlock,
  sinusoids,
  stacked,
)
from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lm.models.base import (
  NORM_AXES,
  Terms,
  check_dim,
  check_dropout,
  check_heads,
  named,
  vocabulary_axes,
)
from vqjax.types import Dtype

Inputs = dict[str, Integer[Array, "B _"]]
"""{"source": text, "target": its translation, shifted by one token}; tokens below 0 are padding."""


class EncoderDecoder(nn.Module, metaclass=abc.ABCMeta):
  """A model of each token of a target, given the source and the tokens before it.

  A subclass has a field `context`, the largest number of tokens in a sentence.

  Attributes:
    embedding: embedding of the source, and of the target without `target_embedding`.
    head: hidden vectors of width `dim` -> a distribution over the target's vocabulary.
    dim: model width, D, which the parts share.
    target_embedding: embedding of the target; None: `embedding`.
  """

  embedding: Embedding
  head: Head
  dim: int
  target_embedding: Embedding | None = dataclasses.field(default=None, kw_only=True)

  @abc.abstractmethod
  def hidden_and_terms(
    self, inputs: Inputs, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """Final hidden vectors of the target, and the embeddings' terms of the loss."""

  @abc.abstractmethod
  def begin(self, source: Integer[Array, "B S"], beams: int) -> Any:
    """The initial state of decoding, with each source repeated `beams` times in a row."""

  @abc.abstractmethod
  def step(self, tokens: Integer[Array, "B"], state: Any) -> tuple[Float[Array, "B D"], Any]:
    """The hidden vectors after one more token of each target, and the next state.

    The first axis of every array of the state is that of the sentences.
    """

  @abc.abstractmethod
  def own_axes(self) -> dict:
    """Logical axes of the variables of the body."""

  @property
  def of_target(self) -> Embedding:
    """The embedding of the target."""
    return self.embedding if self.target_embedding is None else self.target_embedding

  def check_layers(self) -> None:
    """Raise ValueError unless embeddings, head and body have the same width."""
    for name in ("embedding", "head", "target_embedding"):
      check_dim(name, getattr(self, name), self.dim)

  def check_length(self, tokens: Integer[Array, "B _"]) -> None:
    """Raise ValueError if a sentence is longer than the context."""
    if tokens.shape[1] > self.context:
      raise ValueError(
        f"`tokens` must have at most context {self.context} columns; got {tokens.shape[1]}."
        " Raise the model's context."
      )

  def log_prob(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target; nan for padding."""
    return self.head.log_prob(self.hidden_and_terms(inputs, deterministic)[0], targets)

  def loss_terms(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], Terms]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self.hidden_and_terms(inputs, deterministic)
    log_prob, head_terms = self.head.loss_terms(hidden, targets)
    return log_prob, terms | named("head", head_terms)

  def likeliest(
    self, tokens: Integer[Array, "B"], state: Any, count: int
  ) -> tuple[Float[Array, "B k"], Int[Array, "B k"], Any]:
    """The `count` most likely next tokens with log-probabilities, and the new state."""
    hidden, state = self.step(tokens, state)
    return *self.head.top_k(hidden, count), state

  def logical_axes(self) -> dict:
    """Names of the axes of every variable; tuples are the leaves."""
    return vocabulary_axes(self, self.own_axes())


def mean_terms(source: Terms, target: Terms) -> Terms:
  """The mean of the loss terms of both embeddings, as "embedding/NAME"."""
  means = {}
  for name in sorted(source.keys() | target.keys()):
    values = [terms[name] for terms in (source, target) if name in terms]
    means[name] = sum(values) / len(values)
  return named("embedding", means)


def translate(
  model: EncoderDecoder,
  variables: Mapping[str, Any],
  source: Integer[Array, "B S"],
  eos: int,
  beams: int = 4,
  penalty: float = 0.6,
) -> beam.BeamResult:
  """The best translation of each source by beam search; see `beam.beam_search`."""
  count = min(2 * beams, model.head.vocab)
  step = lambda tokens, state: model.apply(variables, tokens, state, count, method="likeliest")
  state = model.apply(variables, source, beams, method="begin")
  return beam.beam_search(
    step,
    state,
    eos=eos,
    penalty=penalty,
    rows=len(source),
    beams=beams,
    length=model.context,
  )


class Memory(NamedTuple):
  """Keys and values of the source for each decoder layer, by sentence."""

  key: Float[Array, "B L S H C"]
  value: Float[Array, "B L S H C"]
  real: Bool[Array, "B S"]


class Decoding(NamedTuple):
  """The state of decoding, by sentence; `position` is shared."""

  memory: Memory
  key: Float[Array, "B L T H C"]
  value: Float[Array, "B L T H C"]
  position: Int[Array, ""]


class Translator(EncoderDecoder):
  """The Transformer of Vaswani et al., with a LayerNorm before each residual branch.

  Encoder and decoder end with a LayerNorm too. Positions are sinusoids. Source: Vaswani et al.,
  Attention is all you need, 2017.

  Attributes:
    layers: number of layers of the encoder, and of the decoder.
    heads: number of attention heads, which divides `dim`.
    context: largest number of tokens in a sentence.
    hidden: width of the feed-forward layers.
    dropout: probability of zeroing an entry, after the embeddings and in every branch's output.
    dtype: dtype of the computation; parameters are float32.
  """

  layers: int
  heads: int
  context: int
  hidden: int
  dropout: float = 0.0
  dtype: Dtype = jnp.float32

  def setup(self):
    check_heads(self.dim, self.heads)
    for name in ("layers", "context", "hidden"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Raise it.")
    check_dropout(self.dropout)
    self.check_layers()
    options = (self.dim, self.heads, self.hidden, self.dropout, self.dtype)
    self.encoder = stacked(EncoderBlock, self.layers)(*options)
    self.decoder = stacked(DecoderBlock, self.layers)(*options)
    norm = lambda: nn.LayerNorm(dtype=self.dtype)
    self.encoder_norm, self.decoder_norm = norm(), norm()
    # The keys and values of all of the decoder's layers are one matrix product.
    shape = self.layers, 2, self.heads, self.dim // self.heads
    self.memory_key_value = nn.DenseGeneral(shape, dtype=self.dtype, kernel_init=XAVIER)
    self.drop = nn.Dropout(self.dropout)

  def _embedded(self, embedding: Embedding, tokens, deterministic, first=0):
    """Token vectors times sqrt(D), 0 for padding, plus positions from `first` on."""
    self.check_length(tokens)
    vectors, terms = embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, 0.0) * self.dim**0.5
    position = lax.dynamic_slice_in_dim(sinusoids(self.context, self.dim), first, tokens.shape[1])
    return self.drop((vectors + position).astype(self.dtype), deterministic), terms

  def encode(self, source: Integer[Array, "B S"], deterministic: bool = True) -> Memory:
    """Keys and values of the sources for the decoder."""
    return self._encode(source, deterministic)[0]

  def _encode(self, source, deterministic) -> tuple[Memory, dict]:
    real_BS = source >= 0
    x_BSD, terms = self._embedded(self.embedding, source, deterministic)
    x_BSD, _ = self.encoder(x_BSD, None, real_BS[:, None, None], deterministic)
    both = jnp.moveaxis(self.memory_key_value(self.encoder_norm(x_BSD)), 3, 0)
    key, value = jnp.moveaxis(both, 3, 2)  # [B, L, S, H, C] each
    return Memory(key, value, real_BS), terms

  def hidden_and_terms(
    self, inputs: Inputs, deterministic: bool = True
  ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
    """Final hidden vectors of the target, and the embeddings' terms of the loss."""
    memory, terms = self._encode(inputs["source"], deterministic)
    x_BTD, target_terms = self._embedded(self.of_target, inputs["target"], deterministic)
    x_BTD, _ = self._decoded(x_BTD, memory, None, deterministic)
    return x_BTD, mean_terms(terms, target_terms)

  def _decoded(self, x_BTD, memory: Memory, cache, deterministic):
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    per_layer = layers_first(memory.key), layers_first(memory.value), cache
    x_BTD, cache = self.decoder(x_BTD, per_layer, memory.real[:, None, None], deterministic)
    return self.decoder_norm(x_BTD), cache

  def begin(self, source: Integer[Array, "B S"], beams: int) -> Decoding:
    """The initial state of decoding, with each source repeated `beams` times in a row."""
    memory = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), self.encode(source))
    rows = len(source) * beams
    shape = rows, self.layers, self.context, self.heads, self.dim // self.heads
    zeros = jnp.zeros(shape, self.dtype)
    return Decoding(memory, zeros, zeros, jnp.int32(0))

  def step(
    self, tokens: Integer[Array, "B"], state: Decoding
  ) -> tuple[Float[Array, "B D"], Decoding]:
    """The hidden vectors after one more token of each target, and the next state."""
    x_B1D, _ = self._embedded(self.of_target, tokens[:, None], True, state.position)
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    at = jnp.broadcast_to(state.position, (self.layers,))
    cache = layers_first(state.key), layers_first(state.value), at
    x_B1D, (key, value) = self._decoded(x_B1D, state.memory, cache, True)
    key, value = jnp.moveaxis(key, 0, 1), jnp.moveaxis(value, 0, 1)
    return x_B1D[:, 0], Decoding(state.memory, key, value, state.position + 1)

  def own_axes(self) -> dict:
    """Logical axes of encoder, decoder and the keys and values of the source."""
    return {
      "params": {
        "encoder": ENCODER_AXES,
        "decoder": DECODER_AXES,
        "encoder_norm": NORM_AXES,
        "decoder_norm": NORM_AXES,
        "memory_key_value": {
          "kernel": ("embed", "layers", "qkv", "heads", "head_dim"),
          "bias": ("layers", "qkv", "heads", "head_dim"),
        },
      }
    }
