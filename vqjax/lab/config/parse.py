"""Which values does a field take from a command line, and which value does a text mean?"""

import dataclasses
import pathlib
import types
import typing
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from vqjax.lab.config.tree import annotations

NoneType = type(None)


class Dtype:
  """Stands for a field that holds a number format, whatever its annotation calls it."""


def options(annotation: Any, name: str, value: Any) -> tuple[Any, ...]:
  """The types that a text for this field may be parsed to; empty for an object or a callable.

  A field annotated `Any` takes the type of its present value.
  """
  union = _members(annotation)
  if _holds_dtype(union, name, value):
    return (Dtype, NoneType) if NoneType in union or value is None else (Dtype,)
  if Any in union and isinstance(value, (bool, int, float, str)):
    union = (*union, type(value))
  known = [kind for kind in union if kind in _PARSERS or _is_compound(kind)]
  # `None` alone would only take an object away.
  return tuple(sorted(known, key=_rank)) if set(known) - {NoneType} else ()


def _members(annotation: Any) -> tuple[Any, ...]:
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return tuple(m for part in typing.get_args(annotation) for m in _members(part))
  return (annotation,)


def _holds_dtype(union: tuple[Any, ...], name: str, value: Any) -> bool:
  if set(union) <= {str, NoneType}:
    return False
  # By name too: annotations of formats are aliases of Any more often than not. Flax also names a
  # function promote_dtype.
  named = (name == "dtype" or name.endswith("_dtype")) and (value is None or is_dtype(value))
  return named or np.dtype in union or (Any in union and is_dtype(value))


def is_dtype(value: Any) -> bool:
  """Whether `value` is a number format: `jnp.bfloat16`, `np.float32` or a `np.dtype`."""
  is_numpy = isinstance(value, type) and issubclass(value, np.generic)
  return is_numpy or isinstance(value, (np.dtype, type(jnp.float32)))


def _is_compound(kind: Any) -> bool:
  if typing.get_origin(kind) is tuple:
    return all(item in _PARSERS for item in typing.get_args(kind) if item is not Ellipsis)
  return typing.get_origin(kind) is typing.Literal or is_record(kind)


def is_record(kind: Any) -> bool:
  """Whether `kind` is a dataclass of plain values: it is written "(field=value, ...)"."""
  if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
    return False
  fields = _record_fields(kind)
  return all(members and set(members) <= set(_PARSERS) for members in fields.values())


def _record_fields(kind: type) -> dict[str, tuple[Any, ...]]:
  """The types of each field, narrowest first; of those that a constructor takes."""
  hints = annotations(kind)
  names = [field.name for field in dataclasses.fields(kind) if field.init]
  return {name: tuple(sorted(_members(hints[name]), key=_rank)) for name in names}


def _rank(kind: Any) -> int:
  """Narrow types first: a str takes every text, a float takes every int."""
  order = [NoneType, bool, int, float]
  last = {pathlib.Path: len(order) + 1, str: len(order) + 2}
  return order.index(kind) if kind in order else last.get(kind, len(order))


def type_name(kinds: tuple[Any, ...]) -> str:
  """How messages and help call a field's types: `int | None`, `tuple[int, ...]`, `dtype`."""
  special = {Dtype: "dtype", NoneType: "None"}
  names = [special.get(k, k.__name__ if isinstance(k, type) else str(k)) for k in _by_reader(kinds)]
  return " | ".join(name.replace("typing.", "") for name in names)


def _by_reader(kinds: tuple[Any, ...]) -> list[Any]:
  return sorted(kinds, key=lambda kind: kind is NoneType)


def parse(text: str, kinds: tuple[Any, ...]) -> Any:
  """The value that `text` means for a field of these types, narrowest type first.

  Raises:
    ValueError: no type takes the text; the message says what is expected.
  """
  hints = []
  for kind in kinds:
    try:
      return _parse_one(text, kind)
    except ValueError as error:
      hints += [str(error)] if kind is not NoneType else []
  raise ValueError(f"{text!r} is not {type_name(kinds)}; {'; or '.join(hints)}")


def _parse_one(text: str, kind: Any) -> Any:
  if typing.get_origin(kind) is typing.Literal:
    return _literal(text, typing.get_args(kind))
  if typing.get_origin(kind) is tuple:
    return _tuple(text, typing.get_args(kind))
  if is_record(kind):
    return _record(text, kind)
  return _PARSERS[kind](text)


def _int(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    pass
  try:
    whole = int(float(text))
  except (ValueError, OverflowError):
    raise ValueError("write digits, such as 1000 or 1_000") from None
  raise ValueError(f"that is a float; write {whole}")


def _float(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise ValueError("write a number, such as 0.1 or 1e-3") from None


def _bool(text: str) -> bool:
  if text.lower() not in ("true", "false"):
    raise ValueError("write true or false")
  return text.lower() == "true"


def _none(text: str) -> None:
  if text.lower() != "none":
    raise ValueError("write None")


def _dtype(text: str) -> Any:
  try:
    known = jnp.dtype(text).name == text
  except TypeError:
    known = False
  if not known:
    raise ValueError("write its full name, such as float32 or bfloat16")
  return getattr(jnp, text, jnp.dtype(text))


def _literal(text: str, choices: tuple[Any, ...]) -> Any:
  for choice in choices:
    if str(choice) == text:
      return choice
  raise ValueError(f"write one of {', '.join(map(str, choices))}")


def _tuple(text: str, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
  bare = text.strip().removeprefix("(").removesuffix(")").strip().removesuffix(",")
  items = [item.strip() for item in bare.split(",")] if bare else []
  if kinds[-1:] == (Ellipsis,):
    kinds = kinds[:1] * len(items)
  if len(items) != len(kinds):
    raise ValueError(f"write {len(kinds)} values separated by commas")
  return tuple(_parse_one(item, kind) for item, kind in zip(items, kinds, strict=True))


def _record(text: str, kind: type) -> Any:
  """The dataclass from "(field=value, ...)"; a field that is left out has its default."""
  known = _record_fields(kind)
  bare = text.strip()
  if not (bare.startswith("(") and bare.endswith(")")):
    raise ValueError(f"write ({', '.join(f'{name}=...' for name in known)})")
  given: dict[str, Any] = {}
  for item in filter(None, (part.strip() for part in bare[1:-1].split(","))):
    name, equals, value = (part.strip() for part in item.partition("="))
    if name not in known or not equals or name in given:
      raise ValueError(f"{item!r}: write each of {', '.join(known)} at most once, as name=value")
    given[name] = parse(value, known[name])
  needed = [f.name for f in dataclasses.fields(kind) if f.name in known and _has_no_default(f)]
  if missing := [name for name in needed if name not in given]:
    raise ValueError(f"{', '.join(missing)} must be given too")
  return kind(**given)


def _has_no_default(field: dataclasses.Field) -> bool:
  return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


_PARSERS: dict[Any, Callable[[str], Any]] = {
  int: _int,
  float: _float,
  bool: _bool,
  str: str,
  NoneType: _none,
  Dtype: _dtype,
  pathlib.Path: pathlib.Path,
}
