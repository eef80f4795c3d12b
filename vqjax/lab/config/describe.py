"""What exactly does an experiment consist of, as nested JSON that reads the same everywhere?"""

import dataclasses
import enum
import functools
import hashlib
import inspect
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

from vqjax.lab.config.parse import is_dtype
from vqjax.lab.config.tree import annotations, identity_of, is_object, join


def describe(experiment: Any, defaults: bool = True) -> dict[str, Any]:
  """Everything an experiment (or one of its objects) is, as what `json` can write.

  An object is {"class": "CodebookHead", field: ...}. A function is its name
  and, for a closure such as an initialiser, what it captured. A module that hangs in several places
  is described in each, and from the second on names the first as "same_as": tied and untied models
  are different ones.

  Args:
    experiment: a dataclass instance.
    defaults: include fields whose values are their defaults.

  Raises:
    TypeError: a value that has no stable description; the message says where it is.
  """
  described = _describe(experiment, "", {})
  return described if defaults else _without_defaults(experiment, described)


def _without_defaults(value: Any, described: Any) -> Any:
  """The description without the fields whose values are their defaults."""
  if isinstance(value, Mapping):
    return {str(key): _without_defaults(item, described[str(key)]) for key, item in value.items()}
  if isinstance(value, (tuple, list)):
    return [_without_defaults(item, text) for item, text in zip(value, described, strict=True)]
  if not is_object(value):
    return described
  kept = {key: described[key] for key in ("class", "same_as") if key in described}
  own = {field.name: field for field in dataclasses.fields(value)}
  for name, item in identity_of(value).items():
    field = own[name]
    default = (
      field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )
    if default is dataclasses.MISSING or _describe(default, "", {}) != described[name]:
      kept[name] = _without_defaults(item, described[name])
  return kept


def _describe(value: Any, path: str, seen: dict[int, str]) -> Any:
  if is_object(value):
    return _object(value, path, seen)
  if isinstance(value, Mapping):
    keys = sorted(value, key=str)
    return {str(key): _describe(value[key], join(path, str(key)), seen) for key in keys}
  if isinstance(value, (tuple, list)):
    return [_describe(item, join(path, str(at)), seen) for at, item in enumerate(value)]
  if isinstance(value, (set, frozenset)):
    return sorted((_describe(item, path, seen) for item in value), key=str)
  return _leaf(value, path, seen)


def _object(node: Any, path: str, seen: dict[int, str]) -> dict[str, Any]:
  described = {"class": _name(type(node))}
  if isinstance(node, nn.Module):
    first = seen.setdefault(id(node), path)
    described |= {"same_as": first} if first != path else {}
  hints = annotations(type(node))
  for name, value in identity_of(node).items():
    # 1 and 1.0 are one learning rate.
    whole = hints.get(name) is float and type(value) is int
    described[name] = _describe(float(value) if whole else value, join(path, name), seen)
  return described


def _leaf(value: Any, path: str, seen: dict[int, str]) -> Any:
  if isinstance(value, enum.Enum):
    return value.name
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else repr(value)
  if is_dtype(value):
    return jnp.dtype(value).name
  if isinstance(value, np.generic):
    return _leaf(value.item(), path, seen)
  if isinstance(value, (np.ndarray, jax.Array)):
    return _array(np.asarray(value))
  if isinstance(value, pathlib.PurePath):
    return str(value)
  if isinstance(value, type) or callable(value):
    return _callable(value, path, seen)
  raise TypeError(
    f"{path} holds {type(value).__qualname__}, which has no stable description; make it a frozen"
    " dataclass, a number or a string"
  )


def _array(array: np.ndarray) -> str:
  digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
  return f"{array.dtype}{list(array.shape)} sha256:{digest}"


def _name(named: Any) -> str:
  """The qualified name without its module, so that moving code changes no identity."""
  return getattr(named, "__qualname__", None) or named.__name__


def _callable(function: Any, path: str, seen: dict[int, str]) -> str:
  """A function's name, with what it captured and its defaults where it was made by another one."""
  if isinstance(function, functools.partial):
    bound = {str(at): arg for at, arg in enumerate(function.args)} | function.keywords
    return _callable(function.func, path, seen) + _arguments(bound, path, seen)
  if inspect.ismethod(function) and not isinstance(function.__self__, type):
    return f"{_text(_describe(function.__self__, path, {}))}.{function.__name__}"
  if _is_importable(function):
    return _name(function)  # whatever decorates it there
  while not isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
    function = function.__wrapped__  # what jax.jit and jax.custom_jvp wrap
  if isinstance(function, types.FunctionType):
    return _python_function(function, path, seen)
  if hasattr(function, "__qualname__") or hasattr(function, "__name__"):
    return _name(function)
  raise TypeError(
    f"{path} holds a {type(function).__qualname__}, a callable without a name; make it a"
    " function or a frozen dataclass"
  )


def _is_importable(function: Any) -> bool:
  """Whether a module has this very object under the function's own name."""
  found = sys.modules.get(getattr(function, "__module__", None) or "")
  for part in getattr(function, "__qualname__", "<locals>").split("."):
    found = getattr(found, part, None)
  return found is function


def _python_function(function: types.FunctionType, path: str, seen: dict[int, str]) -> str:
  # Of the code, not of the function: functools.wraps overwrites the function's own names.
  qualname = function.__code__.co_qualname
  name = qualname.replace(".<locals>", "")
  if name.endswith("<lambda>"):
    raise TypeError(f"{path} holds a lambda, which has no name; define a function with def")
  if "<locals>" not in qualname:
    return name
  cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
  captured = {key: cell.cell_contents for key, cell in cells}
  defaults = {
    key: parameter.default
    for key, parameter in inspect.signature(function, follow_wrapped=False).parameters.items()
    if parameter.default is not parameter.empty
  }
  return name + _arguments(captured | defaults, path, seen)


def _arguments(given: Mapping[str, Any], path: str, seen: dict[int, str]) -> str:
  kept = {key: value for key, value in given.items() if value is not None}
  return _text({"class": "", **{key: _describe(v, path, {}) for key, v in sorted(kept.items())}})


def _text(described: Any) -> str:
  """A description in one line: objects as calls."""
  if isinstance(described, dict):
    fields = ", ".join(f"{k}={_text(v)}" for k, v in described.items() if k != "class")
    return f"{described.get('class', 'dict')}({fields})"
  if isinstance(described, list):
    return f"[{', '.join(map(_text, described))}]"
  return str(described)
