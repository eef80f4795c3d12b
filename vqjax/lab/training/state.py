"""What does a run carry from step to step, and how is it known to be intact?"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt32


@flax.struct.dataclass
class TrainState:
  """All that a step changes or reads.

  Attributes:
    step: optimiser steps taken.
    params: the trained parameters.
    model_state: the model's other collections, such as codes or running means, which no optimiser
      touches; the model itself may write them in a step.
    opt_state: the optimiser's state.
  """

  step: Int[Array, ""]
  params: Any
  model_state: Any
  opt_state: Any

  @property
  def variables(self) -> dict:
    """What `model.apply` takes."""
    return {"params": self.params, **self.model_state}


def init_state(
  model: nn.Module, optimizer: optax.GradientTransformation, key: PRNGKeyArray
) -> TrainState:
  """A fresh state of a language model, made in one jitted call."""
  row = jax.ShapeDtypeStruct((1, min(model.context, 8)), jnp.int32)
  return jax.jit(state_maker(model, optimizer, {"inputs": row, "targets": row}))(key)


def state_maker(
  model: nn.Module, optimizer: optax.GradientTransformation, shapes: dict[str, Any]
) -> Callable[[PRNGKeyArray], TrainState]:
  """A pure function: key -> a fresh state of a model that gets "inputs" and "targets" as these."""

  def make(key):
    zeros = lambda name: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[name])
    variables = model.init(key, zeros("inputs"), zeros("targets"), method="loss_terms")
    return fresh_state(optimizer, nn.unbox(variables))

  return make


def fresh_state(optimizer: optax.GradientTransformation, variables: dict) -> TrainState:
  """The state before the first step of a run that begins with these variables."""
  model_state = {name: tree for name, tree in variables.items() if name != "params"}
  params = variables["params"]
  return TrainState(jnp.int32(0), params, model_state, optimizer.init(params))


def carried(model_state: Any, batch: dict) -> Any:
  """The collections, with what is remembered of the rows that begin anew set to zero."""
  if "carry" not in model_state:
    return model_state
  reset_B = batch["reset"]
  begun = lambda x: jnp.where(reset_B.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)
  return model_state | {"carry": jax.tree.map(begun, model_state["carry"])}


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
  """Whether no floating-point number of the tree is infinite or nan."""
  floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floats]))


@jax.jit
def checksum(state: TrainState) -> UInt32[Array, "leaves"]:
  """One number for each array of the state, from all of its bits and their places.

  Integer sums wrap and do not depend on the order of addition, so the result is the same on any
  device and for any sharding. A single wrong bit always shows.
  """
  return jnp.stack([_leaf_checksum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(state)])


def _leaf_checksum(leaf):
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  # An odd weight is invertible modulo 2^32: no change of a single number cancels.
  return (bits * (2 * _flat_index(bits.shape) + 1)).sum(dtype=jnp.uint32)


def _flat_index(shape):
  """Place of every number in row-major order, modulo 2^32; to flatten would gather a shard."""
  index = jnp.zeros(shape, jnp.uint32)
  for axis, length in enumerate(shape):
    index = index * jnp.uint32(length) + lax.broadcasted_iota(jnp.uint32, shape, axis)
  return index
