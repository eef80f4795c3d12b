"""SM3, the optimiser of the paper's Transformer."""

import dataclasses

import jax.numpy as jnp
import optax

from vqjax.lab.config import Train

__all__ = ["SM3"]


@dataclasses.dataclass(frozen=True)
class SM3:
  """SM3 with momentum: second moments of rows and columns.

  The rate grows with the square of the step to `train.learning_rate` at `train.warmup`, and stays.

  Sources: Anil et al., Memory-efficient adaptive optimization, 2019; used in Chen et al.,
  Differentiable product quantization, 2020, Appendix C.

  Attributes:
    momentum: decay of the mean of updates, in [0, 1).
  """

  momentum: float = 0.9

  def __post_init__(self):
    if not 0 <= self.momentum < 1:
      raise ValueError(f"`momentum` must be in [0, 1); got {self.momentum}. Use 0.9.")

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate."""
    # No schedule of Optax rises as a power: `polynomial_schedule` is a power of the steps left.
    fraction = lambda step: jnp.minimum(1.0, (step + 1) / max(train.warmup, 1))
    return lambda step: train.learning_rate * fraction(step) ** 2

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    scale = optax.scale_by_learning_rate(self.learning_rate(train))
    return optax.chain(optax.scale_by_sm3(self.momentum), scale)
