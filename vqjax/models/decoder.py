"""What does a GPT-2-style decoder look like whose vocabulary layers are fields?"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from vqjax.models import causal
from vqjax.models.base import ROWS, LanguageModel, check_heads
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
    remat: whether it is recomputed in the backward pass: what it keeps then is to be small, so that
      it attends a tile of query positions at a time.
  """

  dim: int
  heads: int
  dropout: float
  residual_scale: float
  dtype: Dtype
  remat: bool

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
    self, x_BTD: Float[Array, "B T D"], window: Int[Array, ""] | None, deterministic: bool
  ) -> tuple[Float[Array, "B T D"], None]:
    """The block's output, as the carry of a scan; attention is to the last `window` positions.

    None: to all positions so far.
    """
    x_BTD = x_BTD + self.drop(self._attend(self.attention_norm(x_BTD), window), deterministic)
    x_BTD = constrain(x_BTD, ROWS)
    inner_BTF = constrain(self.mlp_in(self.mlp_norm(x_BTD)), ("batch", None, "mlp"))
    # The slope comes from the input alone: no tanh of [B, T, 4 D] is kept.
    gelu = jax.checkpoint(nn.gelu) if self.remat else nn.gelu
    mlp_BTD = self.mlp_out(gelu(inner_BTF))
    return constrain(x_BTD + self.drop(mlp_BTD, deterministic), ROWS), None

  def _attend(self, x_BTD, window):
    by_head = "batch", None, "heads", None
    parts = jnp.moveaxis(self.query_key_value(x_BTD), -3, 0)
    query, key, value = (constrain(part, by_head) for part in parts)
    attend = causal.attend_in_tiles if self.remat else causal.attend
    return self.attention_out(attend(query, key, value, window))


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


class Transformer(LanguageModel):
  """A GPT-2-style decoder: learned positions, `layers` blocks, a final LayerNorm, and a head.

  With a `window`, blocks see what GPT-Neo's do: the first, third, ... all positions so far, the
  second, fourth, ... the last `window`. All else stays GPT-2's: GPT-Neo does not divide attention
  scores by sqrt(head width), and its projections to queries, keys and values have no bias.

  The embedding and the head have a dtype of their own: give the head the decoder's too, or its
  matrix products are in float32.

  Attributes:
    layers: number of blocks.
    heads: attention heads of a block; they divide `dim`.
    context: longest sequence, in tokens.
    dropout: probability of zeroing an entry, after the embedding and in every block.
    remat: recompute each block's activations in the backward pass instead of keeping them, and
      attend a tile of query positions at a time, so that no [B, H, T, T] array is alive.
    dtype: dtype of the decoder's computation, float32 or bfloat16; parameters are float32.
    window: how many positions, its own included, every second block attends to; None: every block
      attends to all so far.
  """

  layers: int
  heads: int
  context: int
  dropout: float = 0.0
  remat: bool = False
  dtype: Dtype = jnp.float32
  window: int | None = None

  def setup(self):
    self._check()
    init = nn.initializers.normal(0.02)
    self.position = self.param("position", init, (self.context, self.dim), jnp.float32)
    # A scan needs no barrier against common subexpressions.
    remat = lambda block: nn.remat(block, static_argnums=(3,), prevent_cse=False)
    # One block, compiled once, whatever the depth; its parameters are stacked [layers, ...].
    stacked = nn.scan(
      remat(Block) if self.remat else Block,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      in_axes=(0, nn.broadcast),
      length=self.layers,
    )
    # Each block adds two branches to the residual stream: GPT-2 scales them down by the depth.
    scale = 0.02 / (2 * self.layers) ** 0.5
    self.blocks = stacked(self.dim, self.heads, self.dropout, scale, self.dtype, self.remat)
    self.final_norm = nn.LayerNorm(dtype=self.dtype)
    self.drop = nn.Dropout(self.dropout)

  def _check(self):
    if self.context < 1:
      raise ValueError(f"context {self.context} holds no token; give at least 1")
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout {self.dropout} is outside [0, 1); 0.1 is usual")
    if self.layers < 1:
      raise ValueError(f"layers {self.layers} make no decoder; give at least 1")
    if self.window is not None and self.window < 1:
      raise ValueError(
        f"window {self.window} hides every position from itself; give at least 1, or None for all"
      )
    check_heads(self.dim, self.heads)
    self.check_layers()

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """Positions, blocks and the final LayerNorm."""
    length = vectors.shape[1]
    if length > self.context:
      raise ValueError(f"{length} tokens exceed the model's context of {self.context}")
    x_BTD = vectors.astype(self.dtype) + self.position[:length].astype(self.dtype)
    x_BTD = constrain(self.drop(x_BTD, deterministic), ROWS)
    x_BTD, _ = self.blocks(x_BTD, self._windows(), deterministic)
    return constrain(self.final_norm(x_BTD), ROWS)

  def _windows(self):
    """How far back each block sees, int32 [layers]; None: all do to the first position."""
    if self.window is None:
      return None
    local = jnp.arange(self.layers) % 2 == 1
    return jnp.where(local, min(self.window, self.context), self.context).astype(jnp.int32)

  def own_axes(self) -> dict:
    """Axes of positions, blocks and the final LayerNorm."""
    layers = lambda names: ("layers", *names)
    own = {
      "position": ("context", "embed"),
      "blocks": jax.tree.map(layers, BLOCK_AXES, is_leaf=lambda x: isinstance(x, tuple)),
      "final_norm": {"scale": ("norm",), "bias": ("norm",)},
    }
    return {"params": own}
