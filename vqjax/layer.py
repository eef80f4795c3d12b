"""The base class of Linen layers that declare their variables."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import numbers
import re
from collections.abc import Callable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike

from vqjax import variables
from vqjax.assign.checks import Given, table_of
from vqjax.assign.text import TextStats
from vqjax.ops import precision, vocab_parallel
from vqjax.ops.vocab_parallel import Replicated, Sharded
from vqjax.ops.vocabulary import is_count
from vqjax.types import MeshAxes, Size
from vqjax.variables import Declaration, Variable

__all__ = []


class Layer(nn.Module, metaclass=abc.ABCMeta):
  """A Linen module whose variables are those that it declares.

  A subclass states its variables in `declare` and its rules in `check`. `setup` creates the
  variables in the order of the declaration. `parts` gives them to a computation over a mesh:
  public methods call `_computed`, and what they compute is a function of these arrays. The
  docstring of a subclass gets the attributes of its bases, so that `help` lists every field and
  each is described once.
  """

  def __init_subclass__(cls, **options: Any):
    super().__init_subclass__(**options)
    cls.__doc__ = _with_inherited_attributes(cls)

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == "vocab_axis" and isinstance(value, list):
        value = tuple(value)  # as of a JSON file; fields are hashed
        object.__setattr__(self, field.name, value)
      if isinstance(value, np.number | np.bool_):  # which would promote what it meets
        object.__setattr__(self, field.name, value.item())
      is_result = table_of(value) is not value
      # Only an array that is wrapped can be compared and hashed, as fields are.
      is_array = isinstance(value, np.ndarray | jax.Array | list)
      if is_array or is_result or (isinstance(value, tuple) and callable(field.default)):
        object.__setattr__(self, field.name, Given(value))
    super().__post_init__()

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
    for field in dataclasses.fields(self):
      value, kind = getattr(self, field.name), wanted(field, getattr(self, field.name))
      # A quantiser's `dim` is None until an embedding sets it.
      is_size = field.name in ("vocab", "dim") and value is not None
      if kind is not None or (is_size and value < 1):
        least = " of at least 1" if is_size else ""
        raise ValueError(
          f"`{field.name}` of {type(self).__name__} must be {kind or 'an integer'}{least}; got"
          f" {value!r}. Give one, or leave it out where the layer has a default."
        )
    precision.check_precision(getattr(self, "precision", None))
    self.check()
    return self.declare()

  def setup(self):
    created = {}
    for name, variable in self._checked().items():
      if isinstance(variable, Variable):
        created[name] = self._create(name, variable, created)
    self._created = created

  def _create(self, name: str, variable: Variable, created: dict[str, nn.Variable]) -> nn.Variable:
    shape, dtype = variable.shape, variable.dtype

    def init():
      given = self.make_rng("params") if variable.random and variable.source is None else None
      if variable.source is not None:
        given = created[variable.source].value
      try:
        return variable.init(given, shape, dtype)
      except (TypeError, ValueError) as error:
        field = f"{name}_init" if hasattr(self, f"{name}_init") else name
        raise ValueError(
          f"`{field}` of {type(self).__name__}: {str(error).rstrip('.')}. Give an initialiser, or"
          f" an array of shape {shape}."
        ) from error

    # Parameters too: unlike `param`, this traces no initialiser where the variable is given.
    held = self.variable(variable.collection, name, init)
    if jnp.shape(held.value) != shape:
      remedy = "Give the layer the fields with which the variables were made."
      remedy = variables.shape_remedy(shape, jnp.shape(held.value), remedy)
      raise ValueError(f"`{name}` must have shape {shape}; got {jnp.shape(held.value)}. {remedy}")
    if jnp.issubdtype(dtype, jnp.integer) and not jnp.issubdtype(held.value.dtype, jnp.integer):
      raise ValueError(
        f"`{name}` of the collection {variable.collection!r} must be integers; got"
        f" {held.value.dtype}. Average and cast the collection 'params' alone, and keep the others."
      )
    return held

  def array(self, name: str) -> Array | None:
    """The value of a variable of this layer; None for a name that it does not declare."""
    if self.scope is None:
      raise ValueError(
        f"`{type(self).__name__}` has no variables outside of `init` and `apply`. Call"
        ' head.apply(variables, ..., method="log_prob"), or use the layer of `vqjax.nnx`.'
      )
    held = self._created.get(name)
    # NumPy arrays reach here: restored or converted variables, and tables inside `nn.scan`.
    return None if held is None else vocab_parallel.automatic(jnp.asarray(held.value))

  def put_variable(self, col: str, name: str, value: Any) -> None:
    """Write a variable with the type that it has outside of the computing method."""
    super().put_variable(col, name, vocab_parallel.outside(value))

  def parts(self) -> dict[str, Any]:
    """The variables by name, for `vocab_parallel.over_vocabulary`.

    Those that are declared with a `pad_value` are split over the devices of the vocabulary's axis,
    and every device reads all of the others. A sub-layer has a dict of its own.
    """
    found = {}
    for name, part in self.declare().items():
      if isinstance(part, Layer):
        # The field, which is bound to the variables.
        found[name] = getattr(self, name).parts()
      elif isinstance(part, Variable) and part.pad_value is not None:
        found[name] = Sharded(self.array(name), part.pad_value)
      elif isinstance(part, Variable):
        found[name] = Replicated(self.array(name))
    return found

  def _computed(self, compute: Callable, batch: Array | None, *arrays: Any) -> Any:
    """`compute(*arrays)` on automatic axes, with results typed by `batch`'s tokens.

    Products have the `precision` of a layer that has one.
    """
    with precision.using(getattr(self, "precision", None)):
      return vocab_parallel.on_any_axes(
        lambda given: compute(*given),
        arrays,
        batch,
        getattr(self, "vocab", None),
        getattr(self, "vocab_axis", None),
      )

  def size(self) -> Size:
    """Parameters, bytes and operations for each token, from the fields alone.

    The variables of a tied `embedding` belong to the embedding and do not count.
    """
    own = {name: part for name, part in self._checked().items() if name != "embedding"}
    return Size(*variables.count_and_bytes(own), self.flops_per_token())

  def logical_axes(self) -> dict:
    """Names of the axes of every variable, a tree with tuples as leaves."""
    return variables.logical_axes(self._checked())


_KINDS = {
  "float": (numbers.Real, "a number", 3e38),
  "int": (numbers.Integral, "an integer", 2**31 - 1),
  "bool": (bool | np.bool_, "True or False", 0),
  "str": (str, "a name", 0),
}
"""Annotations of fields -> what their values are: the type, in words, and the largest number."""


def wanted(field: dataclasses.Field, value: Any, bounded: bool = True) -> str | None:
  """What the value of a field must be, where it is something else; None where it is right.

  With `bounded` a number must be one of 32 bits.
  """
  annotation = field.type
  if not isinstance(annotation, str):
    annotation = getattr(annotation, "__name__", str(annotation))
  kinds = annotation.split(" | ")
  if field.name == "param_dtype" or (field.name == "dtype" and value is not None):
    try:
      # None would be float64.
      is_float = value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):
      is_float = False
    is_wide = is_float and jnp.dtype(value).itemsize > 1
    return None if is_wide else f"a floating-point dtype{' of 16 bits or more' * is_float}"
  if field.name.endswith("_init") and value is not None:
    return None if callable(value) else "an initialiser or an array"
  if value is None and "None" in kinds:
    return None
  if kinds[0] == "MeshAxes":
    several = isinstance(value, tuple) and value and all(isinstance(name, str) for name in value)
    return None if isinstance(value, str) or several else "a name or a tuple of names"
  if kinds[0] == "tuple[int, ...]":
    is_right = isinstance(value, tuple) and all(map(is_count, value))
    return None if is_right else "a tuple of integers"
  if callable(field.default) and not isinstance(field.default, type) and not callable(value):
    return "a function"
  if kinds[0] not in _KINDS or not {*kinds[1:]} <= {*_KINDS, "None"}:
    return None
  _, what, most = _KINDS[kinds[0]]
  is_other = not any(isinstance(value, _KINDS[kind][0]) for kind in kinds if kind != "None")
  wrong = is_other or (most and isinstance(value, bool))
  most = _KINDS["int"][2] if isinstance(value, int) else most
  if bounded and most and not wrong and not -most <= value <= most:
    return what if value != value else f"{what} of 32 bits"
  return what if wrong else None


def _with_inherited_attributes(cls: type) -> str:
  """The docstring of a class, with the attributes of its bases before its own."""
  texts = [inspect.cleandoc(part.__doc__ or "") for part in (*reversed(cls.__bases__), cls)]
  entries: dict[str, str] = {}
  for text in texts:
    section = _ATTRIBUTES.search(text)
    entries |= dict(_ENTRY.findall(section[1] if section else ""))
  if not entries:
    return texts[-1]
  listed = "\n".join(f"  {name}: {text.rstrip()}" for name, text in entries.items())
  return f"{_ATTRIBUTES.sub('', texts[-1]).rstrip()}\n\nAttributes:\n{listed}\n"


# The section of a docstring without its indentation.
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:  .*\n?)+)", re.MULTILINE)

# A name and the lines that explain it.
_ENTRY = re.compile(r"^  (\w+): (.*\n?(?:    .*\n?)*)", re.MULTILINE)


class VocabularyLayer(Layer):
  """A layer of a vocabulary, which may begin with what a text tells about its tokens.

  A subclass says in `_of_text` which of its fields a text gives.

  Attributes:
    vocab: number of tokens, V.
    dim: width of the vectors, D.
    vocab_axis: mesh axis over which the vocabulary is sharded (`jax.set_mesh`), or a tuple of
      several. None, or without a mesh: every device holds the whole vocabulary.
  """

  vocab: int
  dim: int
  vocab_axis: MeshAxes | None = dataclasses.field(default=None, kw_only=True)

  @final
  @classmethod
  def from_tokens(cls, ids: Any, vocab: int, dim: int, *fields: Any, **named: Any) -> Self:
    """The layer whose codes, order, rows and biases a text gives.

    They are the best that are known from text alone: codes and classes by exchange on bigrams,
    groups by clusters of contexts, rows that are vectors of contexts, biases of the tokens'
    frequencies. The layer has a bias unless `use_bias` or `token_bias` is False. It is ready for
    `init`; its `*_init` fields hold what was found, and those that are given stay as they are.

    It takes seconds, and for 50,000 tokens and 1,024 codes half a minute of one core: of a text of
    more than 8 million ids it reads so many. A text that several layers begin with is counted once:
    `assign.TextStats.of(ids, vocab)` stands for its ids.

    Args:
      ids: token ids: an array [N] or [rows, N], such as a memory map, or an iterable of arrays.
      vocab: number of tokens, V.
      dim: width of the vectors, D.
      *fields: further fields of the layer, in their order.
      **named: further fields of the layer.

    Raises:
      ValueError: the ids are not integers in [0, V), or fewer than two in a row; or a text tells
        this layer nothing.
    """
    return cls._begun(TextStats.of(ids, vocab), vocab, dim, *fields, **named)

  @final
  @classmethod
  def from_counts(cls, counts: ArrayLike, vocab: int, dim: int, *fields: Any, **named: Any) -> Self:
    """The layer whose codes, order and biases the frequencies of the tokens give.

    For where no text is at hand: codes are bins of equal mass, groups are by frequency, and rows
    begin at random. See `from_tokens`.

    Args:
      counts: number of occurrences of each token, integers [V].
      vocab: number of tokens, V.
      dim: width of the vectors, D.
      *fields: further fields of the layer, in their order.
      **named: further fields of the layer.

    Raises:
      ValueError: the counts are not valid, or tell this layer nothing.
    """
    return cls._begun(TextStats.of_counts(counts, vocab), vocab, dim, *fields, **named)

  @classmethod
  def _begun(cls, text, *fields, **named):
    given = inspect.signature(cls).bind_partial(*fields, **named).arguments
    own = {field.name for field in dataclasses.fields(cls)} - given.keys()
    layer = cls(*fields, **named, **dict.fromkeys(own & {"use_bias", "token_bias"}, True))
    begun = layer.started_from(text)
    if begun is layer:
      raise ValueError(
        f"`{cls.__name__}` must have rows of its own, codes or a bias that the text can give; got a"
        " layer without. Construct it without the text, and give the text to the embedding that it"
        " is tied to; counts alone give no rows."
      )
    return begun

  @final
  def started_from(self, text: TextStats) -> Self:
    """The layer with what a text gives in each field that is at its default.

    It is the layer itself where the text gives nothing.
    """
    self._checked()
    found = {name: value for name, value in self._of_text(text).items() if value is not None}
    free = {name: value for name, value in found.items() if self._is_free(name)}
    return self.clone(**free) if free else self

  def _is_free(self, name: str) -> bool:
    """Whether a text may give a field: whether it is at its default, or has none."""
    default = type(self).__dataclass_fields__[name].default
    return default is dataclasses.MISSING or getattr(self, name) is default

  def _of_text(self, text: TextStats) -> dict[str, Any]:
    """The fields that a text gives by name; None for one that it cannot give."""
    del text
    return {}
