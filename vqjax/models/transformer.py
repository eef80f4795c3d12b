"""What does a GPT-2-style decoder look like whose vocabulary layers are fields?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Integer

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.sharding import constrain
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
    dense = lambda width, scale, **more: nn.DenseGeneral(
      width, dtype=self.dtype, kernel_init=normal(scale), **more
    )
    self.attention_norm = nn.LayerNorm(dtype=self.dtype)
    # The heads are an axis of their own, for devices to share.
    self.query_key_value = dense((3, self.heads, self.dim // self.heads), 0.02)
    self.attention_out = dense(self.dim, self.residual_scale, axis=(-2, -1))
    self.mlp_norm = nn.LayerNorm(dtype=self.dtype)
    self.mlp_in = dense(4 * self.dim, 0.02)
    self.mlp_out = dense(self.dim, self.residual_scale)
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, x_BTD: Float[Array, "B T D"], deterministic: bool
  ) -> tuple[Float[Array, "B T D"], None]:
    """The block's output, as the carry of a scan; attention looks at earlier positions only."""
    x_BTD = x_BTD + self.drop(self._attend(self.attention_norm(x_BTD)), deterministic)
    x_BTD = constrain(x_BTD, ROWS)
    inner_BTF = constrain(self.mlp_in(self.mlp_norm(x_BTD)), ("batch", None, "mlp"))
    mlp_BTD = self.mlp_out(nn.gelu(inner_BTF))
    return constrain(x_BTD + self.drop(mlp_BTD, deterministic), ROWS), None

  def _attend(self, x_BTD):
    by_head = "batch", None, "heads", None
    parts = jnp.moveaxis(self.query_key_value(x_BTD), -3, 0)
    query, key, value = (constrain(part, by_head) for part in parts)
    mixed_BTHC = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return self.attention_out(mixed_BTHC)


ROWS = ("batch", None, None)
"""Each device keeps the rows of its part of the batch, whole."""

BLOCK_AXES = {
  "attention_norm": {"scale": ("norm",), "bias": ("norm",)},
  "query_key_value": {
    "kernel": ("embed", "qkv", "heads", "head_dim"),
    "bias": ("qkv", "heads", "head_dim"),
  },
  "attention_out": {"kernel": ("heads", "head_dim", "embed"), "bias": ("norm",)},
  "mlp_norm": {"scale": ("norm",), "bias": ("norm",)},
  "mlp_in": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
  "mlp_out": {"kernel": ("mlp", "embed"), "bias": ("norm",)},
}
"""Names of the axes of a block's parameters; "norm" is a width that every device has whole."""


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
    # A scan needs no barrier against common subexpressions.
    remat = lambda block: nn.remat(block, static_argnums=(2,), prevent_cse=False)
    # One block, compiled once, whatever the depth; its parameters are stacked [layers, ...].
    stacked = nn.scan(
      remat(Block) if self.remat else Block,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=nn.broadcast,
      length=self.layers,
    )
    # Each block adds two branches to the residual stream: GPT-2 scales them down by the depth.
    scale = 0.02 / (2 * self.layers) ** 0.5
    self.blocks = stacked(self.dim, self.heads, self.dropout, scale, self.dtype)
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
    x_BTD = constrain(self.drop(x_BTD, deterministic), ROWS)
    x_BTD, _ = self.blocks(x_BTD, deterministic)
    return constrain(self.final_norm(x_BTD), ROWS)

  def log_prob(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> Float[Array, "B T"]:
    """Log-probability, in nats, of each target as the token that follows."""
    return self.head.log_prob(self.hidden(tokens, deterministic), targets)

  def loss_terms(
    self, tokens: Integer[Array, "B T"], targets: Int[Array, "B T"], deterministic: bool = True
  ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """`log_prob`, and the further loss terms as "embedding/NAME" and "head/NAME"."""
    return self.terms_of(self.hidden(tokens, deterministic), tokens, targets)

  def terms_of(
    self,
    hidden: Float[Array, "B T D"],
    tokens: Integer[Array, "B T"],
    targets: Int[Array, "B T"],
  ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """`loss_terms`, of hidden vectors that are there already."""
    log_prob, head_terms = self.head.loss_terms(hidden, targets)
    terms = {"embedding": self.embedding.aux(tokens), "head": head_terms}
    aux = {f"{part}/{name}": term for part, named in terms.items() for name, term in named.items()}
    return log_prob, aux

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a pytree like the variables with tuples as leaves."""
    layers = lambda names: ("layers", *names)
    own = {
      "position": ("context", "embed"),
      "blocks": jax.tree.map(layers, BLOCK_AXES, is_leaf=lambda x: isinstance(x, tuple)),
      "final_norm": {"scale": ("norm",), "bias": ("norm",)},
    }
    axes = {"params": own}
    # A part that both hold, such as a tied embedding, has its variables where it was first.
    shared = [n for n, part in vars(self.head).items() if part is self.embedding]
    for name, layer, absent in (("embedding", self.embedding, ()), ("head", self.head, shared)):
      for collection, tree in layer.logical_axes().items():
        kept = {key: value for key, value in tree.items() if key not in absent}
        if kept:
          axes.setdefault(collection, {})[name] = kept
    return axes
