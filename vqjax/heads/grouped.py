"""What does the grouped head look like: a group of the vocabulary first, then a slot inside it?"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer, PRNGKeyArray

from vqjax.heads.base import Head, bytes_of, row_init
from vqjax.ops import groups as group_ops
from vqjax.ops import ranking, sampling, shards, softmax
from vqjax.ops.vocabulary import in_vocabulary
from vqjax.types import Dtype, Size


class GroupedHead(Head):
  """p(group of the token) · p(its slot in the group), both linear in hidden.

  D·G + D·S + 2·G·S parameters for G groups of at most S = ceil(V/G) tokens; about 2·sqrt(V)
  products of width D for each token at the default G. Groups hold consecutive tokens; slots
  that a smaller group lacks are masked. Source: LLM Vocabulary Compression for Low-Compute
  Environments, Section 2; the biases are what its Appendix C counts need.

  Attributes:
    groups: number of groups, G; None: floor(sqrt(V)).
    use_bias: add a bias to the group scores and to the shared token scores.
    group_init: initialiser of the [G, D] group weight.
    slot_init: initialiser of the [S, D] slot weight.
    scale_init: initialiser of the [G, S] scales.
    shift_init: initialiser of the [G, S] shifts.
    bias_init: initialiser of the biases, [G] and [S].
    dtype: dtype of the matrix products' operands; None: that of hidden and weights together.
    param_dtype: dtype of the parameters.
  """

  groups: int | None = None
  use_bias: bool = False
  group_init: nn.initializers.Initializer = row_init
  slot_init: nn.initializers.Initializer = row_init
  scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
  shift_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Dtype | None = None
  param_dtype: Dtype = jnp.float32

  def setup(self):
    g, s = self.groups_and_slots()
    new = lambda name, init, *shape: self.param(name, init, shape, self.param_dtype)
    self.group_weight = new("group_weight", self.group_init, g, self.dim)
    self.slot_weight = new("slot_weight", self.slot_init, s, self.dim)
    self.scale = new("scale", self.scale_init, g, s)
    self.shift = new("shift", self.shift_init, g, s)
    if self.use_bias:
      self.group_bias = new("group_bias", self.bias_init, g)
      self.slot_bias = new("slot_bias", self.bias_init, s)

  def groups_and_slots(self) -> tuple[int, int]:
    """(G, S): the number of groups, and of slots in the largest."""
    if self.vocab < 1:
      raise ValueError(f"vocab {self.vocab} holds no token; give at least 1")
    groups = math.isqrt(self.vocab) if self.groups is None else self.groups
    if not 1 <= groups <= self.vocab:
      raise ValueError(f"groups {groups} for a vocabulary of {self.vocab}; give 1 to {self.vocab}")
    return groups, -(-self.vocab // groups)

  @property
  def starts(self) -> np.ndarray:
    """First token of each group, and V at the end: int64 [G + 1]."""
    return group_ops.group_starts(self.vocab, self.groups_and_slots()[0])

  @property
  def sizes(self) -> Int[Array, "G"]:
    """Number of tokens in each group, int32 [G]."""
    return jnp.asarray(np.diff(self.starts), jnp.int32)

  def _first(self) -> Int[Array, "G"]:
    return jnp.asarray(self.starts[:-1], jnp.int32)

  def _shared(self, hidden):
    """W_s h + b_s, what all groups share: [*B, S] in float32."""
    self._check_hidden(hidden)
    bias = self.slot_bias if self.use_bias else None
    return softmax.linear_scores(hidden, self.slot_weight, bias, self.dtype)

  def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Log-probabilities of all tokens, which are logits that need no normaliser."""
    group, slot = group_ops.group_and_slot(jnp.arange(self.vocab), self.starts)
    bias = self.group_bias if self.use_bias else None
    log_group_BG = self._log_group(self.group_weight, bias, hidden)
    scores_BGS = group_ops.slot_scores(
      self._shared(hidden)[..., None, :], self.scale, self.shift, self.sizes
    )
    log_prob_BGS = log_group_BG[..., None] + jax.nn.log_softmax(scores_BGS)
    return log_prob_BGS[..., group, slot]

  def log_prob(
    self, hidden: Float[Array, "*B D"], tokens: Integer[Array, "*B"]
  ) -> Float[Array, "*B"]:
    """Log-probability of `tokens` in nats; only each token's own group is scored."""
    known, token = in_vocabulary(tokens, self.vocab)
    group, slot = group_ops.group_and_slot(token, self.starts)

    def body(rows, hidden, shared, group, slot):
      weight, bias, scale, shift, sizes, _ = rows
      log_prob_slot = group_ops.slot_log_prob(
        shared, scale, shift, sizes, group, slot, self.vocab_axis
      )
      log_prob_group = softmax.linear_log_prob(
        hidden, weight, group, bias, dtype=self.dtype, vocab_axis=self.vocab_axis
      )
      return log_prob_group + log_prob_slot

    log_prob = self._over_vocabulary(body, hidden, self._shared(hidden), group, slot)
    return jnp.where(known, log_prob, jnp.nan)

  def _rows(self) -> tuple[shards.Padded, ...]:
    bias = self.group_bias if self.use_bias else None
    axis, groups = self.vocab_axis, self.groups_and_slots()[0]
    return (
      shards.Padded(self.group_weight, 0),
      shards.Padded(shards.bias_of_padding(bias, groups, axis), -jnp.inf),
      shards.Padded(self.scale, 0),
      shards.Padded(self.shift, 0),
      shards.Padded(self.sizes, 0),
      shards.Padded(self._first(), 0),
    )

  def _log_group(self, weight, bias, hidden):
    """Log-probabilities of the groups that are here."""
    self._check_hidden(hidden)
    scores = softmax.linear_scores(hidden, weight, bias, self.dtype)
    return softmax.log_softmax(scores, self.vocab_axis)

  def _blocks(self, rows: tuple, hidden: Float[Array, "*B D"]) -> sampling.Blocks:
    """The log-probabilities, some whole groups at a time."""
    weight, bias, scale, shift, sizes, first = rows
    slots, batch = scale.shape[1], hidden.shape[:-1]
    log_group_BG, shared_BS = self._log_group(weight, bias, hidden), self._shared(hidden)
    groups = weight.shape[0]
    width = max(1, sampling.block_width(math.prod(batch), groups * slots) // slots)

    def block(index):
      group_W = index * width + jnp.arange(width, dtype=jnp.int32)
      row_W = jnp.minimum(group_W, groups - 1)
      size_W = jnp.where(group_W < groups, sizes[row_W], 0)
      scores_BWS = group_ops.slot_scores(
        shared_BS[..., None, :], scale[row_W], shift[row_W], sizes[row_W]
      )
      log_prob_BWS = log_group_BG[..., row_W, None] + jax.nn.log_softmax(scores_BWS)
      present_WS = jnp.arange(slots) < size_W[:, None]
      log_prob_BWS = jnp.where(present_WS, log_prob_BWS, -jnp.inf)
      token_WS = jnp.where(present_WS, first[row_W][:, None] + jnp.arange(slots), 0)
      return log_prob_BWS.reshape(*batch, width * slots), token_WS.astype(jnp.int32).reshape(-1)

    return sampling.Blocks(-(-groups // width), block, batch, shards.inside(self.vocab_axis))

  def sample(
    self,
    hidden: Float[Array, "*B D"],
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Bool[ArrayLike, "..."] | None = None,
  ) -> Int[Array, "*B"]:
    """As `Head.sample`; at temperature 1 without filters the group is drawn first, then a slot."""
    if temperature != 1 or not (top_k is None and top_p is None and allowed is None):
      return super().sample(hidden, key, temperature, top_k, top_p, allowed)

    def body(rows, hidden, key):
      weight, bias, scale, shift, sizes, first = rows
      axis = shards.inside(self.vocab_axis)
      if axis:
        key = jax.random.fold_in(shards.varying(key, axis), jax.lax.axis_index(axis))
      group_key, slot_key = jax.random.split(key)
      log_group_BG = self._log_group(weight, bias, hidden)
      noisy_BG = log_group_BG + sampling.gumbel(group_key, log_group_BG.shape)
      group = jnp.argmax(noisy_BG, axis=-1)
      scores_BS = group_ops.slot_scores(
        self._shared(hidden), scale[group], shift[group], sizes[group]
      )
      slot = jax.random.categorical(slot_key, scores_BS, mode="high").astype(jnp.int32)
      return ranking.winner(noisy_BG.max(axis=-1), first[group] + slot, axis)

    return self._over_vocabulary(body, hidden, key)

  def size(self) -> Size:
    """(D + bias)·(G + S) + 2·G·S parameters."""
    g, s = self.groups_and_slots()
    params = (self.dim + self.use_bias) * (g + s) + 2 * g * s
    return Size(params, bytes_of(params, self.param_dtype), 2 * self.dim * (g + s) + 2 * s)

  def logical_axes(self) -> dict:
    """Axes of the weights, scales, shifts and biases."""
    axes = {
      "group_weight": ("groups", "table_embed"),
      "slot_weight": ("slots", "embed"),
      "scale": ("groups", "slots"),
      "shift": ("groups", "slots"),
    }
    if self.use_bias:
      axes |= {"group_bias": ("groups",), "slot_bias": ("slots",)}
    return {"params": axes}
