"""With which optimiser and learning rate does a run train?"""

import operator

import jax
import optax

from vqjax.config import Train
from vqjax.training import scope

UNDECAYED = frozenset({"bias", "token_bias", "group_bias", "slot_bias", "scale", "shift"})
"""Biases, norms' gains, and scales and shifts of slots: zero is no neutral value for them."""


def learning_rate(train: Train) -> optax.Schedule:
  """Step -> learning rate: linear from 0 over the warm-up, then a cosine to its final fraction."""
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
  """Clipping by global norm, then AdamW with decoupled weight decay, of `train.trained` alone.

  Frozen parameters have no moments, no decay, no part in the norm, and updates of zero.

  Raises:
    ValueError: on initialisation, a prefix of `train.trained` that no parameter has.
  """
  rule = optax.chain(
    optax.clip_by_global_norm(train.clip),
    optax.adamw(
      learning_rate(train),
      b1=train.beta1,
      b2=train.beta2,
      weight_decay=train.weight_decay,
      mask=decayed,
    ),
  )
  if not train.trained:
    return rule
  own = lambda params: scope.trained(params, train.trained)
  others = lambda params: jax.tree.map(operator.not_, own(params))
  return optax.chain(optax.masked(rule, own), optax.masked(optax.set_to_zero(), others))
