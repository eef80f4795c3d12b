"""The description of an experiment as JSON, its hash, and differences."""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vqjax.lab.config.experiment_tree import annotations, fields_of, is_object, join

__all__ = ["config_hash", "describe", "difference"]

LONG = 10_000
"""Integers, such as one for each token, of which more are described by their hash."""


def config_hash(experiment: Any) -> str:
  """Return 12 hexadecimal digits that identify an experiment in every process.

  They begin the SHA-256 of its description as canonical JSON. Module paths and fields at their
  defaults are not part of it: neither a moved class nor a new field with a default changes the
  identity of an existing run.
  """
  described = _without_defaults(experiment, describe(experiment))
  canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def describe(experiment: Any) -> Any:
  """Return a description of an experiment, or of one of its objects, for `json`.

  An object is {"class": "CodebookHead", field: ...}. A function is its name and, for one that
  another function made, such as an initialiser, the values that it captured. A module that
  several fields share is described in each, and from the second on has the path of the first as
  "same_as": tied and untied models differ.

  Raises:
    ValueError: a value has no stable description, such as a lambda; the message has its path.
  """
  return _describe(experiment, "", {})


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
  """Return the differences as lines: `model.head.codes: 512 here, 1024 there`."""
  left, right = _flatten(here), _flatten(there)
  show = lambda flat, path: repr(flat[path]) if path in flat else "absent"
  return [
    f"{path}: {show(left, path)} here, {show(right, path)} there"
    for path in left | right
    if path not in left or path not in right or left[path] != right[path]
  ]


def _flatten(described: Any) -> dict[str, Any]:
  """A nested description as {"model.head.codes": 512, ...}."""

  def is_value(node: Any) -> bool:
    is_plain = isinstance(node, list) and not any(isinstance(item, (dict, list)) for item in node)
    return is_plain or node is None or node == {}

  leaves, _ = jax.tree_util.tree_flatten_with_path(described, is_value)
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _without_defaults(value: Any, described: Any) -> Any:
  """The description of `value` without the fields whose values are their defaults."""
  if isinstance(value, Mapping):
    return {str(key): _without_defaults(item, described[str(key)]) for key, item in value.items()}
  if isinstance(value, (tuple, list)) and isinstance(described, list):
    return [_without_defaults(item, text) for item, text in zip(value, described, strict=True)]
  if not is_object(value):
    return described
  kept = {key: described[key] for key in ("class", "same_as") if key in described}
  own = {field.name: field for field in dataclasses.fields(value)}
  for name, item in fields_of(value, identity=True).items():
    default, factory = own[name].default, own[name].default_factory
    if factory is not dataclasses.MISSING:
      default = factory()
    if default is dataclasses.MISSING or describe(default) != described[name]:
      kept[name] = _without_defaults(item, described[name])
  return kept


def _describe(value: Any, path: str, seen: dict[int, str]) -> Any:
  """The description of `value`; `seen` has the first path of each module, by its id."""
  if is_object(value):
    described: dict[str, Any] = {"class": type(value).__qualname__}
    if isinstance(value, nn.Module) and seen.setdefault(id(value), path) != path:
      described["same_as"] = seen[id(value)]
    hints = annotations(type(value))
    for name, item in fields_of(value, identity=True).items():
      # 1 and 1.0 are one learning rate.
      item = float(item) if hints.get(name) is float and type(item) is int else item
      described[name] = _describe(item, join(path, name), seen)
    return described
  if isinstance(value, Mapping):
    keys = sorted(value, key=str)
    return {str(key): _describe(value[key], join(path, str(key)), seen) for key in keys}
  if isinstance(value, (tuple, list)):
    if len(value) > LONG and all(type(item) is int for item in value):
      digest = hashlib.sha256(repr([*value]).encode()).hexdigest()[:12]
      return f"int[{len(value)}] sha256:{digest}"
    return [_describe(item, join(path, str(at)), seen) for at, item in enumerate(value)]
  if isinstance(value, (set, frozenset)):
    return sorted((_describe(item, path, seen) for item in value), key=str)
  if isinstance(value, enum.Enum):
    return value.name
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else repr(value)
  if is_dtype(value):
    return jnp.dtype(value).name
  if isinstance(value, np.generic):
    return _describe(value.item(), path, seen)
  if isinstance(value, (np.ndarray, jax.Array)):
    array = np.ascontiguousarray(value)
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:12]
    return f"{array.dtype}{list(np.shape(value))} sha256:{digest}"
  if isinstance(value, pathlib.PurePath):
    return str(value)
  if callable(value):
    return _describe_function(value, path)
  raise ValueError(
    f"`{path}` must have a stable description; got {type(value).__qualname__}. Use a frozen"
    " dataclass, a number or a string."
  )


def is_dtype(value: Any) -> bool:
  """Return whether `value` is a number format, such as `jnp.bfloat16`."""
  is_numpy = isinstance(value, type) and issubclass(value, np.generic)
  return is_numpy or isinstance(value, (np.dtype, type(jnp.float32)))


def _describe_function(function: Any, path: str) -> str:
  """The name of a function or class, with the values that it captured."""
  if isinstance(function, functools.partial):
    bound = {str(at): arg for at, arg in enumerate(function.args)} | function.keywords
    return _describe_function(function.func, path) + _arguments(bound, path)
  if inspect.ismethod(function) and not isinstance(function.__self__, type):
    return f"{_one_line(_describe(function.__self__, path, {}))}.{function.__name__}"
  if not _is_importable(function):
    while not isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
      function = function.__wrapped__  # what jax.jit and jax.custom_jvp wrap
    if isinstance(function, types.FunctionType):
      # Of the code, not of the function: functools.wraps overwrites the function's own names.
      qualname = function.__code__.co_qualname
      if qualname.endswith("<lambda>"):
        raise ValueError(f"`{path}` must have a name; got a lambda. Define a function with def.")
      if "<locals>" not in qualname:
        return qualname
      parameters = inspect.signature(function, follow_wrapped=False).parameters.items()
      given = dict(inspect.getclosurevars(function).nonlocals)
      given |= {key: p.default for key, p in parameters if p.default is not p.empty}
      return qualname.replace(".<locals>", "") + _arguments(given, path)
  name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
  if name is None:
    raise ValueError(
      f"`{path}` must have a name; got a callable {type(function).__qualname__}. Use a function or"
      " a frozen dataclass."
    )
  return name


def _is_importable(function: Any) -> bool:
  """Whether a module has this very object under the function's own name."""
  value = sys.modules.get(getattr(function, "__module__", None) or "")
  for part in getattr(function, "__qualname__", "<locals>").split("."):
    value = getattr(value, part, None)
  return value is function


def _arguments(given: Mapping[str, Any], path: str) -> str:
  described = {key: _describe(value, path, {}) for key, value in sorted(given.items())}
  return _one_line({"class": ""} | {k: v for k, v in described.items() if given[k] is not None})


def _one_line(described: Any) -> str:
  """A description in one line: objects as calls."""
  if isinstance(described, dict):
    fields = ", ".join(f"{k}={_one_line(v)}" for k, v in described.items() if k != "class")
    return f"{described.get('class', 'dict')}({fields})"
  if isinstance(described, list):
    return f"[{', '.join(map(_one_line, described))}]"
  return str(described)
