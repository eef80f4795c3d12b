"""The grouped head, whose groups share the weights of their slots."""

# The scores of all groups come from one product:
#
#   shared = W_s h + b_s               [*B, S]      `_slot_context`
#   scale[g] ∘ shared + shift[g]       [*B, S]      `_slot_scores`: two numbers a slot, no product
#
# So a group is cheap to score, and for many rows it pays to look at all of them: `_best` then takes
# the best slot of each group, [*B, G], of which the k highest name the groups of the k best tokens.
# A search for few rows bounds a group by p(group) instead and scores more groups, but far from all.

from __future__ import annotations

import math
from typing import Any

from flax import linen as nn

from vqjax.assign.text import TextStats
from vqjax.heads.two_level import TwoLevelHead
from vqjax.ops import group_search, softmax, vocab_parallel
from vqjax.ops import groups as group_ops
from vqjax.variables import Declaration, Initializer, Variable, row_init

__all__ = ["GroupedHead"]

# Number of rows whose searches would score most groups anyway. On a GPU the launches of a search
# take longer than the scores of all groups.
_MANY_ROWS = 16


class GroupedHead(TwoLevelHead):
  """p(group of the token) · p(its slot in the group), both linear in hidden.

  The scores of the slots are W_s h + b_s for all groups; each group scales and shifts them with
  numbers of its own. That is D·G + D·S + 2·G·S parameters for G groups of at most S tokens, and
  about 2·sqrt(V) products of width D for each token at the default G. Slots that a smaller group
  lacks are masked. Source: LLM Vocabulary Compression for Low-Compute Environments, Section 2; its
  parameter counts in Appendix C include the biases.

  Example:
    >>> import jax
    >>> from vqjax import GroupedHead
    >>> head = GroupedHead(vocab=1000, dim=8)
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> variables = head.init(jax.random.key(1), hidden)
    >>> log_probs, tokens = head.apply(variables, hidden, 5, method="top_k")
    >>> print(head.groups_and_slots(), tokens.shape)
    (31, 33) (4, 5)

  Attributes:
    slot_init: initialiser of the [S, D] slot weight.
    scale_init: initialiser of the [G, S] scales.
    shift_init: initialiser of the [G, S] shifts.
  """

  slot_init: Initializer = row_init
  scale_init: Initializer = nn.initializers.ones_init()
  shift_init: Initializer = nn.initializers.zeros_init()

  def declare(self) -> Declaration:
    """The groups' variables, slot weight [S, D] and bias [S], scales, shifts [G, S]."""
    (g, s), dtype, axes = self.groups_and_slots(), self.param_dtype, ("groups", "slots")
    declared = super().declare() | {
      "slot_weight": Variable((s, self.dim), ("slots", "embed"), self.slot_init, dtype),
      "scale": Variable((g, s), axes, self.scale_init, dtype, pad_value=0),
      "shift": Variable((g, s), axes, self.shift_init, dtype, pad_value=0),
    }
    if self.use_bias:
      declared["slot_bias"] = Variable((s,), ("slots",), self.bias_init, dtype)
    return declared

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The fields of groups, and each token's frequency as its shift."""
    found = super()._of_text(text)
    if found:
      found["shift_init"] = self._slots(text.log_frequencies(), found["order_init"])
    return found

  def flops_per_token(self) -> int:
    """A product of width D for each group and slot, and the scales and shifts."""
    g, s = self.groups_and_slots()
    return 2 * self.dim * (g + s) + 2 * s

  def _slot_context(self, arrays, hidden):
    """W_s h + b_s, [*B, S] in float32."""
    return softmax.linear_scores(hidden, arrays["slot_weight"], arrays.get("slot_bias"), self.dtype)

  def _slot_scores(self, arrays, context, group):
    return group_ops.scaled(context[..., None, :], arrays["scale"][group], arrays["shift"][group])

  def _best(self, arrays, hidden, k):
    """The search for a few rows; for many, from the best slot of every group."""
    if math.prod(hidden.shape[:-1]) < _MANY_ROWS and vocab_parallel.platform() != "gpu":
      return super()._best(arrays, hidden, k)
    groups, context = self._groups(arrays, hidden), self._slot_context(arrays, hidden)
    tables = arrays["scale"], arrays["shift"], arrays["group_size"]
    # log p of the best token of each group.
    log_best = groups.log_group + group_ops.log_best_slot(context, *tables)
    log_prob, position = group_search.best_of_groups(groups, log_best, k, self.vocab_axis)
    return log_prob, groups.token_at(position), self._all_groups(hidden)

  def _slot_log_prob(self, arrays, hidden, group, slot):
    slots = group_ops.Slots(
      weight=arrays["slot_weight"],
      bias=arrays.get("slot_bias"),
      scale=arrays["scale"],
      shift=arrays["shift"],
    )
    return group_ops.slot_log_prob(
      hidden, slots, arrays["group_size"], group, slot, self.dtype, self.vocab_axis
    )
