"""Which objects does an experiment consist of, and how is the tree rebuilt with some changed?"""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn

# Flax adds these to every module: where a bound module hangs, not what it is.
_FLAX_FIELDS = ("parent", "name")


def fields_of(node: Any) -> dict[str, Any]:
  """The configuration of a dataclass instance: its constructor's fields, without Flax's own two."""
  skip = _FLAX_FIELDS if isinstance(node, nn.Module) else ()
  fields = (f for f in dataclasses.fields(node) if f.init and f.name not in skip)
  return {f.name: getattr(node, f.name) for f in fields}


NOT_IDENTITY = {"identity": False}
"""Metadata of a dataclass field that says how an experiment is executed, not which one it is."""


def identity_of(node: Any) -> dict[str, Any]:
  """`fields_of` without the fields that are marked `NOT_IDENTITY`."""
  own = {f.name: f for f in dataclasses.fields(node)}
  fields = fields_of(node).items()
  return {name: value for name, value in fields if own[name].metadata.get("identity", True)}


@functools.cache
def annotations(cls: type) -> dict[str, Any]:
  """The resolved annotation of each field; `Any` where a name cannot be resolved."""
  try:
    return typing.get_type_hints(cls)
  except (NameError, TypeError):
    kept = {f.name: f.type for f in dataclasses.fields(cls)}
    return {name: Any if isinstance(kind, str) else kind for name, kind in kept.items()}


def is_object(value: Any) -> bool:
  """Whether `value` is an instance of a dataclass: a Flax module, a source, a tokenizer, ..."""
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_node(value: Any) -> bool:
  """Whether `value` is an object or a container that holds one; everything else is a leaf."""
  return is_object(value) or any(is_node(item) for item in _items(value).values())


def children(node: Any) -> dict[str, Any]:
  """What hangs below a node, by the name a path uses: a field, a position or a key."""
  return fields_of(node) if is_object(node) else _items(node)


def _items(value: Any) -> dict[str, Any]:
  if isinstance(value, Mapping):
    return {str(key): item for key, item in value.items()}
  if isinstance(value, (tuple, list)):
    return {str(position): item for position, item in enumerate(value)}
  return {}


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Every object below and including `node` with its path; a shared one at each of its places."""
  if is_object(node):
    yield path, node
  for name, child in children(node).items():
    if is_node(child):
      yield from walk(child, join(path, name))


def join(path: str, name: str) -> str:
  """`name` below `path`, where the root's path is empty."""
  return f"{path}.{name}" if path else name


def rebuild(root: Any, changes: Mapping[int, Mapping[str, Any]]) -> Any:
  """A copy of the tree in which the object with id `i` has the fields `changes[i]`.

  An object that hangs in several places is replaced by one new object in all of them, so a tied
  embedding stays tied. An object with nothing changed below it stays the object it was.
  """
  # By id, never by value: two equal modules are two sets of parameters, and some do not hash.
  memo: dict[int, Any] = {}

  def visit(node: Any) -> Any:
    if not is_node(node):
      return node
    if id(node) not in memo:
      below = {name: visit(child) for name, child in children(node).items()}
      memo[id(node)] = _replace(node, {**below, **changes.get(id(node), {})})
    return memo[id(node)]

  return visit(root)


def _replace(node: Any, below: dict[str, Any]) -> Any:
  old = children(node)
  changed = {name: value for name, value in below.items() if value is not old[name]}
  if not changed:
    return node
  if is_object(node):
    return dataclasses.replace(node, **changed)
  if isinstance(node, Mapping):
    return type(node)({key: below[str(key)] for key in node})
  values = list(below.values())
  return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
