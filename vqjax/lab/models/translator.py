"""What does an encoder-decoder look like whose vocabulary layers are fields?"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.lab.models.attention import (
  DECODER_AXES,
  ENCODER_AXES,
  NORM_AXES,
  XAVIER,
  DecoderBlock,
  EncoderBlock,
  sinusoids,
  stacked,
)
from vqjax.lab.models.seq2seq import EncoderDecoder, Inputs, mean_terms
from vqjax.models.base import check_heads
from vqjax.types import Dtype


class Memory(NamedTuple):
  """What the decoder sees of the source, for each of its layers; sentences on the first axis."""

  key: Float[Array, "B L S H C"]
  value: Float[Array, "B L S H C"]
  real: Bool[Array, "B S"]


class Decoding(NamedTuple):
  """Where a decoding stands: sentences on the first axis."""

  memory: Memory
  key: Float[Array, "B L T H C"]
  value: Float[Array, "B L T H C"]
  position: Int[Array, ""]


class Translator(EncoderDecoder):
  """The Transformer of Vaswani et al.: a token of the target given the source and those before.

  Each block is a residual branch of a LayerNorm ("pre-norm"), with a LayerNorm at both ends.
  Positions are sinusoids. Source: Vaswani et al., Attention is all you need, 2017.

  Attributes:
    layers: of the encoder, and of the decoder.
    heads: of an attention.
    context: most tokens of a sentence.
    hidden: width of the feed-forward layers.
    dropout: probability of zeroing an entry, after the embeddings and of every branch's output.
    dtype: dtype of the computation; parameters are float32.
  """

  layers: int
  heads: int
  context: int
  hidden: int
  dropout: float = 0.0
  dtype: Dtype = jnp.float32

  def setup(self):
    self._check()
    options = (self.dim, self.heads, self.hidden, self.dropout, self.dtype)
    self.encoder = stacked(EncoderBlock, self.layers, 2)(*options)
    self.decoder = stacked(DecoderBlock, self.layers, 2)(*options)
    norm = lambda: nn.LayerNorm(dtype=self.dtype)
    self.encoder_norm, self.decoder_norm = norm(), norm()
    # The keys and values of all of the decoder's layers are one matrix product.
    shape = self.layers, 2, self.heads, self.dim // self.heads
    self.memory_key_value = nn.DenseGeneral(shape, dtype=self.dtype, kernel_init=XAVIER)
    self.drop = nn.Dropout(self.dropout)

  def _check(self):
    check_heads(self.dim, self.heads)
    if min(self.layers, self.context, self.hidden) < 1:
      raise ValueError(
        f"layers {self.layers}, context {self.context} and hidden {self.hidden} must be at least 1"
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout {self.dropout} is outside [0, 1); 0.1 is usual")
    self.check_layers()

  def _embedded(self, embedding: Embedding, tokens, deterministic, first=0):
    """Vectors of tokens at the positions from `first` on, scaled by sqrt D; zeros for padding."""
    self.check_length(tokens)
    vectors, terms = embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, 0.0) * self.dim**0.5
    where = lax.dynamic_slice_in_dim(sinusoids(self.context, self.dim), first, tokens.shape[1])
    return self.drop((vectors + where).astype(self.dtype), deterministic), terms

  def encode(self, source: Integer[Array, "B S"], deterministic: bool = True) -> Memory:
    """What the decoder sees of the sources."""
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
    x_BTD, of_target = self._embedded(self.of_target, inputs["target"], deterministic)
    x_BTD, _ = self._decoded(x_BTD, memory, None, deterministic)
    return x_BTD, mean_terms(terms, of_target)

  def _decoded(self, x_BTD, memory: Memory, cache, deterministic):
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    given = layers_first(memory.key), layers_first(memory.value), cache
    x_BTD, cache = self.decoder(x_BTD, given, memory.real[:, None, None], deterministic)
    return self.decoder_norm(x_BTD), cache

  def begin(self, source: Integer[Array, "B S"], beams: int) -> Decoding:
    """A decoding of each source, `beams` times, one after another."""
    memory = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), self.encode(source))
    rows = len(source) * beams
    shape = rows, self.layers, self.context, self.heads, self.dim // self.heads
    zeros = jnp.zeros(shape, self.dtype)
    return Decoding(memory, zeros, zeros, jnp.int32(0))

  def step(
    self, tokens: Integer[Array, "B"], state: Decoding
  ) -> tuple[Float[Array, "B D"], Decoding]:
    """The hidden vector after one more token of each target."""
    x_B1D, _ = self._embedded(self.of_target, tokens[:, None], True, state.position)
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    at = jnp.broadcast_to(state.position, (self.layers,))
    cache = layers_first(state.key), layers_first(state.value), at
    x_B1D, (key, value) = self._decoded(x_B1D, state.memory, cache, True)
    first = lambda x: jnp.moveaxis(x, 0, 1)
    return x_B1D[:, 0], Decoding(state.memory, first(key), first(value), state.position + 1)

  def own_axes(self) -> dict:
    """Names of the axes of every variable."""
    params: dict[str, Any] = {
      "encoder": ENCODER_AXES,
      "decoder": DECODER_AXES,
      "encoder_norm": NORM_AXES,
      "decoder_norm": NORM_AXES,
      "memory_key_value": {
        "kernel": ("embed", "layers", "qkv", "heads", "head_dim"),
        "bias": ("layers", "qkv", "heads", "head_dim"),
      },
    }
    return {"params": params}
