"""The base class of NNX layers, which wrap Linen layers and their declarations.

An NNX layer has the variables that its Linen layer declares, and calls the methods of that layer on
their values. So both have one implementation of every method and one declaration of every variable.
"""

# An NNX layer holds the variables, its Linen layer the fields and the computation:
#
#   DenseHead(vocab, dim, rngs=...)           fields by `__signature__`, as Linen's class has them
#     layer = heads.DenseHead(vocab, dim)     the Linen layer, unbound
#     weight = nnx.Param(...)                 a variable for each name of `layer.declare()`
#
#   head.log_prob(hidden, tokens)             written out in `vqjax.nnx`, for editors
#     _call("log_prob", hidden, tokens)
#       linen_variables()                    the values, as trees by collection
#       layer.apply(values, ..., mutable)     collections that a method may change are mutable
#       _update(changed)                      and are written back into the NNX variables
#
# A declaration is a tree: a Variable, a layer with a declaration of its own, or a dict of these.
# `_create`, `_values` and `_assign` walk it to make variables, to read and to write them. What is
# held for a name may also be shared: an NNX layer, an `nnx.Embed` or an `nnx.Param` [V, D].
#
# NNX's tree mode has no shared references: there a tied head holds nothing for its embedding, and
# `tied(embedding)` makes a head for one call, which is no part of the model.

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import config, nnx
from flax import linen as nn
from jaxtyping import ArrayLike

from vqjax import layer as linen_layer
from vqjax.embeddings import DenseEmbedding
from vqjax.types import MeshAxes, Size
from vqjax.variables import Variable, shape_remedy

__all__ = ["AxisRules", "Codes", "Layer", "LayerState", "VocabularyLayer"]

# Logical axis, as a layer's own `logical_axes()` names it, -> axes of the mesh; an absent one is
# not sharded.
AxisRules = Mapping[str, str | tuple[str, ...] | None]


class Codes(nnx.Variable):
  """An integer table, such as the code of each token: saved, never trained."""


class LayerState(nnx.Variable):
  """State beside the parameters, such as moving averages of centroids."""


# The variable of a collection; `LayerState` of all others.
_KINDS = {"params": nnx.Param, "codes": Codes, "batch_stats": nnx.BatchStat}

# Collections that no method changes.
_CONSTANT = "params", "codes", "guide"


class Layer(nnx.Module):
  """Base class of NNX layers.

  A subclass names its Linen class, `class DenseHead(Head, of=heads.DenseHead)`, and has its fields.
  Its methods call those of the Linen layer. Methods that may draw random numbers in training have
  an argument `rngs`, whose stream "sample" is the Linen stream of this name.

  A variable is an attribute with its name in the declaration, or with that name and "_array" where
  a field or a method has the name: `CodebookHead` has `codes` and `token_bias` as fields, and its
  bias is `token_bias_array`.

  Example:
    >>> import jax
    >>> from flax import nnx
    >>> from vqjax.nnx import CodebookHead
    >>> head = CodebookHead(vocab=1000, dim=8, codes=50, rngs=nnx.Rngs(0))
    >>> hidden = jax.random.normal(jax.random.key(0), (4, 8))
    >>> print(head.log_prob(hidden, jax.numpy.arange(4)).shape, type(head.assignment).__name__)
    (4,) Codes

  Attributes:
    layer: the Linen layer: the fields and the computation.
  """

  of: ClassVar[type[linen_layer.Layer]]

  def __init_subclass__(cls, of: type[linen_layer.Layer] | None = None, **options: Any):
    super().__init_subclass__(**options)
    if of is None:
      return
    # `help` and editors show the fields of the Linen class, which `__init__` takes by position too.
    cls.of, cls.__doc__ = of, _docstring(of)
    _NNX_CLASS[of] = cls
    cls.__signature__ = _signature(of)

  def __init__(
    self,
    *fields: Any,
    rngs: nnx.Rngs | None = None,
    axis_rules: AxisRules | None = None,
    **named: Any,
  ):
    """Construct the layer and its variables.

    Args:
      *fields: the fields of the Linen class, in their order.
      rngs: its stream "params" initialises the parameters.
      axis_rules: logical axis -> mesh axes, for the variables' metadata `out_sharding`; None: the
        vocabulary over `vocab_axis`, if that is given. With a mesh in context (`jax.set_mesh`) the
        variables are created with this sharding.
      **named: further fields of the Linen class. A layer among them, such as `embedding`, may be
        an NNX layer, which is then shared, or a Linen layer, of which an NNX layer is made; a tied
        `embedding` may also be an `nnx.Embed` or an `nnx.Param` [V, D].

    Raises:
      ValueError: the fields contradict each other or are out of range.
      TypeError: `rngs` is missing, or a field is missing or unknown.
    """
    if not isinstance(rngs, nnx.Rngs):
      raise TypeError(
        f"`rngs` of {type(self).__name__} must be an nnx.Rngs; got {type(rngs).__name__}. Give"
        " rngs=nnx.Rngs(0)."
      )
    # Bound here and not by Linen's constructor, which takes `parent` and `name` as well.
    try:
      given = type(self).__signature__.bind(*fields, rngs=rngs, **named).arguments
    except TypeError as error:
      names = ", ".join(name for name in type(self).__signature__.parameters)
      raise TypeError(f"{type(self).__name__} {error}. Its arguments are {names}.") from None
    del given["rngs"]
    shared = {name: value for name, value in given.items() if isinstance(value, Layer)}
    if isinstance(given.get("embedding"), (nnx.Embed, nnx.Param)):
      shared["embedding"] = given["embedding"]
    self.layer = self.of(**given | {name: _linen(value) for name, value in shared.items()})
    rules, axis = axis_rules, getattr(self.layer, "vocab_axis", None)
    if rules is None and axis:
      rules = {"vocab": axis}
    # In the order of the declaration: a variable with a `source` reads one that is there already.
    is_tree = not getattr(config, "nnx_graph_mode", True)
    for name, part in self.layer._checked().items():
      if name == "embedding" and name in shared and is_tree:
        continue  # handed to `tied` at each call
      held = shared[name] if name in shared else self._create(part, rngs, rules)
      setattr(self, self._attribute(name), held)

  def _create(self, part: Any, rngs: nnx.Rngs, rules: AxisRules | None) -> Any:
    """The variable, the layer or the dict of variables of a part of the declaration."""
    if isinstance(part, linen_layer.Layer):
      return _of_linen(part, rngs, rules)
    if not isinstance(part, Variable):
      return nnx.Dict({name: self._create(inner, rngs, rules) for name, inner in part.items()})
    if part.source is not None:
      source = getattr(self, self._attribute(part.source)).get_value()
    else:
      source = rngs.params() if part.random else None
    axes = tuple((rules or {}).get(axis) for axis in part.axes)
    metadata = {}
    # Eager sharding of an array that the devices do not divide would be an error.
    if any(axes) and _divides(part.shape, axes):
      has_mesh = not jax.sharding.get_abstract_mesh().empty
      metadata = {"out_sharding": axes, "eager_sharding": has_mesh}
    kind = _KINDS.get(part.collection, LayerState)
    return kind(jnp.asarray(part.init(source, part.shape, part.dtype)), **metadata)

  @staticmethod
  def from_linen(
    layer: linen_layer.Layer,
    variables: Mapping[str, Any],
    axis_rules: AxisRules | None = None,
  ) -> "Layer":
    """The NNX layer of a Linen layer, with the values of its variables.

    Args:
      layer: the Linen layer.
      variables: collection -> values.
      axis_rules: see the constructor.

    Raises:
      ValueError: a declared variable is missing, a variable is not declared, or one has another
        shape.
      TypeError: `layer` is not a layer of this library, such as a whole model.
    """
    if not isinstance(layer, linen_layer.Layer):
      raise TypeError(
        f"`layer` must be a layer of vqjax; got a {type(layer).__name__}. For the head of a model"
        " give *vqjax.convert.head_of(model, variables), for its embedding model.embedding and"
        " vqjax.convert.part_of(variables, 'embedding')."
      )
    layer = layer.clone(parent=None)
    # Shapes alone: nothing is initialised that the given values would replace.
    made = nnx.eval_shape(lambda: _of_linen(layer, nnx.Rngs(0), axis_rules))
    shapes = lambda tree: {
      jax.tree_util.keystr(path, simple=True, separator="/"): jnp.shape(leaf)
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    variables = jax.tree.map(jnp.asarray, nn.meta.unbox(dict(variables)))
    needed, given = shapes(made.linen_variables()), shapes(variables)
    remedy = f"Give all variables of the {type(layer).__name__} and no others."
    for path in sorted(needed.keys() | given.keys()):
      if needed.get(path) != given.get(path):
        raise ValueError(
          f"`variables` must have {path!r} of shape {needed.get(path)}; got {given.get(path)}. "
          + shape_remedy(needed.get(path, ()), given.get(path, ()), remedy)
        )
    made._update(variables)
    return made

  def linen_variables(self) -> dict[str, Any]:
    """The values of the variables, in the trees of the Linen layer."""
    collected: dict[str, Any] = {}
    for name, part in self.layer.declare().items():
      if (held := vars(self).get(self._attribute(name))) is None:
        raise ValueError(
          f"`{name}` must be handed to a {type(self).__name__} in NNX's tree mode; it holds none."
          f" Call head.tied(model.{name}).log_prob(hidden, tokens)."
        )
      for collection, tree in _values(held, part).items():
        collected.setdefault(collection, {})[name] = tree
    return collected

  def tied(self, embedding: "Layer | nnx.Embed | nnx.Param") -> Self:
    """This layer with the table of an embedding that the model owns, for one call.

    It is the form of tying that NNX's tree mode allows, where no two attributes of a model may be
    one object. The layer is constructed with `embedding` all the same.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from vqjax.nnx import DenseEmbedding, DenseHead
      >>> embed = DenseEmbedding(1000, 8, rngs=nnx.Rngs(0))
      >>> head = DenseHead(1000, 8, embedding=embed, rngs=nnx.Rngs(1))
      >>> tokens = jax.numpy.arange(4)
      >>> print(head.tied(embed).log_prob(embed(tokens), tokens).shape)
      (4,)

    Raises:
      ValueError: the layer is not tied, or the embedding has other fields.
    """
    if "embedding" not in self.layer.declare() or _linen(embedding) != self.layer.embedding:
      raise ValueError(
        f"`embedding` must be the one that this {type(self).__name__} was tied to; got"
        f" {_linen(embedding)!r}. Construct the head with embedding=model.embed."
      )
    made = copy.copy(self)
    vars(made)["embedding"] = embedding
    return made

  def size(self) -> Size:
    """Parameters, bytes and operations for each token, from the fields alone."""
    return self.layer.size()

  def logical_axes(self) -> dict[str, Any]:
    """Names of the axes of every variable, in the trees of the Linen layer."""
    return self.layer.logical_axes()

  def flops_per_token(self) -> int:
    """Floating-point operations of a forward pass for one token."""
    return self.layer.flops_per_token()

  def __getattr__(self, name: str) -> Any:
    # Fields alone, and not all attributes of the Linen layer, whose methods need its variables.
    if name in {f.name for f in dataclasses.fields(type(self).of)} - {*_LINEN}:
      return getattr(self.layer, name)
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

  def __setattr__(self, name: str, value: Any) -> None:
    if name != "layer" and name in {f.name for f in dataclasses.fields(type(self).of)}:
      # A field that holds a layer, such as `embedding`, is the NNX layer's own attribute.
      held = vars(self).get("layer")
      if held is None or not isinstance(getattr(held, name), nn.Module):
        raise AttributeError(
          f"`{name}` of {type(self).__name__} is a field, which is fixed; got an assignment."
          " Construct another layer."
        )
    super().__setattr__(name, value)

  def _attribute(self, name: str) -> str:
    """The attribute of a declared variable, beside those of fields and methods."""
    own = getattr(self.layer, name, None)
    return name if own is None or isinstance(own, nn.Module) else f"{name}_array"

  def _call(self, method: str, *args: Any, rngs: nnx.Rngs | None = None, **kwargs: Any) -> Any:
    variables = self.linen_variables()
    # `apply` returns what is mutable, and it alone is written back.
    changing = [name for name in variables if name not in _CONSTANT]
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
      raise TypeError(f"`rngs` must be an nnx.Rngs; got {type(rngs).__name__}. Give nnx.Rngs(0).")
    streams = {} if rngs is None else {"sample": rngs.sample()}
    apply = functools.partial(self.layer.apply, variables, method=method, rngs=streams)
    if not changing:
      return apply(*args, **kwargs)
    result, changed = apply(*args, mutable=changing, **kwargs)
    self._update(changed)
    return result

  def _update(self, changed: Mapping[str, Any]) -> None:
    for name, part in self.layer.declare().items():
      here = {collection: tree[name] for collection, tree in changed.items() if name in tree}
      if here:
        _assign(getattr(self, self._attribute(name)), part, here)


class VocabularyLayer(Layer):
  """An NNX layer of a vocabulary, which may begin with what a text tells about its tokens."""

  vocab: int
  dim: int
  vocab_axis: MeshAxes | None

  @classmethod
  def from_tokens(
    cls,
    ids: Any,
    vocab: int,
    dim: int,
    *fields: Any,
    rngs: nnx.Rngs,
    axis_rules: AxisRules | None = None,
    **named: Any,
  ) -> Self:
    """The layer whose codes, order, rows and biases a text gives; see `vqjax.Head.from_tokens`."""
    return cls._begun("from_tokens", ids, (vocab, dim, *fields), named, rngs, axis_rules)

  @classmethod
  def from_counts(
    cls,
    counts: ArrayLike,
    vocab: int,
    dim: int,
    *fields: Any,
    rngs: nnx.Rngs,
    axis_rules: AxisRules | None = None,
    **named: Any,
  ) -> Self:
    """The layer whose codes, order and biases frequencies give; see `vqjax.Head.from_counts`."""
    return cls._begun("from_counts", counts, (vocab, dim, *fields), named, rngs, axis_rules)

  @classmethod
  def _begun(cls, how, given, fields, named, rngs, axis_rules):
    named = dict(zip(cls.__signature__.parameters, fields)) | named
    shared = {name: x for name, x in named.items() if isinstance(x, (Layer, nnx.Embed, nnx.Param))}
    linen = {name: _linen(x) for name, x in shared.items()}
    begun = getattr(cls.of, how)(given, **named | linen)
    return cls(**_fields(begun) | shared, rngs=rngs, axis_rules=axis_rules)


# The NNX class of each Linen class that has one.
_NNX_CLASS: dict[type, type[Layer]] = {}

# Fields of every Linen module.
_LINEN = "parent", "name"


def _of_linen(layer: linen_layer.Layer, rngs: nnx.Rngs, rules: AxisRules | None) -> Layer:
  """A new NNX layer with the fields of a Linen layer."""
  of = type(layer)
  if of not in _NNX_CLASS:
    # A subclass from elsewhere gets a class here, which `__init_subclass__` enters.
    base = next((_NNX_CLASS[parent] for parent in of.__mro__ if parent in _NNX_CLASS), Layer)
    type(base)(of.__name__, (base,), {}, of=of)
  return _NNX_CLASS[of](**_fields(layer), rngs=rngs, axis_rules=rules)


def _fields(layer: linen_layer.Layer) -> dict[str, Any]:
  """The fields that a Linen layer was constructed with."""
  names = [f.name for f in dataclasses.fields(layer) if f.init and f.name not in _LINEN]
  return {name: getattr(layer, name) for name in names}


def _linen(shared: Any) -> linen_layer.Layer:
  """The Linen layer of a shared layer, or of a shared table [V, D]."""
  if isinstance(shared, Layer):
    return shared.layer
  shape = (shared.embedding if isinstance(shared, nnx.Embed) else shared).shape
  if len(shape) != 2:
    raise ValueError(
      f"`embedding` must be a table [V, D]; got an nnx.Param of shape {shape}. Reshape it."
    )
  return DenseEmbedding(*shape)


def _divides(shape: tuple[int, ...], axes: tuple) -> bool:
  """Whether the mesh in context, if there is one, divides the shape."""
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  for count, axis in zip(shape, axes):
    for name in (axis,) if isinstance(axis, str) else axis or ():
      if count % sizes.get(name, 1):
        return False
      # The next axis divides what this one has left.
      count //= sizes.get(name, 1)
  return True


def _values(held: Any, part: Any) -> dict[str, Any]:
  """Values by collection of what is held for a part of a declaration."""
  if isinstance(held, Layer):
    return held.linen_variables()
  if isinstance(held, nnx.Embed):
    return {"params": {"weight": held.embedding.get_value()}}
  if isinstance(part, Variable):
    return {part.collection: held.get_value()}
  if isinstance(held, nnx.Param):
    return {"params": {"weight": held.get_value()}}
  collected: dict[str, Any] = {}
  for name, inner in part.items():
    for collection, tree in _values(held[name], inner).items():
      collected.setdefault(collection, {})[name] = tree
  return collected


def _assign(held: Any, part: Any, changed: Mapping[str, Any]) -> None:
  """Write changed values; values that a method left alone are the same objects."""
  if isinstance(held, Layer):
    held._update(changed)
  elif isinstance(part, Variable):
    # Inside of a transformation NNX refuses to write a variable that was made outside.
    value = changed[part.collection]
    if value is not held.get_value():
      held.set_value(value)
  else:
    for name, inner in part.items():
      _assign(held[name], inner, {kind: tree[name] for kind, tree in changed.items()})


def _docstring(of: type) -> str:
  """The Linen docstring without its example, with the constructor's own arguments."""
  text = re.sub(r"^Example:\n(?:  .*\n|\n)*", "", inspect.cleandoc(of.__doc__), flags=re.MULTILINE)
  return f"{text.rstrip()}\n\n{_CONSTRUCTOR}"


_CONSTRUCTOR = """Args:
  rngs: its stream "params" initialises the parameters.
  axis_rules: logical axis -> axes of the mesh, for the sharding of the variables; None: the
    vocabulary over `vocab_axis`.
"""


def _signature(of: type) -> inspect.Signature:
  """The constructor's signature: the Linen fields, `rngs` and `axis_rules`."""
  given = inspect.signature(of).parameters.values()
  fields = [each for each in given if each.name not in _LINEN]
  keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
  return inspect.Signature([*fields, keyword("rngs"), keyword("axis_rules", default=None)])
