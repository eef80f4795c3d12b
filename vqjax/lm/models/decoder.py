"""The general decoder, whose embedding and output head are fields.

With its defaults it is GPT-2's. Further fields choose norms, positions, attention and feed-forward
layers, so that the decoders of Llama, Qwen and Gemma are the same class.
"""

# A block is two branches. Each reads the residual stream through a norm, or a mixture of streams
# through a `StreamMixer`, and is added to it:
#
#   Block.step    x -> input -> mix (attention or delta rule) -> added -> input -> MLP -> added
#
# `mix` is the caller's, so that a forward pass, a prompt and a cached step share one block. Blocks
# of equal shapes (`is_uniform`) have stacked parameters [layers, ...], and those between two
# memories of n-grams are one scan over their part of them; others are unrolled.

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from vqjax.lm.models.attention import attend, attend_to_itself
from vqjax.lm.models.base import (
  NORM_AXES,
  ROWS,
  LanguageModel,
  Terms,
  check_dropout,
  check_heads,
  named,
  stacked_axes,
)
from vqjax.lm.models.key_index import IndexLayer, KeyIndex
from vqjax.lm.models.recurrent import DeltaLayer, GatedDelta
from vqjax.lm.models.rotary import Rotary, rotate
from vqjax.lm.models.streams import StreamMixer, Streams
from vqjax.ngrams import NGramMemory
from vqjax.ops import narrow, ragged
from vqjax.sharding import constrain
from vqjax.types import Dtype

__all__ = ["MLP", "Attention", "Experts", "LayerNorm", "RMSNorm", "Swish", "Transformer"]


@dataclasses.dataclass(frozen=True)
class LayerNorm:
  """Vectors of mean 0 and variance 1, with a scale and a bias. Source: Ba et al., 2016.

  Attributes:
    epsilon: added to the variance.
  """

  epsilon: float = 1e-6

  axes = NORM_AXES

  def module(self, dtype: Dtype) -> nn.Module:
    """The Linen module."""
    return nn.LayerNorm(self.epsilon, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class RMSNorm:
  """Vectors of mean square 1, with a scale. Source: Zhang and Sennrich, 2019.

  Attributes:
    epsilon: added to the mean square.
    offset: number that is added to the parameter `scale`; 1 in Gemma, whose scales begin with 0.
  """

  epsilon: float = 1e-6
  offset: float = 0.0

  axes = {"scale": ("norm",)}  # noqa: RUF012

  def module(self, dtype: Dtype) -> nn.Module:
    """The Linen module."""
    return _RMSNorm(self.epsilon, self.offset, dtype)


class _RMSNorm(nn.Module):
  epsilon: float
  offset: float
  dtype: Dtype

  @nn.compact
  def __call__(self, x_BD: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    init = nn.initializers.constant(1.0 - self.offset)
    scale_D = self.param("scale", init, (x_BD.shape[-1],), jnp.float32).astype(jnp.float32)
    wide_BD = x_BD.astype(jnp.float32)
    square_B1 = jnp.square(wide_BD).mean(-1, keepdims=True)
    normed_BD = wide_BD * jax.lax.rsqrt(square_B1 + self.epsilon) * (self.offset + scale_D)
    return normed_BD.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Attention:
  """Variants of self-attention.

  Attributes:
    kv_heads: heads of keys and values, each read by as many query heads; it divides `heads`. None:
      a head of each for every query head, from one projection.
    head_dim: width of a head; None: the model width over the query heads.
    scale: factor of the scores; None: head_dim^-1/2.
    softcap: largest absolute score; None: no cap.
    qk_norm: queries and keys are normalised in each head, before they are turned.
    joint_norm: `qk_norm` normalises all heads as one vector, as in OLMo 2.
    qkv_bias: the projections to queries, keys and values have a bias.
    out_bias: the projection of the heads' outputs has a bias.
    has_sinks: each head has a learned score of a key without a value, as in gpt-oss.
    gated: each number of the heads' outputs is multiplied by a sigmoid, whose input comes from the
      projection to queries.
    index: chooses the keys to which a token attends; None: it attends to all of its window.
  """

  kv_heads: int | None = None
  head_dim: int | None = None
  scale: float | None = None
  softcap: float | None = None
  qk_norm: bool = False
  joint_norm: bool = False
  qkv_bias: bool = True
  out_bias: bool = True
  has_sinks: bool = False
  gated: bool = False
  index: KeyIndex | None = None


@dataclasses.dataclass(frozen=True)
class Swish:
  """The activation x · sigmoid(alpha · x).

  Attributes:
    alpha: 1 is SiLU, and 1.702 is near GELU.
  """

  alpha: float

  def __call__(self, x: Array) -> Array:
    """The activation of each number."""
    return x * jax.nn.sigmoid(self.alpha * x)


@dataclasses.dataclass(frozen=True)
class Experts:
  """Feed-forward layers among which a router chooses a few for each token.

  The output is the sum of those of the chosen experts by their weights, the softmax of the router's
  scores. Each token has all of its experts, however many tokens choose the same one. Source:
  Shazeer et al., Outrageously Large Neural Networks, 2017.

  Attributes:
    count: number of experts.
    chosen: number of experts of a token.
    normalized: the weights of the chosen experts add up to 1.
    router_bias: the router's scores have a bias.
    shared: inner width of an expert of all tokens, whose output is multiplied by a sigmoid; None:
      there is none.
  """

  count: int
  chosen: int
  normalized: bool = True
  router_bias: bool = False
  shared: int | None = None


@dataclasses.dataclass(frozen=True)
class MLP:
  """Variants of the feed-forward layer.

  Attributes:
    width: inner width; None: four times the model width.
    activation: the function between its two products.
    gated: the activation of one projection multiplies another one. Source: Shazeer, GLU Variants,
      2020.
    use_bias: its products have a bias.
    limit: with a gate, the largest input of the activation and the largest absolute other factor,
      to which 1 is added, as in gpt-oss; None: no limit, and nothing is added.
    experts: there are as many such layers, with a gate, and a router; None: there is one.
  """

  width: int | None = None
  activation: Callable[[Array], Array] = nn.gelu
  gated: bool = False
  use_bias: bool = True
  limit: float | None = None
  experts: Experts | None = None

  def gate(self, gate: Array, other: Array, activation: Callable[[Array], Array]) -> Array:
    """The product of the activation of one projection and of the other projection."""
    if self.limit is None:
      return other * activation(gate)
    return (jnp.clip(other, -self.limit, self.limit) + 1) * activation(
      jnp.minimum(gate, self.limit)
    )


class ExpertProduct(nn.Module):
  """Products of rows with the matrices of their experts, in float32.

  Attributes:
    count: number of experts, E.
    width: width of the results, F.
    scale: standard deviation of the initial matrices.
    use_bias: each expert has a bias.
    dtype: dtype of the factors.
  """

  count: int
  width: int
  scale: float
  use_bias: bool
  dtype: Dtype

  @nn.compact
  def __call__(
    self, rows_ND: Float[Array, "N D"], expert_N: Int[Array, "N"], count_E: Int[Array, "E"]
  ) -> Float[Array, "N F"]:
    """The products of rows that are sorted by expert, of which expert e has count_E[e]."""
    shape = self.count, rows_ND.shape[1], self.width
    kernel_EDF = self.param("kernel", nn.initializers.normal(self.scale), shape, jnp.float32)
    out_NF = ragged.product(rows_ND.astype(self.dtype), kernel_EDF, count_E)
    if self.use_bias:
      bias_EF = self.param("bias", nn.initializers.zeros, (self.count, self.width), jnp.float32)
      out_NF += bias_EF.astype(jnp.float32)[expert_N]
    return out_NF


class BlockSettings(NamedTuple):
  """What differs from block to block; arrays have an axis of all blocks first.

  Attributes:
    window: number of positions that each attends to, its own included; None: all so far.
    table: number of the table of angles by which the block turns; None: there is one.
  """

  window: Int[Array, "..."] | None = None
  table: Int[Array, "..."] | None = None


Angles = tuple[Float[Array, "..."], Float[Array, "..."]]
"""Cosines and sines [kinds, *b, T, C / 2] of the positions."""


class Block(nn.Module):
  """Self-attention and a feed-forward layer, each with a norm before it.

  Attributes:
    dim: model width, D.
    heads: query heads.
    dropout: probability of zeroing an entry of either branch's output.
    residual_scale: standard deviation of the branches' output projections.
    dtype: dtype of the computation; parameters are float32.
    remat: the block is recomputed in the backward pass; it then attends in tiles, so that the
      activations which recomputation keeps are small.
    norm: the norm of the block.
    attention: the variant of self-attention.
    mlp: the variant of the feed-forward layer.
    pre_norms: each branch's input is normalised.
    post_norms: each branch's output is normalised, before it is added.
    branch_scale: factor of each branch's output; None: 1.
    streams: residual streams that the branches read and write; None: one.
    delta: the gated delta rule in place of attention; None: attention.
  """

  dim: int
  heads: int
  dropout: float
  residual_scale: float
  dtype: Dtype
  remat: bool
  norm: LayerNorm | RMSNorm
  attention: Attention
  mlp: MLP
  pre_norms: bool
  post_norms: bool
  branch_scale: float | None
  streams: Streams | None = None
  delta: GatedDelta | None = None

  def setup(self):
    normal = nn.initializers.normal
    dense = lambda width, scale, **more: nn.DenseGeneral(
      width,
      dtype=self.dtype,
      kernel_init=normal(scale),
      dot_general=narrow.dot_general,
      **more,
    )
    norm = lambda: self.norm.module(self.dtype)
    if self.delta is None:
      self._set_attention(dense, norm)
    else:
      self.delta_rule = DeltaLayer(self.delta, self.dim, self.residual_scale, self.dtype)
    if self.streams is not None:
      mixer = lambda: StreamMixer(self.streams, self.dim, self.dtype)
      self.attention_streams, self.mlp_streams = mixer(), mixer()
    inner, mlp_bias, experts = self.mlp.width or 4 * self.dim, self.mlp.use_bias, self.mlp.experts
    product = lambda width, scale: dense(width, scale, use_bias=mlp_bias)
    if experts is not None:
      self.router = dense(experts.count, 0.02, use_bias=experts.router_bias)
      product = lambda *sizes: ExpertProduct(experts.count, *sizes, mlp_bias, self.dtype)
      if experts.shared is not None:
        shared = lambda width, scale: dense(width, scale, use_bias=mlp_bias)
        self.shared_in, self.shared_gate = (shared(experts.shared, 0.02) for _ in range(2))
        self.shared_out = shared(self.dim, self.residual_scale)
        self.shared_weight = dense(1, 0.02, use_bias=False)
    if self.mlp.gated:
      self.mlp_gate = product(inner, 0.02)
    self.mlp_in = product(inner, 0.02)
    self.mlp_out = product(self.dim, self.residual_scale)
    if self.pre_norms:
      self.attention_norm, self.mlp_norm = norm(), norm()
    if self.post_norms:
      self.attention_post_norm, self.mlp_post_norm = norm(), norm()
    self.drop = nn.Dropout(self.dropout)

  def _set_attention(self, dense, norm):
    kv_heads, has_bias = self.attention.kv_heads, self.attention.qkv_bias
    width = self.attention.head_dim or self.dim // self.heads
    # An axis of their own lets the heads be sharded.
    if kv_heads is None:
      self.query_key_value = dense((3, self.heads, width), 0.02, use_bias=has_bias)
    else:
      query_width = 2 * width if self.attention.gated else width
      self.query = dense((self.heads, query_width), 0.02, use_bias=has_bias)
      self.key = dense((kv_heads, width), 0.02, use_bias=has_bias)
      self.value = dense((kv_heads, width), 0.02, use_bias=has_bias)
    if self.attention.qk_norm:
      self.query_norm, self.key_norm = norm(), norm()
    self.attention_out = dense(
      self.dim, self.residual_scale, axis=(-2, -1), use_bias=self.attention.out_bias
    )
    if self.attention.index is not None:
      self.index = IndexLayer(self.attention.index, self.norm, self.dtype)
    if self.attention.has_sinks:
      init = nn.initializers.normal(0.02)
      self.sink = self.param("sink", init, (self.heads,), jnp.float32)

  def __call__(
    self,
    x_BTD: Float[Array, "B T D"],
    layer: BlockSettings,
    angles: Angles | None,
    deterministic: bool,
  ) -> tuple[Float[Array, "B T D"], None]:
    """The output of the block, as the carry of a scan.

    Args:
      x_BTD: the residual stream.
      layer: the window and the angles of this block.
      angles: the angles by which queries and keys are turned; None: they are not.
      deterministic: no dropout.
    """
    mix = lambda given: self.mixed(given, layer, angles, tiled=self.remat)
    return self.step(x_BTD, mix, deterministic)[0], None

  def step(
    self,
    x_BTD: Float[Array, "B T D"],
    mix: Callable[[Array], tuple[Array, Any]],
    deterministic: bool,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """The output of the block, and what `mix` returns beside the output of the first branch.

    Args:
      x_BTD: the residual stream, or streams.
      mix: (input of the first branch) -> (its output, anything), by attention or the delta rule.
      deterministic: no dropout.
    """
    given_BTD, weight = self._attention_input(x_BTD)
    branch_BTD, kept = mix(given_BTD)
    if self.post_norms:
      branch_BTD = self.attention_post_norm(branch_BTD)
    x_BTD = self._added(x_BTD, branch_BTD, deterministic, weight)
    return self._after_mlp(x_BTD, deterministic), kept

  def mixed(
    self,
    given_BTD: Float[Array, "B T D"],
    layer: BlockSettings,
    angles: Angles | None,
    *,
    tiled: bool,
    count: Int[Array, "B"] | None = None,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """The output of the first branch among positions 0 to T - 1, and what later tokens need of it.

    That is the layer's cache, or keys, values and keys of the index, of all positions.

    Args:
      given_BTD: the input of the branch.
      layer: the window and the angles of this block.
      angles: as of `__call__`.
      tiled: attend in tiles.
      count: number of tokens of each row, after which there is padding; None: all.
    """
    if self.delta is not None:
      return self.delta_rule(given_BTD, None, count)

    def among(query, key, value, indexed):
      length, options = query.shape[1], self.attention_options()
      kept = key, value, None if indexed is None else indexed.key
      if indexed is None or not self.attention.index.chooses(length):
        return attend_to_itself(query, key, value, layer.window, tiled=tiled, **options), kept
      position_T, ratio = jnp.arange(length), self.attention.index.ratio
      starts = tuple(angle[..., ::ratio, :] for angle in self.angles_of(layer, angles))
      seen = self.index.seen(*indexed, starts, position_T)
      given = query, key, value, position_T, position_T, layer.window, seen
      return attend(*given, **options), kept

    return self.attended(given_BTD, layer, angles, among)

  def attended(
    self,
    given_BTD: Float[Array, "B T D"],
    layer: BlockSettings,
    angles: Angles | None,
    attend: Callable[..., tuple[Array, Any]],
  ) -> tuple[Float[Array, "B T D"], Any]:
    """The output of attention, and what `attend` returns beside what it mixed.

    Args:
      given_BTD: the input of the branch.
      layer: the window and the angles of this block.
      angles: as of `__call__`.
      attend: (queries, keys, values, what the index has of the tokens) -> (mixed values, anything).
    """
    query, key, value, gate = self._projected(given_BTD, layer, angles)
    indexed = None
    if self.attention.index is not None:
      indexed = self.index(given_BTD, *self.angles_of(layer, angles))
    mixed, kept = attend(query, key, value, indexed)
    if gate is not None:
      mixed = mixed * jax.nn.sigmoid(gate)
    return self.attention_out(mixed), kept

  def attention_options(self) -> dict:
    """The arguments of `attend` that are the same for all positions."""
    sink = self.sink if self.attention.has_sinks else None
    return {"scale": self.attention.scale, "softcap": self.attention.softcap, "sink": sink}

  def query_key_values(
    self, x_BTD: Float[Array, "B T D"], layer: BlockSettings, angles: Angles | None
  ) -> tuple[Float[Array, "B T H C"], Float[Array, "B T G C"], Float[Array, "B T G C"]]:
    """Queries, keys and values of the residual stream, turned by their positions."""
    return self._projected(self._attention_input(x_BTD)[0], layer, angles)[:3]

  def _projected(self, given_BTD, layer, angles):
    """Queries, keys and values, and the gates of the heads' outputs; None: there are none."""
    if self.attention.kv_heads is None:
      parts = jnp.moveaxis(self.query_key_value(given_BTD), -3, 0)
    else:
      parts = self.query(given_BTD), self.key(given_BTD), self.value(given_BTD)
    query, key, value = (constrain(part, ("batch", None, "heads", None)) for part in parts)
    query, gate = jnp.split(query, 2, axis=-1) if self.attention.gated else (query, None)
    if self.attention.qk_norm:
      query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
    if angles is not None:
      cos, sin = self.angles_of(layer, angles)
      query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    return query, key, value, gate

  def angles_of(self, layer: BlockSettings, angles: Angles) -> Angles:
    """The cosines and sines by which the block turns."""
    number = 0 if layer.table is None else layer.table
    return tuple(table[number] for table in angles)

  def _normed(self, norm: nn.Module, x_BTHC: Float[Array, "B T H C"]) -> Float[Array, "B T H C"]:
    if not self.attention.joint_norm:
      return norm(x_BTHC)
    return norm(x_BTHC.reshape(*x_BTHC.shape[:-2], -1)).reshape(x_BTHC.shape)

  def _attention_input(self, x_BTD):
    """The input of the first branch, and the weights by which it writes to streams, or None."""
    if self.streams is not None:
      return self.attention_streams(x_BTD)
    return (self.attention_norm(x_BTD) if self.pre_norms else x_BTD), None

  def _mlp_input(self, x_BTD):
    if self.streams is not None:
      return self.mlp_streams(x_BTD)
    return (self.mlp_norm(x_BTD) if self.pre_norms else x_BTD), None

  def _added(self, x_BTD: Float[Array, "B T D"], branch_BTD, deterministic, weight_BTS=None):
    if self.branch_scale is not None:
      branch_BTD = branch_BTD * jnp.asarray(self.branch_scale, self.dtype)
    branch_BTD = self.drop(branch_BTD, deterministic)
    if weight_BTS is not None:
      branch_BTD = (weight_BTS[..., None] * branch_BTD[..., None, :]).reshape(x_BTD.shape)
    return constrain(x_BTD + branch_BTD, ROWS)

  def feed_forward(
    self, x_BTD: Float[Array, "B T D"], mixed: Float[Array, "B T H C"], deterministic: bool
  ) -> Float[Array, "B T D"]:
    """The output of the block from the residual stream and the values that attention mixed."""
    return self.step(x_BTD, lambda _: (self.attention_out(mixed), None), deterministic)[0]

  def _after_mlp(self, x_BTD, deterministic):
    given_BTD, weight = self._mlp_input(x_BTD)
    mlp_BTD = (self._dense if self.mlp.experts is None else self._of_experts)(given_BTD)
    if self.post_norms:
      mlp_BTD = self.mlp_post_norm(mlp_BTD)
    return self._added(x_BTD, mlp_BTD, deterministic, weight)

  def _dense(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    inner_BTF = constrain(self.mlp_in(x_BTD), INNER)
    # Recomputed from its input, gelu keeps no tanh [B, T, 4·D] for the backward pass.
    activation = jax.checkpoint(self.mlp.activation) if self.remat else self.mlp.activation
    if self.mlp.gated:
      gate_BTF = constrain(self.mlp_gate(x_BTD), INNER)
      inner_BTF = self.mlp.gate(gate_BTF, inner_BTF, activation)
    else:
      inner_BTF = activation(inner_BTF)
    return self.mlp_out(inner_BTF)

  def _of_experts(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The sum of the outputs of each token's experts, by the router's weights."""
    experts, x_ND = self.mlp.experts, x_BTD.reshape(-1, self.dim)
    score_NE = self.router(x_ND).astype(jnp.float32)
    score_NK, expert_NK = jax.lax.top_k(score_NE, experts.chosen)
    among = score_NK if experts.normalized else score_NE
    weight_NK = jnp.exp(score_NK - jax.nn.logsumexp(among, axis=-1, keepdims=True))
    # A copy of each token for each of its experts, sorted so that an expert's rows meet its
    # matrices once.
    order_R = jnp.argsort(expert_NK.ravel())
    expert_R = expert_NK.ravel()[order_R]
    count_E = jnp.bincount(expert_R, length=experts.count)
    of_experts = lambda product, rows_RX: product(rows_RX, expert_R, count_E)
    rows_RD = x_ND[order_R // experts.chosen]
    gate_RF, inner_RF = of_experts(self.mlp_gate, rows_RD), of_experts(self.mlp_in, rows_RD)
    inner_RF = self.mlp.gate(gate_RF, inner_RF, self.mlp.activation)
    out_RD = of_experts(self.mlp_out, inner_RF)
    out_NKD = out_RD[jnp.argsort(order_R)].reshape(*expert_NK.shape, self.dim)
    mixed_ND = (weight_NK[..., None] * out_NKD).sum(1)
    if experts.shared is not None:
      gate_NF, inner_NF = self.shared_gate(x_ND), self.shared_in(x_ND)
      shared_ND = self.shared_out(self.mlp.gate(gate_NF, inner_NF, self.mlp.activation))
      mixed_ND += jax.nn.sigmoid(self.shared_weight(x_ND)) * shared_ND
    return mixed_ND.astype(self.dtype).reshape(x_BTD.shape)

  def axes(self) -> dict:
    """Logical axes of the parameters of the block."""
    heads, norm = ("heads", "head_dim"), self.norm.axes
    biased = lambda has_bias, kernel, bias: (
      {"kernel": kernel} | ({"bias": bias} if has_bias else {})
    )
    qkv = lambda *axes: biased(self.attention.qkv_bias, ("embed", *axes), axes)
    expert = () if self.mlp.experts is None else ("experts",)
    mlp = lambda first, last, bias: biased(
      self.mlp.use_bias, (*expert, first, last), (*expert, bias)
    )
    names = ["attention_norm", "mlp_norm"] if self.pre_norms else []
    names += ["attention_post_norm", "mlp_post_norm"] if self.post_norms else []
    axes = dict.fromkeys(names, norm)
    if self.delta is not None:
      axes["delta_rule"] = self.delta.axes()
    else:
      names = ["query_norm", "key_norm"] if self.attention.qk_norm else []
      axes |= dict.fromkeys(names, norm)
      if self.attention.kv_heads is None:
        axes["query_key_value"] = qkv("qkv", *heads)
      else:
        axes |= {name: qkv(*heads) for name in ("query", "key", "value")}
      axes["attention_out"] = biased(self.attention.out_bias, (*heads, "embed"), ("norm",))
      if self.attention.has_sinks:
        axes["sink"] = ("heads",)
      if self.attention.index is not None:
        axes["index"] = self.attention.index.axes(norm)
    if self.streams is not None:
      axes |= dict.fromkeys(("attention_streams", "mlp_streams"), self.streams.axes())
    if expert:
      axes["router"] = biased(self.mlp.experts.router_bias, ("embed", "experts"), ("experts",))
      if self.mlp.experts.shared is not None:
        into = biased(self.mlp.use_bias, ("embed", "mlp"), ("mlp",))
        axes |= {"shared_in": into, "shared_gate": into}
        axes["shared_out"] = biased(self.mlp.use_bias, ("mlp", "embed"), ("norm",))
        axes["shared_weight"] = {"kernel": ("embed", "norm")}
    names = ["mlp_in", "mlp_gate"][: 1 + self.mlp.gated]
    axes |= {name: mlp("embed", "mlp", "mlp") for name in names}
    return axes | {"mlp_out": mlp("mlp", "embed", "norm")}


INNER = ("batch", None, "mlp")
"""Logical axes of the inner activations of a feed-forward layer."""


class Transformer(LanguageModel):
  """A decoder of `layers` blocks between an embedding and a head; by default GPT-2's.

  With a `window`, some blocks are local: they attend to the last `window` positions only. By
  default every second one is, as in GPT-Neo: the first, third, ... block attends to all positions
  so far. The rest is then still that of GPT-2: GPT-Neo does not divide attention scores by
  sqrt(head width), and its projections to queries, keys and values have no bias.

  The embedding and the head have dtypes of their own: if the head does not get the decoder's dtype
  too, its matrix products are in float32.

  Attributes:
    embedding: tokens -> vectors of width `dim`.
    head: hidden vectors of width `dim` -> a distribution over the vocabulary.
    dim: model width, D, which the parts share.
    layers: number of blocks.
    heads: number of query heads of a block, which divides `dim` unless `attention.head_dim` is set.
    context: largest number of tokens in a row.
    dropout: probability of zeroing an entry, after the embedding and in every block.
    remat: recompute the activations of each block in the backward pass, and attend in tiles of
      query positions, so that no [B, H, T, T] array is alive.
    dtype: dtype of the decoder's computation, float32 or bfloat16; parameters are float32.
    window: number of positions, its own included, that local blocks attend to; None: every block
      attends to all positions so far.
    local: for each block whether it is local; None: every second one is. Only with a `window`.
    norm: the norms, a `LayerNorm` or an `RMSNorm`.
    attention: the variant of self-attention.
    mlp: the variant of the feed-forward layer.
    pre_norms: the input of each branch of a block is normalised.
    post_norms: the output of each branch of a block is normalised, before it is added.
    branch_scale: factor of the output of each branch, rounded to `dtype`; None: 1.
    rotary: turns queries and keys by their positions; None: positions are learned vectors.
    local_rotary: turns those of local blocks; None: `rotary` is for all blocks.
    turned: for each block whether it turns queries and keys; None: every one does.
    embedding_scale: factor of the embedding's vectors, rounded to `dtype`; None: 1.
    final_scale: factor of the final hidden vectors, rounded to `dtype`; None: 1.
    streams: residual streams in place of one, of which the branches read mixtures in place of
      norms; None: one.
    delta: the gated delta rule of recurrent blocks; None: no block is.
    recurrent: for each block whether the delta rule is in place of attention. Only with `delta`.
    memories: memories of n-grams, each added to the streams before a block.
    memory_blocks: the number of that block for each memory, from 0, in ascending order.
  """

  layers: int
  heads: int
  context: int
  dropout: float = 0.0
  remat: bool = False
  dtype: Dtype = jnp.float32
  window: int | None = None
  local: tuple[bool, ...] | None = None
  norm: LayerNorm | RMSNorm = LayerNorm()
  attention: Attention = Attention()
  mlp: MLP = MLP()
  pre_norms: bool = True
  post_norms: bool = False
  branch_scale: float | None = None
  rotary: Rotary | None = None
  local_rotary: Rotary | None = None
  turned: tuple[bool, ...] | None = None
  embedding_scale: float | None = None
  final_scale: float | None = None
  streams: Streams | None = None
  delta: GatedDelta | None = None
  recurrent: tuple[bool, ...] | None = None
  memories: tuple[NGramMemory, ...] = ()
  memory_blocks: tuple[int, ...] = ()

  def setup(self):
    self._check_fields()
    if self.rotary is None:
      init = nn.initializers.normal(0.02)
      self.position = self.param("position", init, (self.context, self.dim), jnp.float32)
    if self.is_uniform:
      self.blocks = Block(**self._block_fields())
    else:
      self.blocks = [Block(**self._block_fields(number)) for number in range(self.layers)]
    if self.streams is None:
      self.final_norm = self.norm.module(self.dtype)
    else:
      self.final_streams = StreamMixer(self.streams, self.dim, self.dtype, writes=False)
    self.drop = nn.Dropout(self.dropout)

  def _check_fields(self) -> None:
    for name in ("layers", "context"):
      if getattr(self, name) < 1:
        raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}. Raise it.")
    if self.window is not None and self.window < 1:
      raise ValueError(
        f"`window` must be at least 1, the position itself, or None; got {self.window}."
        " 256 is usual."
      )
    if self.local is not None and (self.window is None or len(self.local) != self.layers):
      raise ValueError(
        f"`local` must have an entry for each of {self.layers} blocks and needs a `window`; got"
        f" {len(self.local)} entries and window {self.window}. Give both, or neither."
      )
    if self.local_rotary is not None and (self.window is None or self.rotary is None):
      raise ValueError(
        f"`local_rotary` needs `rotary` and a `window`; got {self.rotary} and {self.window}. Give"
        " all three, or leave it out."
      )
    if self.turned is not None and (self.rotary is None or len(self.turned) != self.layers):
      raise ValueError(
        f"`turned` must have an entry for each of {self.layers} blocks and needs `rotary`; got"
        f" {len(self.turned)} entries and {self.rotary}. Give both, or neither."
      )
    experts = self.mlp.experts
    if experts is not None and not (self.mlp.gated and 1 <= experts.chosen <= experts.count):
      raise ValueError(
        "`mlp.experts` needs `mlp.gated`, and from 1 to all of the experts for a token; got"
        f" {experts} with gated={self.mlp.gated}. Change them."
      )
    self._check_hybrid()
    check_dropout(self.dropout)
    if self.attention.head_dim is None:
      check_heads(self.dim, self.heads)
    kv_heads = self.attention.kv_heads
    if kv_heads is not None and (kv_heads < 1 or self.heads % kv_heads):
      raise ValueError(
        f"`attention.kv_heads` must divide heads {self.heads}; got {kv_heads}. Change one of them."
      )
    if self.rotary is not None and self._head_dim() % 2:
      raise ValueError(
        f"`attention.head_dim` must be even to be turned; got {self._head_dim()}. Make it even, or"
        " set rotary=None."
      )
    self.check_layers()

  def _check_hybrid(self) -> None:
    if (self.recurrent is None) != (self.delta is None) or (
      self.recurrent is not None and len(self.recurrent) != self.layers
    ):
      raise ValueError(
        f"`recurrent` must have an entry for each of {self.layers} blocks just with `delta`; got"
        f" {self.recurrent} and {self.delta}. Give both, or neither."
      )
    if self.streams is not None and (self.pre_norms or self.streams.count < 1):
      raise ValueError(
        "`streams` must be at least one with pre_norms=False, for their mixtures are normalised;"
        f" got {self.streams} and pre_norms={self.pre_norms}. Change them."
      )
    wanted = self.streams.count if self.streams else 1, self.dim
    if wrong := [m for m in self.memories if (m.streams, m.dim) != wanted]:
      raise ValueError(
        f"`memories` must be added to {wanted[0]} streams of {wanted[1]}; got"
        f" {wrong[0].streams} of {wrong[0].dim}. Change their `streams` and `dim`."
      )
    blocks = self.memory_blocks
    is_ascending = list(blocks) == sorted({*blocks})
    are_blocks = all(0 <= block < self.layers for block in blocks)
    if len(self.memories) != len(blocks) or not (is_ascending and are_blocks):
      raise ValueError(
        f"`memory_blocks` must be ascending numbers below {self.layers}, one for each of"
        f" {len(self.memories)} memories; got {blocks}. Change them."
      )
    if self.attention.index is not None and (self.rotary is None or self.window is not None):
      raise ValueError(
        "`attention.index` needs `rotary`, and no `window`; got"
        f" {self.rotary} and {self.window}. Change them."
      )
    for part in (self.delta, self.attention.index):
      if part is not None:
        part.check()

  @property
  def is_uniform(self) -> bool:
    """Whether all blocks have parameters of the same shapes, which are stacked."""
    return self.delta is None

  def check_keys_suffice(self) -> None:
    """Raise ValueError unless keys and values are all that blocks need of earlier tokens."""
    attention, has_more = self.attention, self.streams or self.memories
    if not self.is_uniform or has_more or attention.gated or attention.index:
      raise ValueError(
        "`model` must have blocks that need only keys and values of earlier tokens; got one with"
        " recurrent blocks, streams, gated or indexed attention, or memories. Score and generate"
        " with it alone."
      )

  def _head_dim(self) -> int:
    return self.attention.head_dim or self.dim // self.heads

  def _block_fields(self, number: int = 0) -> dict:
    return {
      "dim": self.dim,
      "heads": self.heads,
      "dropout": self.dropout,
      # GPT-2 scales the two branches that each block adds to the residual stream by the depth.
      "residual_scale": 0.02 / (2 * self.layers) ** 0.5,
      "dtype": self.dtype,
      "remat": self.remat,
      "norm": self.norm,
      "attention": self.attention,
      "mlp": self.mlp,
      "pre_norms": self.pre_norms,
      "post_norms": self.post_norms,
      "branch_scale": self.branch_scale,
      "streams": self.streams,
      "delta": self.delta if self.recurrent is not None and self.recurrent[number] else None,
    }

  def block(self, number: int = 0) -> Block:
    """One block, to be applied to its parameters; those of uniform blocks are stacked."""
    return Block(**self._block_fields(number), parent=None)

  def is_local(self) -> tuple[bool, ...]:
    """For each block whether it attends to the last `window` positions only."""
    if self.window is None:
      return (False,) * self.layers
    return self.local or tuple(number % 2 == 1 for number in range(self.layers))

  def layer_inputs(self) -> BlockSettings:
    """The inputs of the scan over blocks."""
    window_L = table_L = None
    local_L = np.array(self.is_local())
    if self.window is not None:
      window_L = np.where(local_L, min(self.window, self.context), self.context).astype(np.int32)
    if self.local_rotary is not None or self.turned is not None:
      # The last table turns by nothing.
      kinds_L = local_L & (self.local_rotary is not None)
      none = 1 + (self.local_rotary is not None)
      table_L = np.where(self.turned or (True,) * self.layers, kinds_L, none).astype(np.int32)
    return BlockSettings(*(x if x is None else jnp.asarray(x) for x in (window_L, table_L)))

  def angles(self, position: Int[Array, "*b T"]) -> Angles | None:
    """Cosines and sines of the positions, [kinds, *b, T, C / 2]; None without `rotary`."""
    kinds = [kind for kind in (self.rotary, self.local_rotary) if kind is not None]
    tables = [kind.table(position, self._head_dim()) for kind in kinds]
    if self.turned is not None:
      cos, sin = tables[0]
      tables.append((jnp.ones_like(cos), jnp.zeros_like(sin)))
    return tuple(map(jnp.stack, zip(*tables))) if tables else None

  def embedded(
    self, vectors: Float[Array, "B T D"], position: Int[Array, "*b T"]
  ) -> Float[Array, "B T C"]:
    """The residual stream before the first block, from the embedding's vectors."""
    x_BTD = vectors.astype(self.dtype)
    if self.embedding_scale is not None:
      x_BTD = x_BTD * jnp.asarray(self.embedding_scale, self.dtype)
    if self.rotary is None:
      x_BTD = x_BTD + self.position[position].astype(self.dtype)
    return x_BTD if self.streams is None else jnp.tile(x_BTD, self.streams.count)

  def final(self, x_BTD: Float[Array, "*B C"]) -> Float[Array, "*B D"]:
    """Final hidden vectors, from the residual stream after the last block."""
    normed_BTD = self.final_norm(x_BTD) if self.streams is None else self.final_streams(x_BTD)[0]
    if self.final_scale is None:
      return normed_BTD
    return normed_BTD * jnp.asarray(self.final_scale, self.dtype)

  def body(self, vectors: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
    """Final hidden vectors, after positions, blocks and the final norm."""
    if self.memories:
      raise ValueError(
        "`memories` need the tokens; got their vectors alone. Call `hidden` or `log_prob`."
      )
    return self.body_of_tokens(None, vectors, deterministic)[0]

  def body_of_tokens(
    self, tokens: Int[Array, "B T"] | None, vectors: Float[Array, "B T D"], deterministic: bool
  ) -> tuple[Float[Array, "B T D"], Terms]:
    """`body`, with memories that read the tokens, and the terms of the loss of their tables."""
    length = vectors.shape[1]
    # A symbol, as of `jax.export`, cannot be compared: whoever calls the program keeps to it.
    if not jax.export.is_symbolic_dim(length) and length > self.context:
      raise ValueError(
        f"`tokens` must have at most context {self.context} columns; got {length}. Cut them, or"
        " raise the model's context."
      )
    position_T = jnp.arange(length)
    x_BTD = constrain(self.drop(self.embedded(vectors, position_T), deterministic), ROWS)
    position, scaling = position_T, getattr(self.rotary, "scaling", None)
    if tokens is not None and getattr(scaling, "by_length", False):
      # Padding does not make a text longer.
      count_B1 = (tokens >= 0).sum(axis=-1, keepdims=True, dtype=jnp.int32)
      position = jnp.minimum(position_T[None], count_B1 - 1)
    inputs, angles = self.layer_inputs(), self.angles(position)
    terms, runs = {}, self._runs()
    if self.is_initializing() and self.is_uniform and len(runs) > 1:
      # The parameters of all blocks are made at once, and each run reads its part of them.
      self.through(range(self.layers), x_BTD, inputs, angles, deterministic)
    for run in runs:
      if run.start in self.memory_blocks:
        index = self.memory_blocks.index(run.start)
        # Negative tokens are padding, behind the text.
        given = x_BTD, jnp.maximum(tokens, 0), deterministic
        added_BTD, own = self.memories[index].loss_terms(*given)
        x_BTD, terms = x_BTD + added_BTD, terms | named(f"memories_{index}", own)
      x_BTD = self.through(run, x_BTD, inputs, angles, deterministic)
    return constrain(self.final(x_BTD), ROWS), terms

  def _runs(self) -> list[range]:
    """The numbers of the blocks between two memories, or of one block where they differ."""
    starts = {0, *self.memory_blocks} if self.is_uniform else range(self.layers)
    return [range(*pair) for pair in itertools.pairwise([*sorted(starts), self.layers])]

  def through(
    self,
    run: range,
    x_BTD: Float[Array, "B T C"],
    inputs: BlockSettings,
    angles: Angles | None,
    deterministic: bool,
  ) -> Float[Array, "B T C"]:
    """The residual stream after consecutive blocks, which are one scan where they are uniform.

    Args:
      run: the numbers of the blocks.
      x_BTD: the stream before them.
      inputs: `layer_inputs`, of all blocks.
      angles: as of `Block`.
      deterministic: no dropout.
    """
    part = lambda tree: jax.tree.map(lambda x_L: x_L[run.start : run.stop], tree)
    step = lambda block, x_BTD, layer: block(x_BTD, layer, angles, deterministic)
    if self.remat:
      # Several steps of a scan need no barrier against common-subexpression elimination.
      step = nn.remat(step, prevent_cse=len(run) == 1)
    if not self.is_uniform:
      layer = jax.tree.map(lambda x: x[0], part(inputs))
      return step(self.blocks[run.start], x_BTD, layer)[0]
    step = nn.scan(
      step,
      variable_axes={"params": 0},
      split_rngs={"params": True, "dropout": True},
      length=len(run),
    )
    if len(run) < self.layers:
      step = nn.map_variables(step, "params", part)
    return step(self.blocks, x_BTD, part(inputs))[0]

  def own_axes(self) -> dict:
    """Logical axes of positions, blocks and the final norm, and of memories."""
    axes = {"position": ("context", "embed")} if self.rotary is None else {}
    if self.streams is None:
      axes["final_norm"] = self.norm.axes
    else:
      axes["final_streams"] = self.streams.axes(writes=False)
    if self.is_uniform:
      axes["blocks"] = stacked_axes(self.block().axes())
    else:
      axes |= {f"blocks_{number}": self.block(number).axes() for number in range(self.layers)}
    found = {"params": axes}
    for number, memory in enumerate(self.memories):
      for collection, tree in memory.logical_axes().items():
        found.setdefault(collection, {})[f"memories_{number}"] = tree
    return found
