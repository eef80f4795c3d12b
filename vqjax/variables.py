"""Declarations of the arrays that a layer owns, and what follows from them.

A layer declares each variable once, from its fields alone. The number of parameters, the bytes, the
logical axes and the layout over a mesh are derived from the declaration. Nothing here depends on a
module system.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jaxtyping import Array, ArrayLike

from vqjax.assign.checks import Given
from vqjax.types import Dtype

__all__ = ["optimizer_labels"]

# A function (key, shape, dtype) -> array, as in `jax.nn.initializers`, or the array itself.
Initializer = initializers.Initializer | np.ndarray | Array


def row_init(key: Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> Array:
  """Default initialiser of weights [..., rows, D]: normal with variance 1/D.

  Rows have a mean square length of 1, and the scores of hidden vectors of unit variance have
  variance 1. Embeddings begin so as well as heads, so that an output layer begins with one scale,
  tied or not.
  """
  return initializers.normal(shape[-1] ** -0.5)(key, shape, dtype)


def composed_init(width: int, vectors: int = 1) -> Callable[[Any, tuple[int, ...], Dtype], Array]:
  """Initialiser of tables whose entries compose vectors of mean square length 1.

  Args:
    width: width of a composed vector.
    vectors: number of vectors of that width of which it is the mean; 1: its parts are concatenated.
  """
  return initializers.normal((vectors / width) ** 0.5)


@dataclasses.dataclass(frozen=True)
class Variable:
  """The declaration of one array.

  Attributes:
    shape: the array's shape.
    axes: the logical name of each axis; `vqjax.sharding.RULES` maps names to mesh axes.
    init: (key, shape, dtype) -> array, as in `jax.nn.initializers`.
    dtype: the array's dtype.
    collection: "params" holds what an optimiser trains; every other collection is model state.
    pad_value: fills the rows that are appended where devices do not divide the first axis; None:
      the array is not split by rows of the vocabulary, and every device reads all of it.
    random: whether `init` draws random numbers; otherwise it gets None instead of a key.
    source: the name of a variable declared earlier, whose value `init` gets instead of a key.
  """

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: Callable[[Any, tuple[int, ...], Dtype], Array]
  dtype: Dtype = jnp.float32
  collection: str = "params"
  pad_value: float | int | None = None
  random: bool = True
  source: str | None = None

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(
        f"`axes` must have a name for each axis of {self.shape}; got {self.axes}. Add the names."
      )
    if isinstance(self.init, Given):
      object.__setattr__(self, "init", functools.partial(_given, self.init.table))

  @property
  def is_known(self) -> bool:
    """Whether the value follows from the declaration: a given array, or a table of codes."""
    is_given = isinstance(self.init, functools.partial) and self.init.func is _given
    return is_given or self.collection == "codes"


def _given(table, key, shape, dtype):
  """A given array as an initialiser."""
  del key
  if np.shape(table) != shape:
    remedy = "Give a row for each token, in the order of the token ids."
    raise ValueError(
      f"a given array must have shape {shape}; got {np.shape(table)}. "
      + shape_remedy(shape, np.shape(table), remedy)
    )
  return jnp.asarray(table, dtype)


def shape_remedy(shape: tuple[int, ...], given: tuple[int, ...], remedy: str) -> str:
  """What to do about a wrong shape: a kernel [D, V] of a dense layer is transposed."""
  if len(shape) == 2 and given == shape[::-1] != shape:
    return "Transpose it: layers have a row for each token, [V, D], and kernels are [D, V]."
  return remedy


def integer_variable(
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  make: Callable[[], ArrayLike],
  dtype: Dtype = jnp.int32,
  pad_value: int | None = None,
) -> Variable:
  """Declare an integer table of the collection `codes`.

  It is saved and sharded with the parameters, and never trained.

  Args:
    shape: the table's shape.
    axes: the logical name of each axis.
    make: computes the table; called only where no table is given.
    dtype: the table's dtype.
    pad_value: see `Variable`.
  """

  def init(key, shape, dtype):
    del key
    made = jnp.asarray(make())
    if made.shape != shape or not jnp.issubdtype(made.dtype, jnp.integer):
      raise ValueError(
        f"a table must be integers of shape {shape}; got {made.dtype} of shape {made.shape}. Give"
        " one entry for each token, in the order of the token ids."
      )
    return made.astype(dtype)

  return Variable(shape, axes, init, dtype, "codes", pad_value, random=False)


# The variables of a layer by name; a layer, or a dict of variables, stands for its own.
Declaration = Mapping[str, Any]


def logical_axes(declaration: Declaration) -> dict:
  """Names of the axes by collection, a tree with tuples as leaves; a layer names its own."""
  return _by_collection(
    declaration, lambda variable: variable.axes, lambda layer: layer.logical_axes()
  )


def count_and_bytes(declaration: Declaration) -> tuple[int, int]:
  """The number of parameters, and the bytes of the variables of all collections."""
  arrays = _by_collection(declaration, lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype))
  params = sum(math.prod(x.shape) for x in jax.tree.leaves(arrays.get("params", {})))
  return params, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def known_values(declaration: Declaration) -> dict[str, dict[str, Any]]:
  """The values that need no key, of given arrays and tables of codes, as trees by collection."""
  trees: dict[str, dict[str, Any]] = {}
  for name, part in declaration.items():
    if isinstance(part, Variable):
      if part.is_known:
        source = trees.get(part.collection, {}).get(part.source)
        made = part.init(source, part.shape, part.dtype)
        trees.setdefault(part.collection, {})[name] = made
      continue
    nested = part if isinstance(part, Mapping) else part.declare()
    for collection, tree in known_values(nested).items():
      trees.setdefault(collection, {})[name] = tree
  return trees


def by_collection(declaration: Declaration, arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Arrays by the names of their variables, as trees by collection."""
  trees: dict[str, dict[str, Any]] = {}
  for name, variable in declaration.items():
    trees.setdefault(variable.collection, {})[name] = arrays[name]
  return trees


def _by_collection(
  declaration: Declaration, leaf: Callable[[Variable], Any], of_layer: Callable | None = None
) -> dict:
  """The leaves of the variables, as trees by collection; those of a layer by `of_layer`."""
  of_layer = of_layer or (lambda layer: _by_collection(layer.declare(), leaf))
  trees: dict[str, dict] = {}
  for name, part in declaration.items():
    if isinstance(part, Variable):
      trees.setdefault(part.collection, {})[name] = leaf(part)
      continue
    is_dict = isinstance(part, Mapping)
    for collection, tree in (_by_collection(part, leaf) if is_dict else of_layer(part)).items():
      trees.setdefault(collection, {})[name] = tree
  return trees


VECTORS = frozenset({"bias", "token_bias", "group_bias", "slot_bias", "scale", "shift"})
"""Names of what is added or multiplied, whatever its axes: blocks that are scanned stack it."""


def optimizer_labels(params: Any) -> Any:
  """What each parameter is to an optimiser: "matrix", "table", "vector" or "codes".

  Muon is for matrices alone: arrays that are called `kernel`, as in Flax's layers, which multiply
  hidden vectors. A "table" has a row for each token, code or group, of which a step may read few;
  Adam is for tables and for vectors: biases, gains and offsets. `vqjax.row_updates.rowwise` is for
  tables that are too large for Adam's moments. "codes" are integers, which no optimiser trains,
  except for the int8 levels of a trained table, a "table" with its scale.
  `optax` takes this function where it takes labels, and masks follow from it:

    rules = {"matrix": optax.contrib.muon(2e-2), "table": adam(3e-3), "vector": adam(3e-3)}
    optimizer = optax.multi_transform(rules, vqjax.optimizer_labels)
    decayed = lambda params: jax.tree.map("matrix".__eq__, vqjax.optimizer_labels(params))

  Args:
    params: parameters or variables of any model, a tree of Flax, or an `nnx.State`.

  Returns:
    A tree of the same structure with a label for each array.
  """

  # By names, since their gradients are labelled too, which are floats.
  name_of = lambda path: str(getattr(path[-1], "key", "")) if path else ""
  paths = [path for path, _ in jax.tree.leaves_with_path(params)]
  having = lambda name: {path[:-1] for path in paths if name_of(path) == name}
  int8_tables = having("levels") & having("scale")

  def label(path, array):
    if path[:-1] in int8_tables and name_of(path) in ("levels", "scale"):
      return "table"
    if not jnp.issubdtype(array.dtype, jnp.inexact):
      return "codes"
    names = [str(part.key) for part in path if hasattr(part, "key")]
    # `token_bias_array` is the name that an NNX layer has for `token_bias`.
    name = names[-1].removesuffix("_array") if names else ""
    if array.ndim < 2 or name in VECTORS:
      return "vector"
    return "matrix" if name == "kernel" else "table"

  return jax.tree.map_with_path(label, params)
