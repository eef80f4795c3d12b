"""What does a GPT-2-style decoder look like whose vocabulary layers are fields?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.types import Dtype


class Block(nn.Module):
  """Pre-LayerNorm self-attention and a GELU feed-forward layer of four times the width.

  Attributes:
    dim: model width, D.
    heads: attention heads.
    dropout: probability of zeroing an entry of either branch's output.
    residual_scale: standard deviation of the branches' output projections.
    dtype: dtype of the computation; parameters are float32.
  """

  dim: int
  heads: int
  dropout: float
  residual_scale: float
  dtype: Dtype

  def setup(self):
    normal = nn.initializers.normal
    dense = lambda width, scale: nn.Dense(width, dtype=self.dtype, kernel_init=normal(scale))
    self.attention_norm = nn.LayerNorm(dtype=self.dtype)
    self.query_key_value = dense(3 * self.dim, 0.02)
    self.attention_out = dense(self.dim, self.residual_scale)
    self.mlp_norm = nn.LayerNorm(dtype=self.dtype)
    self.mlp_in = dense(4 * self.dim, 0.02)
    self.mlp_out = dense(self.dim, self.residual_scale)
    self.drop = nn.Dropout(self.dropout)

  def __call__(self, x_BTD: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """The block's output; attention looks at earlier positions only."""
    x_BTD = x_BTD + self.drop(self._attend(self.attention_norm(x_BTD)), deterministic)
    mlp_BTD = self.mlp_out(nn.gelu(self.mlp_in(self.mlp_norm(x_BTD))))
    return x_BTD + self.drop(mlp_BTD, deterministic)

  def _attend(self, x_BTD):
    split = (*x_BTD.shape[:2], self.heads, self.dim // self.heads)
    query, key, value = (
      part.reshape(split) for part in jnp.split(self.query_key_value(x_BTD), 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return self.attention_out(mixed.reshape(x_BTD.shape))


class Transformer(nn.Module):
  """A GPT-2-style decoder: learned positions, `layers` blocks, a final LayerNorm, and a head.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D.
    layers: number of blocks.
    heads: attention heads of a block; they divide `dim`.
    context: longest sequence, in tokens.
    dropout: probability of zeroing an entry, after the embedding and in every block.
    remat: recompute each block's activations in the backward pass instead of keeping them.
    dtype: dtype of the decoder's computation, float32 or bfloat16; parameters are float32. The
      embedding and the head have a dtype of their own: give the head this one too, or its matrix
      products are in float32.
  """

  embedding: Embedding
  head: Head
  dim: int
  layers: int
  heads: int
  context: int
  dropout: float = 0.0
  remat: bool = False
  dtype: Dtype = jnp.float32

  def setup(self):
    self._check()
    init = nn.initializers.normal(0.02)
    self.position = self.param("position", init, (self.context, self.dim), jnp.float32)
    block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
    # Each block adds two branches to the residual stream: GPT-2 scales them down by the depth.
    scale = 0.02 / (2 * self.layers) ** 0.5
    self.blocks = [
      block(self.dim, self.heads, self.dropout, scale, self.dtype) for _ in range(self.layers)
    ]
    self.final_norm = nn.LayerNorm(dtype=self.dtype)
    self.drop = nn.Dropout(self.dropout)

  def _check(self):
    if self.context < 1:
      raise ValueError(f"context {self.context} holds no token; give at least 1")
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout {self.dropout} is outside [0, 1); 0.1 is usual")
    if self.layers < 1:
      raise ValueError(f"layers {self.layers} make no decoder; give at least 1")
    if self.dim % self.heads:
      raise ValueError(f"heads {self.heads} do not divide dim {self.dim}; change one of the two")
    for name, layer in (("embedding", self.embedding), ("head", self.head)):
      if layer.dim != self.dim:
        raise ValueError(f"{name} has dim {layer.dim} in a model of dim {self.dim}; give it that")
    if self.embedding.vocab != self.head.vocab:
      raise ValueError(
        f"the embedding has {self.embedding.vocab} tokens and the head {self.head.vocab};"
        " give both the same vocab"
      )

  def __call__(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T V"]:
    """Logits of the next token at every position: for inspection, not for training."""
    return self.head.logits(self.hidden(tokens, deterministic))

  def hidden(
    self, tokens: Integer[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T D"]:
    """Final hidden vectors, each of which has seen the tokens up to its own."""
    length = tokens.shape[1]
    if length > self.context:
      raise ValueError(f"{length} tokens exceed the model's context of {self.context}")
    x_BTD = self.embedding(tokens).astype(self.dtype) + self.position[:length].astype(self.dtype)
    x_BTD = self.drop(x_BTD, deterministic)
    for block in self.blocks:
      x_BTD = block(x_BTD, deterministic)
    return self.final_norm(x_BTD)

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target as the token that follows."""
    return self.head.log_prob(self.hidden(tokens, deterministic), targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    hidden = self.hidden(tokens, deterministic)
    terms = {"embedding": self.embedding.aux(tokens), "head": self.head.aux(hidden, targets)}
    aux = {f"{part}/{name}": term for part, named in terms.items() for name, term in named.items()}
    return self.head.log_prob(hidden, targets), aux
