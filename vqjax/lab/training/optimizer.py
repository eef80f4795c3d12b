"""Optimizers, learning-rate schedules, and masks of trained parameters."""

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vqjax.lab.config import Train
from vqjax.row_updates import rowwise
from vqjax.variables import optimizer_labels

__all__ = ["SGD", "NewRows", "RowwiseTables", "learning_rate", "optimizer"]


@dataclasses.dataclass(frozen=True)
class SGD:
  """Plain gradient descent at a learning rate that falls in steps.

  Source: Zaremba et al., Recurrent neural network regularization, 2014. Its loss is the sum over
  the T tokens of a row: for a mean over tokens the rate is T times theirs, the clipping 1/T of it.

  Attributes:
    hold: number of steps at the full rate, `train.learning_rate`.
    every: number of steps between two falls; the first is at step `hold`.
    factor: ratio of the rates after and before a fall, in (0, 1].

  Raises:
    ValueError: a field is outside its range.
  """

  hold: int
  every: int
  factor: float

  def __post_init__(self):
    if self.hold < 0 or self.every < 1 or not 0 < self.factor <= 1:
      raise ValueError(
        "SGD: `hold` must be at least 0, `every` at least 1 and `factor` in (0, 1]; got"
        f" hold={self.hold}, every={self.every}, factor={self.factor}. Correct train.optimizer."
      )

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate."""
    # `optax.exponential_decay` divides in float32; integers cannot fall a step early or late.
    falls = lambda step: jnp.maximum(0, (step - self.hold) // self.every + 1)
    return lambda step: train.learning_rate * self.factor ** falls(step)

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    return optax.sgd(self.learning_rate(train))


@dataclasses.dataclass(frozen=True)
class NewRows:
  """AdamW that changes only the rows of new tokens in dense vocabulary tables.

  Rows below `first` of an embedding's and a head's `weight` keep their values bit for bit. With
  `Train(trainable=("embedding", "head"))` nothing else of the model changes either.

  Attributes:
    first: id of the first new token; `grow` prints it.

  Raises:
    ValueError: `first` is below 1.
  """

  first: int

  def __post_init__(self):
    if self.first < 1:
      raise ValueError(
        f"NewRows: `first` must be at least 1; got {self.first}. Give the first new token's id."
      )

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate, the schedule of AdamW."""
    return learning_rate(dataclasses.replace(train, optimizer=None))

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    only_new = optax.stateless(lambda updates, _: self._only_new(updates))
    return optax.chain(only_new, _adamw(train, self.learning_rate(train)), only_new)

  def _only_new(self, updates: dict) -> dict:
    """The updates, with 0 for old rows."""

    def of(path, update):
      names = [str(getattr(key, "key", key)) for key in path]
      if not {"embedding", "head"} & {*names} or names[-1] != "weight":
        return update
      is_new_V = jnp.arange(update.shape[0]) >= self.first
      return jnp.where(is_new_V[:, None], update, 0)

    return jax.tree_util.tree_map_with_path(of, updates)


@dataclasses.dataclass(frozen=True)
class RowwiseTables:
  """AdamW, with one second moment a row and no momentum for tables of the vocabulary.

  A number of a table costs four bytes while it trains where AdamW's costs twelve, and one in an
  `Int8Embedding(trained=True)`. Tables have the schedule, the decay of squares and the weight decay
  of the others.

  Attributes:
    factor: the tables' learning rate as a multiple of `train.learning_rate`.

  Raises:
    ValueError: `factor` is not above 0.
  """

  factor: float = 1.0

  def __post_init__(self):
    if not self.factor > 0:
      raise ValueError(f"RowwiseTables: `factor` must be above 0; got {self.factor}. 1 is usual.")

  def learning_rate(self, train: Train) -> optax.Schedule:
    """Return step -> learning rate, the schedule of AdamW."""
    return learning_rate(dataclasses.replace(train, optimizer=None))

  def rule(self, train: Train) -> optax.GradientTransformation:
    """Return the optimiser, without clipping."""
    schedule = self.learning_rate(train)
    rate = lambda step: self.factor * schedule(step)
    rows = rowwise(rate, train.beta2, weight_decay=train.weight_decay)
    rules = {"table": rows, "other": _adamw(train, schedule)}
    kind = lambda label: label if label == "table" else "other"
    return optax.multi_transform(rules, lambda params: jax.tree.map(kind, optimizer_labels(params)))


def learning_rate(train: Train) -> optax.Schedule:
  """Return step -> learning rate: linear warm-up, then a cosine.

  `train.optimizer`, where there is one, has a schedule of its own.
  """
  if train.optimizer is not None:
    return train.optimizer.learning_rate(train)
  warmup = min(train.warmup, train.steps)
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if warmup else train.learning_rate,
    peak_value=train.learning_rate,
    warmup_steps=warmup,
    # `decay_steps` counts the warm-up, and Optax rejects a cosine of zero steps.
    decay_steps=max(train.steps, warmup + 1),
    end_value=train.learning_rate * train.final_fraction,
  )


def decayed(params: dict) -> dict:
  """Mark the parameters that weight decay applies to: matrices and tables."""
  return jax.tree.map("vector".__ne__, optimizer_labels(params))


def _adamw(train: Train, schedule: optax.Schedule) -> optax.GradientTransformation:
  return optax.adamw(
    schedule, b1=train.beta1, b2=train.beta2, weight_decay=train.weight_decay, mask=decayed
  )


def optimizer(train: Train) -> optax.GradientTransformation:
  """Return clipping by global norm, then AdamW or `train.optimizer`.

  Parameters outside `train.trainable` have no moments, no decay, no part in the norm, and updates
  of zero.

  Raises:
    ValueError: on initialisation, where a prefix in `train.trainable` names no parameter.
  """
  if train.optimizer is not None:
    descent = train.optimizer.rule(train)
  else:
    descent = _adamw(train, learning_rate(train))
  rule = optax.chain(optax.clip_by_global_norm(train.clip), descent)
  if not train.trainable:
    return rule
  # `optax.masked` passes the gradients of the others through, so they are set to zero.
  trained = lambda params: trainable_mask(params, train.trainable)
  frozen = lambda params: jax.tree.map(operator.not_, trained(params))
  return optax.chain(optax.masked(rule, trained), optax.masked(optax.set_to_zero(), frozen))


def trainable_mask(params: dict, prefixes: tuple[str, ...]) -> dict:
  """Mark the parameters below one of the dotted prefixes; () marks all.

  "head" marks every parameter of the head, "head.codebook" that one.

  Raises:
    ValueError: a prefix names no parameter; the message lists similar names.
  """
  is_below = lambda name, prefix: f"{name}.".startswith(f"{prefix}.")
  dotted = lambda path: ".".join(str(key.key) for key in path)
  names = [dotted(path) for path, _ in jax.tree.leaves_with_path(params)]
  for prefix in prefixes:
    if not any(is_below(name, prefix) for name in names):
      parts = [name.split(".") for name in names]
      possible = dict.fromkeys(".".join(p[:end]) for p in parts for end in range(1, len(p) + 1))
      similar = difflib.get_close_matches(prefix, possible, 3) or dict.fromkeys(p[0] for p in parts)
      raise ValueError(
        "`train.trainable` must hold prefixes of the model's parameters; got"
        f" {prefix!r}. Similar names are {', '.join(similar)}."
      )
  below_any = lambda name: not prefixes or any(is_below(name, prefix) for prefix in prefixes)
  return jax.tree_util.tree_map_with_path(lambda path, _: below_any(dotted(path)), params)


def partition(params: dict, prefixes: tuple[str, ...]) -> tuple[dict, dict]:
  """Split parameters into (trained, frozen), with None for the other part."""
  mask = trainable_mask(params, prefixes)
  select = lambda wanted: jax.tree.map(lambda m, x: x if m == wanted else None, mask, params)
  return select(True), select(False)


def combine(trained: Any, frozen: Any) -> Any:
  """Merge the two trees of `partition`; either may have further entries."""
  if isinstance(trained, Mapping) and isinstance(frozen, Mapping):
    names = dict.fromkeys([*trained, *frozen])
    return {name: combine(trained.get(name), frozen.get(name)) for name in names}
  return frozen if trained is None else trained
