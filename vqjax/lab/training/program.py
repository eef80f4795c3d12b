"""Compiled functions of an experiment on a mesh, and the placement of arrays."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vqjax import sharding
from vqjax.lab.config import Experiment
from vqjax.lab.config.experiment_tree import fields_of, rebuild, walk
from vqjax.lab.training.checkpoint import differences, shapes_by_name
from vqjax.lab.training.evaluate import summed_scorer
from vqjax.lab.training.optimizer import learning_rate, optimizer
from vqjax.lab.training.step import TrainState, all_finite, fresh_state, state_maker, train_step
from vqjax.ngrams import NGramEmbedding
from vqjax.ops.vocab_parallel import names_of

__all__ = ["Program", "keys"]


class Program:
  """Initialisation, step and scorer of an experiment on a mesh.

  Nothing is compiled before it is called. The mesh may be of devices that this machine lacks:
  `program.step.lower(program.abstract_state, program.abstract_batch)` lowers the real step.

  Attributes:
    experiment: the experiment; the `vocab` of its modules is filled in.
    mesh: the mesh.
    model: the experiment's model, its vocabulary sharded over the mesh.
    init: key -> initial state, every array made on its own devices.
    step: (state, batch) -> (state, metrics); donates the state.
    scorer: (variables, batch) -> sums over the batch's targets, and the carry.
    abstract_state: shapes, dtypes and shardings of a state.
    abstract_batch: shapes, dtypes and shardings of a training batch.
    micro: number of rows of a micro-batch.
    rows: indices of the rows of a training batch that this process reads.
  """

  def __init__(self, experiment: Experiment, mesh: Mesh):
    """Derive the shardings of an experiment on a mesh.

    Raises:
      ValueError: the mesh does not divide the rows of a micro-batch, `train.trainable` names no
        parameter, or a model with a carry is given micro-batches.
    """
    self.experiment, self.mesh, train = experiment, mesh, experiment.train
    self.micro = train.batch // train.accumulate
    sharding.check_batch(self.micro, mesh)
    self.model = _over_mesh(experiment.model, mesh)
    self._optimizer = optimizer(train)
    _, step_key = keys(experiment.seed)
    shapes = experiment.loader.shapes(self.micro, experiment.model.context)
    make = state_maker(experiment.model, self._optimizer, shapes)
    begin = functools.partial(fresh_state, self._optimizer)
    step = train_step(
      self.model,
      self._optimizer,
      learning_rate(train),
      step_key,
      accumulate=train.accumulate,
      trainable=train.trainable,
    )
    self.abstract_state = self._placed(jax.eval_shape(make, step_key))
    if train.accumulate > 1 and "carry" in self.abstract_state.model_state:
      raise ValueError(
        "`train.accumulate` must be 1 for a model that carries its state from batch to batch; got"
        f" {train.accumulate}. Set train.accumulate=1: a micro-batch would take the carry of other"
        " rows."
      )
    placed = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    everywhere = sharding.replicated(mesh)
    # Sharded by the program itself: a table of the vocabulary may not fit on one device. A step
    # returns the shardings that it takes, so that it is compiled once and reuses donated buffers.
    self.init = jax.jit(make, out_shardings=placed)
    self._begin = jax.jit(begin, out_shardings=placed, donate_argnums=0)
    self.step = self.jitted(step, donate_argnums=0, out_shardings=(placed, everywhere))
    carry = {name: tree for name, tree in placed.model_state.items() if name == "carry"}
    self.scorer = self.jitted(summed_scorer(self.model), out_shardings=(everywhere, carry))

  def begin(self, variables: Mapping[str, Any]) -> TrainState:
    """Return the initial state with given variables, each on its own devices.

    Raises:
      ValueError: the variables differ from the model's in structure, shapes or dtypes, or hold a
        number that is not finite.
    """
    variables, own = dict(variables), self.abstract_state.variables
    lines = differences(shapes_by_name(variables), shapes_by_name(own), "given")
    if lines:
      raise ValueError(
        "`init_from` must return the model's variables; got others:"
        f" {'; '.join(map(str.strip, lines.splitlines()))}. Start from a run of the same model."
      )
    # The step donates its state, so that nothing else may share its buffers.
    copy = lambda array, like: jax.device_put(array, like.sharding, may_alias=False)
    state = self._begin(jax.tree.map(copy, variables, own))
    wrong = [
      jax.tree_util.keystr(path, simple=True, separator=".")
      for path, array in jax.tree.leaves_with_path(state.params)
      if not all_finite(array)
    ]
    if wrong:
      raise ValueError(
        f"`init_from` must return finite numbers; got others in {', '.join(wrong)}. Start from"
        " another run or checkpoint."
      )
    return state

  def jitted(self, function: Callable, **options: Any) -> Callable:
    """Return `jax.jit(function, **options)`, traced with the mesh in context."""

    # Heads read the mesh while they are traced; a later call runs the compiled program.
    @functools.wraps(function)
    def traced(*args):
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        return function(*args)

    return jax.jit(traced, **options)

  def _placed(self, state: TrainState) -> TrainState:
    """Return an abstract state with shardings: moments lie with their parameters."""
    everywhere = sharding.replicated(self.mesh)
    logical_axes = getattr(self.experiment.model, "logical_axes", None)
    if logical_axes is None:
      shardings = jax.tree.map(lambda _: everywhere, state.variables)
    else:
      shardings = sharding.shardings(logical_axes(), state.variables, self.mesh)

    # An optimiser may have no moment of a parameter (MaskedNode), or moments of its rows and
    # columns (a list, SM3): these are replicated.
    is_moment = lambda node: not isinstance(node, (optax.MaskedNode, list))

    def of_moment(node, where, param):
      if not is_moment(node) or node.shape != param.shape[: len(node.shape)]:
        return jax.tree.map(lambda _: everywhere, node)
      # One number a row lies with its row.
      return NamedSharding(self.mesh, PartitionSpec(*where.spec[: len(node.shape)]))

    opt_state = optax.tree_utils.tree_map_params(
      self._optimizer,
      of_moment,
      state.opt_state,
      shardings["params"],
      state.params,
      transform_non_params=lambda _: everywhere,
      is_leaf=lambda node: not is_moment(node),
    )
    params = shardings.pop("params")
    return jax.tree.map(_placed_at, state, TrainState(everywhere, params, shardings, opt_state))

  @property
  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and sharding of a training batch."""
    experiment, where = self.experiment, sharding.batch_sharding(self.mesh)
    shapes = experiment.loader.shapes(experiment.train.batch, experiment.model.context)
    return jax.tree.map(lambda x: _placed_at(x, where), shapes)

  @functools.cached_property
  def rows(self) -> np.ndarray:
    """Indices of the rows of a training batch that this process reads: int64."""
    return sharding.local_rows(self.experiment.train.batch, self.mesh)

  def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training batch on the mesh, from the rows `rows` of it."""
    return sharding.global_batch(batch, self.rows, self.experiment.train.batch, self.mesh)

  def place_whole(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch on the mesh of which every process has all rows."""
    rows = len(batch["targets"])
    return sharding.global_batch(batch, np.arange(rows), rows, self.mesh)


def keys(seed: int) -> tuple[jax.Array, jax.Array]:
  """Return the keys of an experiment's initialisation and of its steps."""
  init_key, step_key = jax.random.split(jax.random.key(seed))
  return init_key, step_key


def _over_mesh(model: nn.Module, mesh: Mesh) -> nn.Module:
  """Return the model with unset `vocab_axis` fields set to the axes of the rules, if sharded."""
  # Of several rules for a name, the one that comes first.
  first = dict(reversed(sharding.RULES))
  changes: dict[int, dict[str, Any]] = {}
  for _, node in walk(model):
    # A memory comes before its table.
    part, rows = (node.table, "ngrams") if isinstance(node, NGramEmbedding) else (node, "vocab")
    if fields_of(part).get("vocab_axis", "") is None:
      # Where the devices do not divide the rows, layers pad them.
      axes = names_of(sharding.spec((rows,), (part.vocab,), mesh)[0]) or first[rows]
      if any(mesh.shape[axis] > 1 for axis in axes):
        changes.setdefault(id(part), {"vocab_axis": axes})
  return rebuild(model, changes)


def _placed_at(array: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)
