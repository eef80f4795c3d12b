"""What does the grouped head look like: a group of the vocabulary first, then a slot inside it?"""

from flax import linen as nn

from vqjax.heads.base import bytes_of, row_init
from vqjax.heads.two_level import TwoLevelHead
from vqjax.ops import groups as group_ops
from vqjax.ops import softmax, vocab_parallel
from vqjax.types import Size


class GroupedHead(TwoLevelHead):
  """p(group of the token) · p(its slot in the group), both linear in hidden.

  The scores of the slots are W_s h + b_s for all groups, each of which scales and shifts them in
  its own way: D·G + D·S + 2·G·S parameters for G groups of at most S tokens; about 2·sqrt(V)
  products of width D for each token at the default G. Slots that a smaller group lacks are masked.
  Source: LLM Vocabulary Compression for Low-Compute Environments, Section 2; the biases are what
  its Appendix C counts need.

  Attributes:
    slot_init: initialiser of the [S, D] slot weight.
    scale_init: initialiser of the [G, S] scales.
    shift_init: initialiser of the [G, S] shifts.
  """

  slot_init: nn.initializers.Initializer = row_init
  scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
  shift_init: nn.initializers.Initializer = nn.initializers.zeros_init()

  def setup(self):
    super().setup()
    groups, slots = self.groups_and_slots()
    self.slot_weight = self._new("slot_weight", self.slot_init, slots, self.dim)
    self.scale = self._new("scale", self.scale_init, groups, slots)
    self.shift = self._new("shift", self.shift_init, groups, slots)
    self.slot_bias = self._new("slot_bias", self.bias_init, slots) if self.use_bias else None

  def _slot_rows(self):
    return (
      vocab_parallel.Replicated(self.slot_weight),
      vocab_parallel.Replicated(self.slot_bias),
      vocab_parallel.Sharded(self.scale, 0),
      vocab_parallel.Sharded(self.shift, 0),
    )

  def _shared(self, slots, hidden):
    """W_s h + b_s, what all groups share: [*B, S] in float32."""
    weight, bias, _, _ = slots
    return softmax.linear_scores(hidden, weight, bias, self.dtype)

  def _slot_scores(self, slots, shared, group):
    _, _, scale, shift = slots
    return group_ops.scaled(shared[..., None, :], scale[group], shift[group])

  def _slot_log_prob(self, rows, hidden, group, slot):
    slots = group_ops.Slots(*rows.slots)
    return group_ops.slot_log_prob(
      hidden, slots, rows.size, group, slot, self.dtype, self.vocab_axis
    )

  def size(self) -> Size:
    """(D + bias)·(G + S) + 2·G·S parameters; eight bytes a token for an order."""
    g, s = self.groups_and_slots()
    params = (self.dim + self.use_bias) * (g + s) + 2 * g * s
    state = bytes_of(params, self.param_dtype) + self._bytes_of_order()
    return Size(params, state, 2 * self.dim * (g + s) + 2 * s)

  def logical_axes(self) -> dict:
    """Axes of the weights, scales, shifts and biases, and of the order."""
    axes = {
      "group_weight": ("groups", "table_embed"),
      "slot_weight": ("slots", "embed"),
      "scale": ("groups", "slots"),
      "shift": ("groups", "slots"),
    }
    if self.use_bias:
      axes |= {"group_bias": ("groups",), "slot_bias": ("slots",)}
    return {"params": axes} | self._axes_of_order()
