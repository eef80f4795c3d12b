"""Which experiment does `model.head.codes=512 train.steps=1000` turn an experiment into?"""

import difflib
from collections.abc import Sequence
from typing import Any

from vqjax.lab.config.experiment import Experiment
from vqjax.lab.config.parse import options, parse
from vqjax.lab.config.tree import annotations, children, is_node, is_object, join, rebuild, walk


def override(experiment: Experiment, assignments: Sequence[str]) -> Experiment:
  """The experiment with fields set from `path=value` texts, all of them at once.

  Types come from the fields' annotations. An object that hangs in several places, such as a tied
  embedding, is changed in all of them and stays one object.

  Raises:
    ValueError: an assignment without '=', an unknown field, a text of the wrong type, a field that
      holds an object or a function, or one field set to two values; the message names the remedy.
  """
  changes: dict[int, dict[str, Any]] = {}
  for assignment in assignments:
    path, equals, text = assignment.partition("=")
    if not equals:
      raise ValueError(f"override {assignment!r} has no '='; write {assignment}=VALUE")
    owner, name = _find(experiment, path)
    value = _value(owner, name, path, text)
    fields = changes.setdefault(id(owner), {})
    if name in fields and fields[name] != value:
      raise ValueError(f"{path} is set to {fields[name]!r} and to {value!r}; keep one of the two")
    fields[name] = value
  _check_not_replaced(experiment, changes)
  return rebuild(experiment, changes)


def _check_not_replaced(experiment: Experiment, changes: dict[int, dict[str, Any]]):
  """Refuses to set a field of an object that another assignment replaces."""
  for path, node in walk(experiment):
    for name in changes.get(id(node), {}):
      if any(id(part) in changes for _, part in walk(children(node)[name])):
        raise ValueError(
          f"{join(path, name)} is set, and so are fields of it; keep one of the two ways"
        )


def settable(node: Any) -> dict[str, tuple[Any, ...]]:
  """The fields of an object that a command line can set, each with the types it takes."""
  if not is_object(node):
    return {}
  hints = annotations(type(node))
  kinds = {name: options(hints.get(name, Any), name, v) for name, v in children(node).items()}
  return {name: kind for name, kind in kinds.items() if kind}


def _find(experiment: Experiment, path: str) -> tuple[Any, str]:
  """The object that owns the field a path names, and the field's name."""
  node, at = experiment, ""
  *above, name = path.split(".")
  for part in above:
    _check_known(experiment, node, at, part)
    node, at = children(node)[part], join(at, part)
    if not is_node(node):
      raise ValueError(f"{path}: {at} is {_short(node)}, which has no fields; set {at}= itself")
  _check_known(experiment, node, at, name)
  return node, name


def _check_known(experiment: Experiment, node: Any, at: str, name: str):
  known = list(children(node))
  if name in known:
    return
  near = [join(at, match) for match in difflib.get_close_matches(name, known, 1)]
  elsewhere = [join(p, name) for p, n in walk(experiment) if name in children(n)]
  hints = list(dict.fromkeys([*near, *elsewhere[:1]]))
  hint = f"did you mean {' or '.join(hints)}? " if hints else ""
  where = f"{at} ({type(node).__name__})" if at else type(node).__name__
  raise ValueError(f"unknown field {join(at, name)}; {hint}fields of {where}: {', '.join(known)}")


def _value(owner: Any, name: str, path: str, text: str) -> Any:
  kinds = settable(owner).get(name)
  if kinds is None:
    raise ValueError(_not_settable(children(owner)[name], path))
  try:
    return parse(text, kinds)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def _not_settable(value: Any, path: str) -> str:
  below = [join(p, name) for p, node in walk(value, path) for name in settable(node)]
  remedy = f"set one of its fields: {', '.join(below)}" if below else "edit the config"
  return f"{path} holds {_short(value)}, which no text can replace; {remedy}"


def _short(value: Any) -> str:
  if is_node(value):
    return f"a {type(value).__name__}"
  name = getattr(value, "__qualname__", None)
  return f"the callable {name}" if name else f"the {type(value).__name__} {value!r}"
