"""With which optimiser and learning rate does a run train?"""

import dataclasses
import operator

import jax
import optax

from vqjax.lab.config import Train
from vqjax.lab.training import scope

UNDECAYED = frozenset({"bias", "token_bias", "group_bias", "slot_bias", "scale", "shift"})
"""Biases, norms' gains, and scales and shifts of slots: zero is no neutral value for them."""


@dataclasses.dataclass(frozen=True)
class SGD:
  """Plain gradient descent at `train.learning_rate`, which falls by a factor from time to time.

  Source: Zaremba et al., Recurrent neural network regularization, 2014, whose loss is the sum over
  the T tokens of a row: at a mean over tokens its rate is T times, its clipping 1/T of that.

  Attributes:
    hold: steps at the full rate.
    every: steps between two falls after that; the first is at `hold`.
    factor: of a fall.

  Raises:
    ValueError: a number that no schedule can have.
  """

  hold: int
  every: int
  factor: float

  def __post_init__(self):
    if self.hold < 0 or self.every < 1 or not 0 < self.factor <= 1:
      raise ValueError(
        f"SGD holds {self.hold} steps, then falls every {self.every} to {self.factor}: give 0 or"
        " more, 1 or more, and a factor in (0, 1]"
      )

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Step -> learning rate: the full one before `hold`, a factor less in each stretch after."""

    def rate(step):
      falls = jax.numpy.maximum(0, (step - self.hold) // self.every + 1)
      return train.learning_rate * self.factor**falls

    return rate

  def rule(self, train: Train) -> optax.GradientTransformation:
    """The descent, without clipping."""
    return optax.sgd(self.learning_rate(train))


@dataclasses.dataclass(frozen=True)
class SM3:
  """SM3 with momentum: moments of rows and columns in place of those of numbers.

  The rate climbs with the square of the step to `train.learning_rate` at `train.warmup`, and stays.
  Source: Anil et al., Memory-efficient adaptive optimization, 2019; its use: Chen et al.,
  Differentiable product quantization, 2020, Appendix C.

  Attributes:
    momentum: of the updates.
  """

  momentum: float = 0.9

  def __post_init__(self):
    if not 0 <= self.momentum < 1:
      raise ValueError(f"momentum {self.momentum} is outside [0, 1); 0.9 is usual")

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Step -> learning rate."""
    climb = lambda step: jax.numpy.minimum(1.0, (step + 1) / max(train.warmup, 1)) ** 2
    return lambda step: train.learning_rate * climb(step)

  def rule(self, train: Train) -> optax.GradientTransformation:
    """The descent, without clipping."""
    descend = optax.scale_by_learning_rate(self.learning_rate(train))
    return optax.chain(optax.scale_by_sm3(self.momentum), descend)


def learning_rate(train: Train) -> optax.Schedule:
  """Step -> learning rate: linear from 0 over the warm-up, then a cosine to its final fraction.

  Or what `train.optimizer` says.
  """
  if train.optimizer is not None:
    return train.optimizer.learning_rate(train)
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if train.warmup else train.learning_rate,
    peak_value=train.learning_rate,
    warmup_steps=min(train.warmup, train.steps),
    decay_steps=max(train.steps, min(train.warmup, train.steps) + 1),
    end_value=train.learning_rate * train.final_fraction,
  )


def decayed(params: dict) -> dict:
  """Marks the parameters that weight decay applies to: all but `UNDECAYED`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in UNDECAYED, params)


def optimizer(train: Train) -> optax.GradientTransformation:
  """Clipping by global norm, then AdamW with decoupled weight decay, of `train.trainable` alone.

  Or the rule of `train.optimizer` in AdamW's place.

  Frozen parameters have no moments, no decay, no part in the norm, and updates of zero.

  Raises:
    ValueError: on initialisation, a prefix of `train.trainable` that no parameter has.
  """
  descent = _adamw(train) if train.optimizer is None else train.optimizer.rule(train)
  rule = optax.chain(optax.clip_by_global_norm(train.clip), descent)
  if not train.trainable:
    return rule
  own = lambda params: scope.trained(params, train.trainable)
  others = lambda params: jax.tree.map(operator.not_, own(params))
  return optax.chain(optax.masked(rule, own), optax.masked(optax.set_to_zero(), others))


def _adamw(train: Train) -> optax.GradientTransformation:
  return optax.adamw(
    learning_rate(train),
    b1=train.beta1,
    b2=train.beta2,
    weight_decay=train.weight_decay,
    mask=decayed,
  )
