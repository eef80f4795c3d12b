"""What exactly is compiled for an experiment on a mesh, and where does each array lie?"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from vqjax import sharding
from vqjax.lab.config import Experiment
from vqjax.lab.config.tree import fields_of, rebuild, walk
from vqjax.lab.training.evaluate import summed
from vqjax.lab.training.optimizer import learning_rate, optimizer
from vqjax.lab.training.state import TrainState, all_finite, fresh_state, state_maker
from vqjax.lab.training.step import train_step


class Program:
  """An experiment's initialisation, step and scorer on a mesh, and the arrays that they take.

  Nothing is computed or compiled before it is called, and the mesh may be of devices that are not
  here: `program.step.lower(program.abstract_state, program.abstract_batch)` is the real step.

  Attributes:
    experiment: what is trained; the `vocab` of its modules is known.
    mesh: where.
    model: the experiment's model, its vocabulary spread over the mesh.
    init: key -> a fresh state, every array made where it stays.
    step: (state, batch) -> (state, metrics); the state is donated.
    scorer: (variables, batch) -> sums over the batch's targets, and the carry.
    abstract_state: shapes, dtypes and shardings of a state.
    abstract_batch: the same of a training batch.
    micro: rows that are computed at a time.
    rows: those rows of a training batch that this process reads.
  """

  def __init__(self, experiment: Experiment, mesh: Mesh):
    """Lays the experiment out on the mesh.

    Raises:
      ValueError: the mesh does not divide the rows of a (micro-)batch, or the model has no
        parameter that `train.trainable` names.
    """
    self.experiment, self.mesh, train = experiment, mesh, experiment.train
    self.micro = train.batch // train.accumulate
    sharding.check_batch(self.micro, mesh)
    self.model = over_mesh(experiment.model, mesh)
    self._optimizer = optimizer(train)
    _, step_key = keys(experiment.seed)
    shapes = experiment.loader.shapes(self.micro, experiment.model.context)
    make = state_maker(experiment.model, self._optimizer, shapes)
    begin = functools.partial(fresh_state, self._optimizer)
    rate = learning_rate(train)
    how = train.accumulate, train.trainable
    step = train_step(self.model, self._optimizer, rate, step_key, *how)
    self.abstract_state = self._placed(jax.eval_shape(make, step_key))
    if train.accumulate > 1 and "carry" in self.abstract_state.model_state:
      raise ValueError(
        f"train.accumulate {train.accumulate} would mix the rows that the model remembers; set it"
        " to 1"
      )
    placed = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    everywhere = sharding.replicated(mesh)
    self.init = jax.jit(make, out_shardings=placed)
    self._begin = jax.jit(begin, out_shardings=placed, donate_argnums=0)
    self.step = self.jitted(step, donate_argnums=0, out_shardings=(placed, everywhere))
    carry = {name: tree for name, tree in placed.model_state.items() if name == "carry"}
    self.scorer = self.jitted(summed(self.model), out_shardings=(everywhere, carry))

  def begin(self, variables: Mapping[str, Any]) -> TrainState:
    """A fresh state with given variables, each put where it stays.

    Raises:
      ValueError: the variables have another structure, other shapes or dtypes than the model's own,
        or a number that is not finite; the message names them.
    """
    own = self.abstract_state.variables
    _check_same(dict(variables), own)
    # The step donates its state: nobody else may hold it, nor may two of its places share it.
    copy = lambda array, like: jax.device_put(array, like.sharding, may_alias=False)
    state = self._begin(jax.tree.map(copy, dict(variables), own))
    wrong = [name for name, array in _named(state.params) if not all_finite(array)]
    if wrong:
      raise ValueError(
        f"experiment.init_from gives numbers that are not finite, in {', '.join(wrong)}; mend it"
      )
    return state

  def jitted(self, function: Callable, **options: Any) -> Callable:
    """The function, traced with the mesh in context; the options are those of `jax.jit`."""

    @functools.wraps(function)
    def traced(*args):
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        return function(*args)

    return jax.jit(traced, **options)

  def _placed(self, state: TrainState) -> TrainState:
    """An abstract state with its shardings: the optimiser's numbers lie with their parameters."""
    everywhere = sharding.replicated(self.mesh)
    names = getattr(self.experiment.model, "logical_axes", None)
    found = (
      jax.tree.map(lambda _: everywhere, state.variables)
      if names is None
      else sharding.shardings(names(), state.variables, self.mesh)
    )
    tables = {name: tree for name, tree in found.items() if name != "params"}
    opt_state = optax.tree_utils.tree_map_params(
      self._optimizer,
      lambda found, where: where if _is_like_a_parameter(found) else _everywhere(found, everywhere),
      state.opt_state,
      found["params"],
      transform_non_params=lambda _: everywhere,
      is_leaf=lambda node: not _is_like_a_parameter(node),
    )
    where = TrainState(everywhere, found["params"], tables, opt_state)
    return jax.tree.map(_placed_at, state, where)

  @property
  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and sharding of a training batch."""
    experiment, where = self.experiment, sharding.batch_sharding(self.mesh)
    shapes = experiment.loader.shapes(experiment.train.batch, experiment.model.context)
    return jax.tree.map(lambda x: _placed_at(x, where), shapes)

  @functools.cached_property
  def rows(self) -> np.ndarray:
    """Those rows of a training batch that this process reads: int64."""
    return sharding.local_rows(self.experiment.train.batch, self.mesh)

  def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A training batch on the mesh, from the rows `rows` of it."""
    return sharding.global_batch(batch, self.rows, self.experiment.train.batch, self.mesh)

  def place_whole(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch on the mesh that every process has all rows of, as for an evaluation."""
    rows = len(batch["targets"])
    return sharding.global_batch(batch, np.arange(rows), rows, self.mesh)


def keys(seed: int) -> tuple[jax.Array, jax.Array]:
  """The keys of an experiment's initialisation and of its steps."""
  init_key, step_key = jax.random.split(jax.random.key(seed))
  return init_key, step_key


def over_mesh(model: nn.Module, mesh: Mesh) -> nn.Module:
  """The model with every `vocab_axis` that is None set to "model", where that axis has devices."""
  if mesh.shape["model"] == 1:
    return model
  changes: dict[int, dict[str, Any]] = {}
  for _, node in walk(model):
    if fields_of(node).get("vocab_axis", "") is None:
      changes[id(node)] = {"vocab_axis": "model"}
  return rebuild(model, changes)


def _check_same(variables: dict, own: dict) -> None:
  kinds = lambda tree: {name: f"{x.dtype}{list(x.shape)}" for name, x in _named(tree)}
  given, wanted = kinds(variables), kinds(own)
  differ = [
    f"  {name}: {given.get(name, 'absent')} given, {wanted.get(name, 'absent')} in this model"
    for name in sorted(given.keys() | wanted.keys())
    if given.get(name) != wanted.get(name)
  ]
  if differ:
    lines = "\n".join(differ[:10])
    raise ValueError(f"experiment.init_from gives variables of another model:\n{lines}")


def _named(tree: dict) -> list[tuple[str, Any]]:
  """The arrays of a tree by their dotted names."""
  leaves = jax.tree.leaves_with_path(tree)
  return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _is_like_a_parameter(node: Any) -> bool:
  """Whether an optimiser has, in a parameter's place, an array of its shape.

  Not where it leaves the parameter alone, and not where it has moments of rows and columns.
  """
  return not isinstance(node, (optax.MaskedNode, list))


def _everywhere(node: Any, where: jax.sharding.Sharding) -> Any:
  return jax.tree.map(lambda _: where, node)


def _placed_at(array: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)
