"""The base class of Linen layers that declare their variables."""

from __future__ import annotations

import abc
import inspect
import numbers
import re
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from vqjax import variables
from vqjax.ops.vocab_parallel import Sharded
from vqjax.types import Size
from vqjax.variables import Declaration, Variable


class Layer(nn.Module, metaclass=abc.ABCMeta):
  """A Linen module whose variables are those that it declares.

  A subclass states its variables in `declare` and its rules in `check`. `setup` creates the
  variables in the order of the declaration; `array` reads one. The docstring of a subclass gets the
  attributes of its bases, so that `help` lists every field and each is described once.
  """

  def __init_subclass__(cls, **options: Any):
    super().__init_subclass__(**options)
    cls.__doc__ = _with_inherited_attributes(cls)

  @abc.abstractmethod
  def declare(self) -> Declaration:
    """The variables and the sub-layers by name, from the fields alone.

    The order matters: each random `init` gets the next key of the module.
    """

  @abc.abstractmethod
  def flops_per_token(self) -> int:
    """Floating-point operations of a forward pass for one token.

    A multiply-add counts as two.
    """

  def check(self) -> None:
    """Check the fields, except for `vocab` and `dim`.

    Raises:
      ValueError: the fields contradict each other or are out of range.
    """

  def _checked(self) -> Declaration:
    """The declaration of a layer whose fields are checked."""
    for name in ("vocab", "dim"):
      value = getattr(self, name, None)
      # A quantiser's `dim` is None until an embedding sets it.
      if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
        raise ValueError(
          f"`{name}` of {type(self).__name__} must be an integer of at least 1; got {value!r}."
          " Give the number of tokens as `vocab` and the width of the vectors as `dim`."
        )
    self.check()
    return self.declare()

  def setup(self):
    created = {}
    for name, variable in self._checked().items():
      if isinstance(variable, Variable):
        created[name] = self._create(name, variable, created)
    self._created = created

  def _create(self, name: str, variable: Variable, created: dict):
    shape, dtype = variable.shape, variable.dtype
    if variable.collection == "params":
      return self.param(name, variable.init, shape, dtype)

    def init():
      if variable.source is not None:
        return variable.init(created[variable.source].value, shape, dtype)
      return variable.init(self.make_rng("params") if variable.random else None, shape, dtype)

    state = self.variable(variable.collection, name, init)
    if jnp.shape(state.value) != shape:
      raise ValueError(
        f"`{name}` must have shape {shape}; got {jnp.shape(state.value)}. Give the layer the fields"
        " with which the variables were made."
      )
    return state

  def array(self, name: str) -> Array | None:
    """The value of a variable of this layer; None for a name that it does not declare."""
    value = self._created.get(name)
    if isinstance(value, nn.Variable):
      value = value.value
    # NumPy arrays reach here: restored or converted variables, and tables inside `nn.scan`.
    return None if value is None else jnp.asarray(value)

  def sharded_arrays(self) -> dict[str, Sharded]:
    """The variables that are declared with a `pad_value`, by name."""
    return {
      name: Sharded(self.array(name), variable.pad_value)
      for name, variable in self.declare().items()
      if isinstance(variable, Variable) and variable.pad_value is not None
    }

  def size(self) -> Size:
    """Parameters, bytes and operations for each token, from the fields alone.

    The variables of a tied `embedding` belong to the embedding and do not count.
    """
    own = {name: part for name, part in self._checked().items() if name != "embedding"}
    return Size(*variables.count_and_bytes(own), self.flops_per_token())

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a tree with tuples as leaves."""
    return variables.logical_axes(self._checked())


def _with_inherited_attributes(cls: type) -> str:
  """The docstring of a class, whose section Attributes begins with those of its bases."""
  texts = [inspect.cleandoc(part.__doc__ or "") for part in (*reversed(cls.__bases__), cls)]
  entries: dict[str, str] = {}
  for text in texts:
    section = _ATTRIBUTES.search(text)
    entries |= dict(_ENTRY.findall(section[1] if section else ""))
  if not entries:
    return texts[-1]
  listed = "\n".join(f"  {name}: {text.rstrip()}" for name, text in entries.items())
  return f"{_ATTRIBUTES.sub('', texts[-1]).rstrip()}\n\nAttributes:\n{listed}\n"


_ATTRIBUTES = re.compile(r"^Attributes:\n((?:  .*\n?)+)", re.MULTILINE)
"""The section of a docstring without its indentation."""

_ENTRY = re.compile(r"^  (\w+): (.*\n?(?:    .*\n?)*)", re.MULTILINE)
"""A name and the lines that explain it."""
