"""The training state, and the optimiser step that changes it."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt32

from vqjax.lab.training.optimizer import combine, partition
from vqjax.row_updates import value_and_grad

__all__ = ["TrainState", "carried", "init_state"]


@flax.struct.dataclass
class TrainState:
  """Everything that a training step reads or changes.

  Attributes:
    step: number of optimiser steps so far.
    params: the parameters, trained or frozen.
    model_state: the model's other collections, such as codes or running means. The optimiser does
      not touch them; the model may write them in a step.
    opt_state: the state of the optimiser.
  """

  step: Int[Array, ""]
  params: Any
  model_state: Any
  opt_state: Any

  @property
  def variables(self) -> dict:
    """The variables that `model.apply` takes."""
    return {"params": self.params, **self.model_state}


Step = Callable[[TrainState, dict], tuple[TrainState, dict]]
"""(state, {"inputs", "targets": rows first, ...}) -> (state, metrics)."""


def init_state(
  model: nn.Module, optimizer: optax.GradientTransformation, key: PRNGKeyArray
) -> TrainState:
  """Return the initial state of a language model, made in one jitted call."""
  row = jax.ShapeDtypeStruct((1, min(model.context, 8)), jnp.int32)
  return jax.jit(state_maker(model, optimizer, {"inputs": row, "targets": row}))(key)


def state_maker(
  model: nn.Module, optimizer: optax.GradientTransformation, shapes: dict[str, Any]
) -> Callable[[PRNGKeyArray], TrainState]:
  """Return a pure function from a key to an initial state.

  `shapes` has the shapes and dtypes of the model's arguments, under "inputs" and "targets".
  """

  def make(key):
    zeros = lambda name: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[name])
    variables = model.init(key, zeros("inputs"), zeros("targets"), method="loss_terms")
    return fresh_state(optimizer, nn.unbox(variables))

  return make


def fresh_state(optimizer: optax.GradientTransformation, variables: dict) -> TrainState:
  """Return the state at step 0 of a run that begins with these variables."""
  model_state = {name: tree for name, tree in variables.items() if name != "params"}
  params = variables["params"]
  return TrainState(jnp.int32(0), params, model_state, optimizer.init(params))


def carried(collections: Any, batch: dict) -> Any:
  """Return the collections with the carry of reset rows set to zero.

  The collection `carry` is what a recurrent model remembers of each row of a batch.
  """
  if "carry" not in collections:
    return collections
  reset_B = batch["reset"]
  restarted = lambda x: jnp.where(reset_B.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)
  return collections | {"carry": jax.tree.map(restarted, collections["carry"])}


def train_step(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  key: PRNGKeyArray,
  accumulate: int = 1,
  trainable: tuple[str, ...] = (),
) -> Step:
  """Return the training step as a pure function.

  The loss is the mean of -log p(target) in nats over the targets that are not negative, plus the
  model's auxiliary terms. The randomness of a step depends on `key` and the step's number alone, so
  that a resumed run repeats it.

  Args:
    model: module with the method `loss_terms(inputs, targets)`.
    optimizer: transformation of the gradients of all parameters.
    schedule: step -> learning rate, for the metrics.
    key: key of all steps.
    accumulate: number of micro-batches of equal rows that a batch is cut into. Their gradients add
      up to that of the batch; auxiliary terms are averaged. What the model writes into its other
      collections passes from each micro-batch to the next. A model with the collection `carry`
      takes whole batches.
    trainable: dotted prefixes of the parameters that are trained, () for all. The others are
      constants: they have no gradient, and stay bit by bit as they are.

  Returns:
    (state, batch) -> (state, metrics). The metrics are `loss` (nats per target, without auxiliary
    terms), each auxiliary term by name, `grad_norm` of the trained parameters before clipping,
    `learning_rate`, and everything that the model sows into the collection `metrics`, such as
    `embedding/quantizer/code_perplexity`: of an array the mean, and its least as "NAME_least".
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
    sown = {}
    for path, x in flatten_dict(written.pop("metrics", {})).items():
      sown["/".join(path)] = x.mean()
      if x.ndim:
        sown["/".join(path) + "_least"] = x.min()
    nats = -jnp.where(wanted, log_prob, 0.0).sum() / targets
    return sum(aux.values(), nats), ({"loss": nats, **aux, **sown}, model_state | written)

  def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
    step_key = jax.random.fold_in(key, state.step)
    model_state = carried(state.model_state, batch)
    trained, frozen = partition(state.params, trainable)
    # Every micro-batch is divided by the same number, so that their sum is the batch's mean.
    targets = jnp.maximum((batch["targets"] >= 0).sum(), 1) / accumulate
    loss_of_trained = lambda params, *rest: loss(combine(params, frozen), *rest, targets)
    gradient, metrics, model_state = _mean_gradient(
      loss_of_trained, trained, model_state, batch, step_key, accumulate
    )
    metrics["grad_norm"] = optax.tree.norm(gradient)
    metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
    # The optimiser takes the tree of all parameters, and masks the frozen ones itself.
    gradient = combine(gradient, jax.tree.map(jnp.zeros_like, frozen))
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    # Frozen parameters do not even get updates of zero: -0.0 + 0.0 is 0.0, of other bits.
    updates, _ = partition(updates, trainable)
    trained = optax.apply_updates(trained, updates)
    return TrainState(state.step + 1, combine(trained, frozen), model_state, opt_state), metrics

  return step


def _mean_gradient(
  loss: Callable, params: Any, model_state: Any, batch: dict, key: Array, accumulate: int
) -> tuple[Any, dict, Any]:
  """Return mean gradient and metrics of the micro-batches, and the model state.

  `loss` is a function (params, model_state, batch, key) -> loss, (metrics, model_state).
  """
  both = value_and_grad(loss, has_aux=True)

  def gradient_of(*args):
    (_, written), gradient = both(*args)
    return gradient, written

  if accumulate == 1:
    gradient, (metrics, model_state) = gradient_of(params, model_state, batch, key)
    return gradient, metrics, model_state
  # A micro-batch has rows j, j + accumulate, ...: each device cuts its own rows, and no row moves.
  cut = lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
  parts = jax.tree.map(cut, batch)

  def add(carry, part):
    (total, model_state), (index, micro) = carry, part
    micro_key = jax.random.fold_in(key, index)
    gradient, (metrics, model_state) = gradient_of(params, model_state, micro, micro_key)
    return (jax.tree.map(jnp.add, total, (gradient, metrics)), model_state), None

  # The scan starts from zeros of the dtypes of a micro-batch's results; nothing runs for them.
  first = jax.tree.map(lambda x: x[0], parts)
  gradient, (metrics, _) = jax.eval_shape(gradient_of, params, model_state, first, key)
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (gradient, metrics))
  (total, model_state), _ = lax.scan(add, (zero, model_state), (jnp.arange(accumulate), parts))
  gradient, metrics = jax.tree.map(lambda x: x / accumulate, total)
  return gradient, metrics, model_state


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
  """Whether every floating-point number of the tree is finite."""
  floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats]))


@jax.jit
def state_checksums(state: TrainState) -> UInt32[Array, "leaves"]:
  """Return a checksum of all bits and their positions for each array of the state.

  Integer sums wrap and do not depend on the order of addition, so the result is the same on any
  device and for any sharding. A single wrong bit always shows.
  """
  return jnp.stack([_leaf_checksum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(state)])


def _leaf_checksum(leaf: Array) -> UInt32[Array, ""]:
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  # The row-major index modulo 2^32. `reshape(-1)` would gather the shards of the array.
  index = jnp.zeros(bits.shape, jnp.uint32)
  for axis, length in enumerate(bits.shape):
    index = index * jnp.uint32(length) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  # An odd weight is invertible modulo 2^32: no change of a single number cancels.
  return (bits * (2 * index + 1)).sum(dtype=jnp.uint32)
