"""The grouped head with a slot weight for each group."""

# As in `GroupedHead`, but each group has a weight [S, D], which decides what is cheap:
#
#   log_prob          tokens sorted by group, so that they meet the weight of their group in one
#                     ragged product (`ops.ragged`)
#   group search      the weights of W groups for each row, [*B, W, S, D]: for few rows alone
#   all groups        the weight of a group once for all rows, [W, S, D]   (`_scores`, `_logits`)

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vqjax.assign.text import TextStats
from vqjax.heads.two_level import TwoLevelHead
from vqjax.ops import group_search, ragged
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["UnsharedGroupedHead"]


class UnsharedGroupedHead(TwoLevelHead):
  """p(group of the token) · p(its slot), with a slot weight for each group.

  Each group has a weight [S, D] for its slots: D·(G + G·S) parameters, about D·G more than a dense
  head, but only D·(G + S) multiply-adds for each token. Source: LLM Vocabulary Compression for
  Low-Compute Environments, Appendix A, Figure 4, which loops over the groups.

  Attributes:
    slot_init: initialiser of the [G, S, D] slot weight.
  """

  slot_init: Initializer = row_init

  def declare(self) -> Declaration:
    """The variables of the groups, the slot weight [G, S, D] and the slot bias [G, S]."""
    (g, s), dtype = self.groups_and_slots(), self.param_dtype
    shape, axes = (g, s, self.dim), ("groups", "slots", "table_embed")
    declared = super().declare() | {
      "slot_weight": Variable(shape, axes, self.slot_init, dtype, pad_value=0)
    }
    if self.use_bias:
      declared["slot_bias"] = Variable((g, s), axes[:2], self.bias_init, dtype, pad_value=0)
    return declared

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The fields of groups, contexts less their group's, and each token's frequency as its bias."""
    found, rows = super()._of_text(text), text.contexts(self.dim)
    if not found:
      return found
    order = found["order_init"]
    if rows is not None:
      rest = rows[order] - np.repeat(found["group_init"], self._group_sizes(), axis=0)
      found["slot_init"] = self._slots(rest, np.arange(self.vocab))
    if self.use_bias:
      found["bias_init"] = self._slots(text.log_frequencies(), order)
    return found

  def flops_per_token(self) -> int:
    """A product of width D for each group and for each slot of one group."""
    return 2 * self.dim * sum(self.groups_and_slots())

  def _slot_context(self, arrays, hidden):
    """The hidden vectors, as operands of the products."""
    return hidden.astype(self._operand_dtype(hidden, arrays["slot_weight"]))

  def _slot_scores(self, arrays, context, group):
    # Groups are [W], shared by all rows, or [*B, W], each row's own; `...` of the product is both.
    weight, bias = arrays["slot_weight"], arrays.get("slot_bias")
    batch, (*_, slots, dim) = context.shape[:-1], weight.shape
    each = lambda hidden, group: jnp.einsum(
      "...d,...wsd->...ws",
      hidden,
      weight[group].astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    # At most 4 Mi weights at once: where each row has its own groups, a few rows at a time.
    rows = max(1, 2**22 // (group.shape[-1] * slots * dim))
    if group.ndim == 1 or math.prod(batch) <= rows:
      scores = each(context, group)
    else:
      flat = context.reshape(-1, dim), group.reshape(-1, group.shape[-1])
      scores = jax.lax.map(lambda row: each(*row), flat, batch_size=rows)
      scores = scores.reshape(*batch, *scores.shape[1:])
    return scores if bias is None else scores + bias[group].astype(jnp.float32)

  def _slot_log_prob(self, arrays, hidden, group, slot):
    return ragged.unshared_slot_log_prob(
      hidden,
      arrays["slot_weight"],
      arrays.get("slot_bias"),
      arrays["group_size"],
      group,
      slot,
      self.dtype,
      self.vocab_axis,
    )

  def _prefers_group_search(self, hidden):
    # Each row reads the weights of its own groups; those of a block are read once for all rows.
    groups, _ = self.groups_and_slots()
    return math.prod(hidden.shape[:-1]) * group_search.WIDTH <= max(groups, group_search.WIDTH)
