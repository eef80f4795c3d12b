"""How does one optimiser step change the state?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PRNGKeyArray

from vqjax.lab.training import scope
from vqjax.lab.training.state import TrainState, carried

Step = Callable[[TrainState, dict], tuple[TrainState, dict]]
"""(state, {"inputs", "targets": rows first, ...}) -> (state, metrics)."""


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

  The loss is the mean of -log_prob in nats, over the targets that are not negative, plus the
  model's auxiliary terms. The batch is cut into `accumulate` micro-batches of equal rows whose
  gradients add up to that; auxiliary terms are the mean of theirs. Randomness is a function of the
  key and the number of the step alone, so a resumed run repeats it. Parameters that are not below a
  prefix of `trained` are constants: they have no gradient, and stay bit by bit as they are. What
  the model writes into its other collections is kept, from each micro-batch to the next. The
  collection `carry` is what a model remembers of each row, rows first: the batch's "reset" says of
  which rows it is forgotten, and such a model takes whole batches.

  The metrics are `loss` (nats per target, without auxiliary terms), each auxiliary term by name,
  what the model sows into the collection `metrics`, such as `embedding/quantizer/code_perplexity`
  (of several numbers the mean, and the least as "NAME_least"), `grad_norm` of the trained
  parameters before clipping, and `learning_rate`.
  """

  def loss(params, model_state, batch, key, targets):
    wanted = batch["targets"] >= 0
    (log_prob, aux), written = model.apply(
      {"params": params, **model_state},
      batch["inputs"],
      batch["targets"],
      deterministic=False,
      rngs={"dropout": key, "sample": jax.random.fold_in(key, 0)},
      method="loss_terms",
      mutable=[*model_state, "metrics"],
    )
    written = dict(written)
    told = _told(written.pop("metrics", {}))
    nats = -jnp.where(wanted, log_prob, 0.0).sum() / targets
    return sum(aux.values(), nats), ({"loss": nats, **aux, **told}, model_state | written)

  def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    step_key = jax.random.fold_in(key, state.step)
    model_state = carried(state.model_state, batch)
    own, frozen = scope.split(state.params, trained)
    # Of a micro-batch, were they spread evenly: parts then add up to the mean over the batch.
    targets = jnp.maximum((batch["targets"] >= 0).sum(), 1) / accumulate
    loss_of_own = lambda own, *rest: loss(scope.joined(own, frozen), *rest, targets)
    gradient, metrics, model_state = _mean_gradient(
      loss_of_own, own, model_state, batch, step_key, accumulate
    )
    metrics["grad_norm"] = optax.tree.norm(gradient)
    metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
    whole = scope.joined(gradient, jax.tree.map(jnp.zeros_like, frozen))
    updates, opt_state = optimizer.update(whole, state.opt_state, state.params)
    own = optax.apply_updates(own, scope.split(updates, trained)[0])
    return TrainState(state.step + 1, scope.joined(own, frozen), model_state, opt_state), metrics

  return step


def _told(metrics: dict) -> dict[str, Array]:
  """What a model sowed, by its path: numbers, of several the mean and the least."""
  found = {}
  for path, x in flatten_dict(metrics).items():
    name = "/".join(path)
    found[name] = x.mean()
    if x.ndim:
      found[f"{name}_least"] = x.min()
  return found


def _mean_gradient(
  loss: Callable, params: Any, model_state: Any, batch: dict, key: Array, accumulate: int
) -> tuple[Any, dict, Any]:
  """Gradient and metrics, averaged over the micro-batches one after another, and the last model_state.

  `loss` is a function (params, model_state, batch, key) -> loss, (metrics, model_state).
  """
  gradient_of = jax.grad(loss, has_aux=True)
  if accumulate == 1:
    gradient, (metrics, model_state) = gradient_of(params, model_state, batch, key)
    return gradient, metrics, model_state
  # Rows j, j + accumulate, ...: each device cuts its own rows, and none moves.
  cut = lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
  parts = jax.tree.map(cut, batch)

  def add(carry, part):
    (total, model_state), (index, micro) = carry, part
    key_of_part = jax.random.fold_in(key, index)
    gradient, (metrics, model_state) = gradient_of(params, model_state, micro, key_of_part)
    return (jax.tree.map(jnp.add, total, (gradient, metrics)), model_state), None

  first = jax.tree.map(lambda x: x[0], parts)
  gradient, (metrics, _) = jax.eval_shape(gradient_of, params, model_state, first, key)
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (gradient, metrics))
  (total, model_state), _ = jax.lax.scan(add, (zero, model_state), (jnp.arange(accumulate), parts))
  return *jax.tree.map(lambda x: x / accumulate, total), model_state
