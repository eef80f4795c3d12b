"""How does one optimiser step change the state?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import Array, PRNGKeyArray

from vqjax.training import scope
from vqjax.training.state import TrainState

Step = Callable[[TrainState, dict], tuple[TrainState, dict]]
"""(state, {"inputs": [B, T], "targets": [B, T], ...}) -> (state, metrics)."""


def make_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  key: PRNGKeyArray,
  accumulate: int = 1,
  trained: tuple[str, ...] = (),
) -> Step:
  """`train_step`, jitted; it donates the state that it is given."""
  step = train_step(model, optimizer, schedule, key, accumulate, trained)
  return jax.jit(step, donate_argnums=0)


def train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  key: PRNGKeyArray,
  accumulate: int = 1,
  trained: tuple[str, ...] = (),
) -> Step:
  """The training step, a pure function.

  The loss is the mean of -log_prob in nats plus the model's auxiliary terms. The batch is cut into
  `accumulate` equal micro-batches whose gradients are averaged. Randomness is a function of the
  key and the number of the step alone, so a resumed run repeats it. Parameters that are not below a
  prefix of `trained` are constants: they have no gradient, and stay bit by bit as they are.

  The metrics are `loss` (nats per token, without auxiliary terms), each auxiliary term by name,
  `grad_norm` of the trained parameters before clipping, and `learning_rate`.
  """

  def loss(params, tables, batch, key):
    log_prob, aux = model.apply(
      {"params": params, **tables},
      batch["inputs"],
      batch["targets"],
      deterministic=False,
      rngs={"dropout": key, "sample": jax.random.fold_in(key, 0)},
      method="loss_terms",
    )
    nats = -log_prob.mean()
    return sum(aux.values(), nats), {"loss": nats, **aux}

  def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    step_key = jax.random.fold_in(key, state.step)
    own, frozen = scope.split(state.params, trained)
    loss_of_own = lambda own, *rest: loss(scope.joined(own, frozen), *rest)
    gradient, metrics = _mean_gradient(loss_of_own, own, state.tables, batch, step_key, accumulate)
    metrics["grad_norm"] = optax.tree.norm(gradient)
    metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
    whole = scope.joined(gradient, jax.tree.map(jnp.zeros_like, frozen))
    updates, opt_state = optimizer.update(whole, state.opt_state, state.params)
    own = optax.apply_updates(own, scope.split(updates, trained)[0])
    return TrainState(state.step + 1, scope.joined(own, frozen), state.tables, opt_state), metrics

  return step


def _mean_gradient(
  loss: Callable, params: Any, tables: Any, batch: dict, key: Array, accumulate: int
) -> tuple[Any, dict]:
  """Gradient and metrics, averaged over the micro-batches one after another."""
  gradient_of = jax.grad(loss, has_aux=True)
  if accumulate == 1:
    return gradient_of(params, tables, batch, key)
  # Rows j, j + accumulate, ...: each device cuts its own rows, and none moves.
  cut = lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
  parts = jax.tree.map(cut, batch)

  def add(total, part):
    index, micro = part
    found = gradient_of(params, tables, micro, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, total, found), None

  first = jax.tree.map(lambda x: x[0], parts)
  shape = jax.eval_shape(gradient_of, params, tables, first, key)
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
  total, _ = jax.lax.scan(add, zero, (jnp.arange(accumulate), parts))
  return jax.tree.map(lambda x: x / accumulate, total)
