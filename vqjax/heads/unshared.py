"""What does the grouped head look like with a linear of its own for each group?"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.two_level import TwoLevelHead
from vqjax.ops import group_search, ragged, vocab_parallel
from vqjax.types import Size


class UnsharedGroupedHead(TwoLevelHead):
  """p(group of the token) · p(its slot in the group), both linear in hidden, nothing shared.

  Each group has a weight [S, D] for its slots: D·(G + G·S) parameters, as many as a dense head and
  D·G more, but the products of D·(G + S) for each token. Source: LLM Vocabulary Compression for
  Low-Compute Environments, Appendix A, Figure 4, which loops over the groups.

  Attributes:
    slot_init: initialiser of the [G, S, D] slot weight.
  """

  slot_init: nn.initializers.Initializer = row_init

  def setup(self):
    super().setup()
    shape = self.groups_and_slots()
    self.slot_weight = self._new("slot_weight", self.slot_init, *shape, self.dim)
    self.slot_bias = self._new("slot_bias", self.bias_init, *shape) if self.use_bias else None

  def _slot_rows(self):
    return vocab_parallel.Sharded(self.slot_weight, 0), vocab_parallel.Sharded(self.slot_bias, 0)

  def _shared(self, slots, hidden):
    """The hidden vectors, as operands of the products."""
    return hidden.astype(self.dtype or jnp.promote_types(hidden.dtype, slots[0].dtype))

  def _slot_scores(self, slots, shared, group):
    weight, bias = slots
    batch, (*_, slots, dim) = shared.shape[:-1], weight.shape
    each = lambda hidden, group: jnp.einsum(
      "...d,...wsd->...ws",
      hidden,
      weight[group].astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    # Weights of 4 Mi numbers at once: where rows name groups of their own, some rows at a time.
    rows = max(1, 2**22 // (group.shape[-1] * slots * dim))
    if group.ndim == 1 or math.prod(batch) <= rows:
      scores = each(shared, group)
    else:
      flat = shared.reshape(-1, dim), group.reshape(-1, group.shape[-1])
      scores = jax.lax.map(lambda row: each(*row), flat, batch_size=rows)
      scores = scores.reshape(*batch, *scores.shape[1:])
    return scores if bias is None else scores + bias[group].astype(jnp.float32)

  def _slot_log_prob(self, rows, hidden, group, slot):
    weight, bias = rows.slots
    return ragged.unshared_slot_log_prob(
      hidden, weight, bias, rows.size, group, slot, self.dtype, self.vocab_axis
    )

  def _is_worth_visiting(self, hidden):
    """Each row reads the weights of its own groups; a block's are read once for all rows."""
    groups, _ = self.groups_and_slots()
    return math.prod(hidden.shape[:-1]) * group_search.WIDTH <= max(groups, group_search.WIDTH)

  def size(self) -> Size:
    """(D + bias)·(G + G·S) parameters; eight bytes a token for an order."""
    g, s = self.groups_and_slots()
    params = (self.dim + self.use_bias) * (g + g * s)
    state = bytes_of(params, self.param_dtype) + self._bytes_of_order()
    return Size(params, state, 2 * self.dim * (g + s))

  def logical_axes(self) -> dict:
    """Axes of the weights and biases, and of the order."""
    axes = {
      "group_weight": ("groups", "table_embed"),
      "slot_weight": ("groups", "slots", "table_embed"),
    }
    if self.use_bias:
      axes |= {"group_bias": ("groups",), "slot_bias": ("groups", "slots")}
    return {"params": axes} | self._axes_of_order()
