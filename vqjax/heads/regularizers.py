"""What do z-loss and label smoothing add to a head's training loss?"""

import math

from jaxtyping import Array, Float, Integer

from vqjax.heads.base import Head
from vqjax.ops.codes import CodeSoftmax
from vqjax.ops.softmax import LinearSoftmax
from vqjax.ops.vocabulary import mean_in_vocabulary


def check(head: Head) -> None:
  """ValueError where a head's `z_loss` or `label_smoothing` is none."""
  if not 0 <= head.label_smoothing < 1:
    raise ValueError(f"label_smoothing {head.label_smoothing} is outside [0, 1); 0.1 is usual")
  if not 0 <= head.z_loss < math.inf:
    raise ValueError(f"z_loss {head.z_loss} is negative or not finite; 1e-4 is usual, 0 for none")


def terms(
  head: Head, found: LinearSoftmax | CodeSoftmax, tokens: Integer[Array, "*B"]
) -> dict[str, Float[Array, ""]]:
  """The terms by name, means over the tokens in [0, V); empty where none is asked for."""
  named = {}
  if head.z_loss:
    named["z_loss"] = head.z_loss * mean_in_vocabulary(found.log_z**2, tokens, head.vocab)
  if head.label_smoothing:
    # -(1 - s) log p - s · mean log p, less the loss that is counted already.
    apart = found.log_prob - found.mean_log_prob
    named["label_smoothing"] = head.label_smoothing * mean_in_vocabulary(apart, tokens, head.vocab)
  return named
