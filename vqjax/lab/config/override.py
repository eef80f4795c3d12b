"""Overrides of an experiment, such as `train.steps=1000`, parsed by annotation."""

import dataclasses
import difflib
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vqjax.lab.config.experiment import Experiment
from vqjax.lab.config.experiment_tree import (
  annotations,
  children,
  is_node,
  is_object,
  join,
  rebuild,
  walk,
)
from vqjax.lab.config.identity import is_dtype

__all__ = ["override", "with_fields"]

NoneType = types.NoneType


class _NumberFormat:
  """The type of a field that holds a number format."""


EXPECTED = {
  NoneType: "Write None.",
  bool: "Write true or false.",
  int: "Write digits, such as 1000 or 1_000.",
  float: "Write a number, such as 0.1 or 1e-3.",
  _NumberFormat: "Write its full name, such as float32 or bfloat16.",
  pathlib.Path: "Write a path.",
  str: "Write a text.",
}
"""Types of plain values, narrow ones first (a str takes every text): how to write them."""

WORDS = {NoneType: {"none": None}, bool: {"true": True, "false": False}}


def override(experiment: Experiment, assignments: Sequence[str]) -> Experiment:
  """Return the experiment with fields set from `path=value` texts, all at once.

  Types come from the fields' annotations. An object that several fields share, such as a tied
  embedding, is changed in all of them and stays one object. The parts of an object whose `dim` is
  set get the same `dim` if they had that of the object and are not set themselves, so that
  `model.dim=64` is the width of a whole model.

  Raises:
    ValueError: an assignment has no '=', an unknown field or a text of the wrong type; a field
      holds an object or a function, or is set to two values. The message names the remedy.
  """
  fields: list[tuple[str, Any]] = []
  for assignment in assignments:
    path, equals, text = assignment.partition("=")
    if not equals:
      raise ValueError(f"an override must be PATH=VALUE; got {assignment!r}. Add =VALUE.")
    owner, name = _owner(experiment, path)
    fields.append((path, _value(owner, name, path, text)))
  return _replaced(experiment, fields)


def with_fields(experiment: Experiment, fields: Mapping[str, Any]) -> Experiment:
  """Return the experiment with fields set to values, by their dotted paths, all at once.

  What several fields share, and the `dim` of an object's parts, change as in `override`.

  Raises:
    ValueError: there is no such field, or it cannot have this value.
  """
  return _replaced(experiment, list(fields.items()))


def _replaced(experiment: Experiment, fields: Sequence[tuple[str, Any]]) -> Experiment:
  """The experiment with fields set, by their paths."""
  changes: dict[int, dict[str, Any]] = {}
  for path, value in fields:
    owner, name = _owner(experiment, path)
    of_owner = changes.setdefault(id(owner), {})
    if name in of_owner and of_owner[name] != value:
      raise ValueError(
        f"`{path}` must be set to one value; got {of_owner[name]!r} and {value!r}. Keep one of"
        " them."
      )
    of_owner[name] = value
  for path, node in walk(experiment):
    for name in changes.get(id(node), {}):
      if any(id(part) in changes for _, part in walk(children(node)[name])):
        raise ValueError(
          f"`{join(path, name)}` must be set as a whole or by its fields; got both. Keep one way."
        )
  return rebuild(experiment, _with_shared_dim(experiment, changes))


def _with_shared_dim(
  experiment: Experiment, changes: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
  """The changes, and those of the parts that share a `dim` which is set."""
  shared: dict[int, dict[str, Any]] = {}
  for _, owner in walk(experiment):
    if "dim" in changes.get(id(owner), {}):
      old = children(owner)["dim"]
      same = (part for _, part in walk(owner) if children(part).get("dim") == old)
      shared |= {id(part): {"dim": changes[id(owner)]["dim"]} for part in same}
  return {key: shared.get(key, {}) | changes.get(key, {}) for key in shared | changes}


def _owner(experiment: Experiment, path: str) -> tuple[Any, str]:
  """The object that owns the field which a path names, and the field's name."""
  owner, at, node, name = None, "", experiment, ""
  for name in path.split("."):
    elsewhere = [join(p, name) for p, other in walk(experiment) if name in children(other)][:1]
    if not is_node(node):
      hint = f"Did you mean {elsewhere[0]}?" if elsewhere else f"Set {at}=."
      raise ValueError(f"`{at}` must be an object to have fields; got {_short(node)}. {hint}")
    names = list(children(node))
    if name not in names:
      near = [join(at, match) for match in difflib.get_close_matches(name, names, 1)]
      hints = " or ".join(dict.fromkeys(near + elsewhere))
      raise ValueError(
        f"`{join(at, name)}` must name a field of {type(node).__name__}; got {name}, and the fields"
        f" are {', '.join(names)}." + (f" Did you mean {hints}?" if hints else "")
      )
    owner, at, node = node, join(at, name), children(node)[name]
  return owner, name


def _value(owner: Any, name: str, path: str, text: str) -> Any:
  """The value that `text` means for the field `name` of `owner`."""
  held = children(owner)[name]
  if kinds := settable(owner).get(name):
    return _parse_value(text, kinds, path)
  constructible = is_object(held) and _has_defaults(held)
  if constructible and text.startswith("(") and text.endswith(")"):
    # "(field=value, ...)": an object of that class; a field that is left out has its default.
    return override(type(held)(), [part.strip() for part in text[1:-1].split(",") if part.strip()])
  below = [join(p, field) for p, node in walk(held, path) for field in settable(node)]
  remedy = f"Set one of its fields: {', '.join(below)}." if below else "Edit the config."
  if constructible:
    remedy += f" Or write ({', '.join(f'{field}=...' for field in children(held))})."
  raise ValueError(f"`{path}` must hold a plain value to be set; got {_short(held)}. {remedy}")


def _has_defaults(node: Any) -> bool:
  """Whether an object's class can be constructed without arguments."""
  own = (f for f in dataclasses.fields(node) if f.init)
  return all(f.default is not f.default_factory for f in own)  # both are MISSING for a required one


def _short(value: Any) -> str:
  if is_node(value):
    return f"a {type(value).__name__}"
  name = getattr(value, "__qualname__", None)
  return f"the callable {name}" if name else f"the {type(value).__name__} {value!r}"


def settable(node: Any) -> dict[str, tuple[Any, ...]]:
  """Return the fields of an object that a command line can set, with their types.

  Types come narrow ones first. A field annotated `Any` takes the type of its present value.
  """
  if not is_object(node):
    return {}
  hints, fields = annotations(type(node)), {}
  for name, value in children(node).items():
    hint = hints.get(name, Any)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    union = typing.get_args(hint) if is_union else (hint,)
    # By name too: annotations of number formats are aliases of Any more often than not.
    unset = value is None and (name == "dtype" or name.endswith("_dtype"))
    if is_dtype(value) or np.dtype in union or (unset and not {*union} <= {str, NoneType}):
      fields[name] = (
        (NoneType, _NumberFormat) if NoneType in union or value is None else (_NumberFormat,)
      )
      continue
    if Any in union and isinstance(value, (bool, int, float, str)):
      union = (*union, type(value))
    kinds = [
      kind
      for kind in union
      if kind in EXPECTED
      or typing.get_origin(kind) is typing.Literal
      or (typing.get_origin(kind) is tuple and {*typing.get_args(kind)} <= {*EXPECTED, ...})
    ]
    if {*kinds} - {NoneType}:  # None by itself would only take an object away
      order = list(EXPECTED)
      fields[name] = tuple(
        sorted(kinds, key=lambda k: order.index(k if k in EXPECTED else _NumberFormat))
      )
  return fields


def type_name(kinds: tuple[Any, ...]) -> str:
  """Return the types of a field for a reader, such as `int | None` or `dtype`."""
  special = {_NumberFormat: "dtype", NoneType: "None"}
  ordered = sorted(kinds, key=lambda kind: kind is NoneType)
  names = [special.get(k, k.__name__ if isinstance(k, type) else str(k)) for k in ordered]
  return " | ".join(names).replace("typing.", "")


def _parse_value(text: str, kinds: tuple[Any, ...], path: str) -> Any:
  """Return the value that `text` means for a field of these types.

  Raises:
    ValueError: no type takes the text; the message says how to write one.
  """
  remedies = []
  # A field that takes a text or several gets one text as it is: "model", and "fsdp,model" as two.
  is_one = str in kinds and not {*",()"} & {*text}
  for kind in (k for k in kinds if not (is_one and typing.get_origin(k) is tuple)):
    try:
      return _parse_one(text, kind)
    except ValueError as error:
      remedies += [str(error)] if kind is not NoneType else []
  raise ValueError(f"`{path}` must be {type_name(kinds)}; got {text!r}. {' Or: '.join(remedies)}")


def _parse_one(text: str, kind: Any) -> Any:
  """The value of one type; the message of the ValueError says how to write it."""
  bare, arguments = text.strip(), typing.get_args(kind)
  if typing.get_origin(kind) is typing.Literal:
    if text not in map(str, arguments):
      raise ValueError(f"Write one of {', '.join(map(str, arguments))}.")
    return next(choice for choice in arguments if str(choice) == text)
  if typing.get_origin(kind) is tuple:
    bare = bare.removeprefix("(").removesuffix(")").strip().removesuffix(",")
    items = [item.strip() for item in bare.split(",")] if bare else []
    if arguments[-1:] == (Ellipsis,):
      arguments = arguments[:1] * len(items)
    if len(items) != len(arguments):
      raise ValueError(f"Write {len(arguments)} values separated by commas.")
    return tuple(_parse_one(item, kind) for item, kind in zip(items, arguments))
  try:
    if kind in WORDS:
      return WORDS[kind][text.lower()]
    if kind is not _NumberFormat:
      return kind(text)
    if jnp.dtype(text).name == text:  # numpy reads "float" too, as float64
      return getattr(jnp, text, jnp.dtype(text))
    raise ValueError
  except (KeyError, TypeError, ValueError):
    if kind is int and re.fullmatch(r"\d+(\.\d*)?(e\d+)?", bare):
      raise ValueError(f"That is a float: write {float(bare):.0f}.") from None
    raise ValueError(EXPECTED[kind]) from None
