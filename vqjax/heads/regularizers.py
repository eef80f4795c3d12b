"""Z-loss and label smoothing as further terms of a head's training loss."""

from __future__ import annotations

import math

from jaxtyping import Array, Bool, Float

from vqjax.heads.base import Head
from vqjax.ops.codes import CodeSoftmax
from vqjax.ops.sampled_softmax import SampledEstimate
from vqjax.ops.softmax import LinearSoftmax
from vqjax.ops.vocabulary import mean_over

__all__ = []


def check(head: Head) -> None:
  """Raise ValueError where a coefficient of the training loss is outside its range."""
  if not 0 <= head.label_smoothing < 1:
    raise ValueError(
      f"`label_smoothing` must be in [0, 1); got {head.label_smoothing}. 0.1 is usual."
    )
  for name, usual in (("z_loss", 1e-4), ("commitment", 0.25)):
    # Only heads with codes have a commitment.
    coefficient = getattr(head, name, 0.0)
    if not 0 <= coefficient < math.inf:
      raise ValueError(
        f"`{name}` must be finite and not negative; got {coefficient}. {usual} is usual, 0 for"
        " none."
      )


def terms(
  head: Head, scores: LinearSoftmax | CodeSoftmax | SampledEstimate, known: Bool[Array, "*B"]
) -> dict[str, Float[Array, ""]]:
  """The terms with a coefficient above 0 by name, means over the known tokens."""
  named = {}
  if head.z_loss:
    # Of each token, not of the mean: the square keeps every normaliser near 0.
    named["z_loss"] = head.z_loss * mean_over(scores.log_z**2, known)
  if head.label_smoothing:
    # The smoothed loss is -(1 - s) log p - s · mean log p; -log p is counted already.
    excess = scores.log_prob - scores.mean_log_prob
    named["label_smoothing"] = head.label_smoothing * mean_over(excess, known)
  return named
