"""The tree of dataclasses that an experiment consists of, and changes of it."""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn

__all__ = []

NOT_IDENTITY = {"identity": False}
"""Metadata of a dataclass field that says how an experiment is executed, not which one it is."""


def is_object(value: Any) -> bool:
  """Return whether `value` is an instance of a dataclass."""
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(node: Any, *, identity: bool = False) -> dict[str, Any]:
  """Return the fields that a dataclass instance was constructed with, by name.

  Flax's own `parent` and `name`, the position of a bound module, are left out. With
  `identity`, so are the fields that are marked `NOT_IDENTITY`.
  """
  flax = ("parent", "name") if isinstance(node, nn.Module) else ()
  return {
    f.name: getattr(node, f.name)
    for f in dataclasses.fields(node)
    if f.init and f.name not in flax and (not identity or f.metadata.get("identity", True))
  }


@functools.cache
def annotations(cls: type) -> dict[str, Any]:
  """Return the resolved annotation of each field; `Any` for an unknown name."""
  try:
    return typing.get_type_hints(cls)
  except (NameError, TypeError):
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    return {name: Any if isinstance(kind, str) else kind for name, kind in kinds.items()}


def children(node: Any) -> dict[str, Any]:
  """Return the children of a node, by field, position or key."""
  if is_object(node):
    return fields_of(node)
  if isinstance(node, Mapping):
    return {str(key): item for key, item in node.items()}
  if isinstance(node, (tuple, list)):
    return {str(position): item for position, item in enumerate(node)}
  return {}


def is_node(value: Any) -> bool:
  """Return whether `value` is an object, or a container that holds one at any depth."""
  return is_object(value) or any(map(is_node, children(value).values()))


def join(path: str, name: str) -> str:
  """Return the dotted path of `name` below `path`; the path of the root is empty."""
  return f"{path}.{name}" if path else name


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Yield (path, object) for `node` and below; a shared object once for each path."""
  if is_object(node):
    yield path, node
  for name, child in children(node).items():
    if is_node(child):
      yield from walk(child, join(path, name))


def rebuild(root: Any, changes: Mapping[int, Mapping[str, Any]]) -> Any:
  """Return a copy in which the object with id `i` has the fields `changes[i]`.

  An object that several fields share is replaced by one new object in all of them, so that a tied
  embedding stays tied. Objects above no change are not copied.
  """
  # By id, never by value: two equal modules are two sets of parameters, and some do not hash.
  memo: dict[int, Any] = {}

  def visit(node: Any) -> Any:
    if not is_node(node):
      return node
    if id(node) not in memo:
      memo[id(node)] = replaced(node)
    return memo[id(node)]

  def replaced(node: Any) -> Any:
    old = children(node)
    new = {name: visit(child) for name, child in old.items()} | dict(changes.get(id(node), {}))
    changed = {name: value for name, value in new.items() if value is not old[name]}
    if not changed:
      return node
    if is_object(node):
      return dataclasses.replace(node, **changed)
    if isinstance(node, Mapping):
      return type(node)({key: new[str(key)] for key in node})
    is_named_tuple = hasattr(node, "_fields")
    return type(node)(*new.values()) if is_named_tuple else type(node)(new.values())

  return visit(root)
