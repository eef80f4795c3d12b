"""What does an encoder-decoder look like whose vocabulary layers are fields?"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.models.attention import (
  DECODER_AXES,
  ENCODER_AXES,
  NORM_AXES,
  XAVIER,
  DecoderBlock,
  EncoderBlock,
  sinusoids,
  stacked,
)
from vqjax.ops import beam
from vqjax.types import Dtype

Inputs = dict[str, Integer[Array, "B T"]]
"""{"source": what is translated, "target": the translation, one token late}; below 0: padding."""


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


class Translator(nn.Module):
  """The Transformer of Vaswani et al.: a token of the target given the source and those before.

  Each block is a residual branch of a LayerNorm ("pre-norm"), with a LayerNorm at both ends.
  Positions are sinusoids. Source: Vaswani et al., Attention is all you need, 2017.

  Attributes:
    embedding: of the source, and of the target where that has none of its own.
    head: hidden vectors of width `dim` -> a distribution over the target's vocabulary.
    dim: model width, D.
    layers: of the encoder, and of the decoder.
    heads: of an attention.
    context: most tokens of a sentence.
    hidden: width of the feed-forward layers.
    dropout: probability of zeroing an entry, after the embeddings and of every branch's output.
    target_embedding: of the target; None: the same as of the source.
    dtype: dtype of the computation; parameters are float32.
  """

  embedding: Embedding
  head: Head
  dim: int
  layers: int
  heads: int
  context: int
  hidden: int
  dropout: float = 0.0
  target_embedding: Embedding | None = None
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
    if self.dim % self.heads or (self.dim // self.heads) < 1:
      raise ValueError(f"heads {self.heads} do not divide dim {self.dim}; change one of the two")
    if min(self.layers, self.context, self.hidden) < 1:
      raise ValueError(
        f"layers {self.layers}, context {self.context} and hidden {self.hidden} must be at least 1"
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout {self.dropout} is outside [0, 1); 0.1 is usual")
    parts = {"embedding": self.embedding, "head": self.head}
    if self.target_embedding is not None:
      parts["target_embedding"] = self.target_embedding
    for name, part in parts.items():
      if part.dim != self.dim:
        raise ValueError(f"{name} has dim {part.dim} in a model of dim {self.dim}; give it that")

  def _embedded(self, embedding: Embedding, tokens, deterministic, first=0):
    """Vectors of tokens at the positions from `first` on, scaled by sqrt D; zeros for padding."""
    vectors, terms = embedding.loss_terms(tokens, deterministic)
    vectors = jnp.where((tokens >= 0)[..., None], vectors, 0.0) * self.dim**0.5
    where = lax.dynamic_slice_in_dim(sinusoids(self.context, self.dim), first, tokens.shape[1])
    return self.drop((vectors + where).astype(self.dtype), deterministic), terms

  @property
  def _of_target(self) -> Embedding:
    return self.embedding if self.target_embedding is None else self.target_embedding

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
    x_BTD, of_target = self._embedded(self._of_target, inputs["target"], deterministic)
    x_BTD, _ = self._decoded(x_BTD, memory, None, deterministic)
    named = {f"embedding/{name}": (terms[name] + of_target[name]) / 2 for name in terms}
    return x_BTD, named

  def _decoded(self, x_BTD, memory: Memory, cache, deterministic):
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    given = layers_first(memory.key), layers_first(memory.value), cache
    x_BTD, cache = self.decoder(x_BTD, given, memory.real[:, None, None], deterministic)
    return self.decoder_norm(x_BTD), cache

  def log_prob(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target; nan for padding."""
    return self.head.log_prob(self.hidden_and_terms(inputs, deterministic)[0], targets)

  def loss_terms(
    self, inputs: Inputs, targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden, terms = self.hidden_and_terms(inputs, deterministic)
    log_prob, of_head = self.head.loss_terms(hidden, targets)
    return log_prob, terms | named("head", of_head)

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
    x_B1D, _ = self._embedded(self._of_target, tokens[:, None], True, state.position)
    layers_first = lambda x: jnp.moveaxis(x, 1, 0)
    at = jnp.broadcast_to(state.position, (self.layers,))
    cache = layers_first(state.key), layers_first(state.value), at
    x_B1D, (key, value) = self._decoded(x_B1D, state.memory, cache, True)
    first = lambda x: jnp.moveaxis(x, 0, 1)
    return x_B1D[:, 0], Decoding(state.memory, first(key), first(value), state.position + 1)

  def likeliest(
    self, tokens: Integer[Array, "B"], state: Decoding, count: int
  ) -> tuple[Float[Array, "B k"], Int[Array, "B k"], Decoding]:
    """Log-probabilities and tokens of the `count` likeliest that follow, best first."""
    hidden, state = self.step(tokens, state)
    return *self.head.top_k(hidden, count), state

  def logical_axes(self) -> dict:
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
    axes: dict[str, Any] = {"params": params}
    layers = {"embedding": self.embedding, "target_embedding": self.target_embedding}
    for name, layer in (layers | {"head": self.head}).items():
      for collection, tree in (layer.logical_axes() if layer is not None else {}).items():
        shared = [n for n, part in vars(layer).items() if name == "head" and part is self.embedding]
        kept = {key: value for key, value in tree.items() if key not in shared}
        if kept:
          axes.setdefault(collection, {})[name] = kept
    return axes


def translate(
  model: Translator,
  variables: Mapping[str, Any],
  source: Integer[Array, "B S"],
  eos: int,
  beams: int = 4,
  penalty: float = 0.6,
) -> beam.Found:
  """The best translation that a beam search finds of each source: `ops.beam.beam_search`."""
  count = min(2 * beams, model.head.vocab)
  step = lambda tokens, state: model.apply(variables, tokens, state, count, method="likeliest")
  begun = model.apply(variables, source, beams, method="begin")
  size = {"rows": len(source), "beams": beams, "length": model.context}
  return beam.beam_search(step, begun, eos=eos, penalty=penalty, **size)
