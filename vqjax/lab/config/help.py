"""Which fields of an experiment can a command line set, and what does each one mean?"""

import inspect
import re
from typing import Any

from flax import linen as nn
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vqjax.lab.config.describe import describe
from vqjax.lab.config.experiment import Experiment
from vqjax.lab.config.override import settable
from vqjax.lab.config.parse import type_name
from vqjax.lab.config.tree import children, fields_of, is_object, join, walk

_SECTION = re.compile(r"^(Attributes|Args|Arguments|Parameters|Fields):$")
_ENTRY = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*)$")


def help_text(experiment: Experiment) -> Group:
  """Every field that can be set as `path  type = value  meaning`, grouped by object, for `rich`.

  Meanings come from the "Attributes:" or "Args:" section of the classes' docstrings.
  """
  groups, first = [], {}
  for path, node in walk(experiment):
    if isinstance(node, nn.Module) and id(node) in first:
      groups.append(_heading(path, f"the same object as {first[id(node)]}"))
      continue
    first[id(node)] = path
    says = ": ".join(filter(None, (type(node).__name__, _summary(type(node)))))
    groups += [_heading(path, says), _fields(path, node)]
  return Group(*groups)


def _heading(path: str, says: str) -> Text:
  return Text.assemble((path or "experiment", "bold"), "  ", says)


def _fields(path: str, node: Any) -> Padding:
  table = Table.grid(padding=(0, 2))
  table.add_column(no_wrap=True, style="cyan")
  table.add_column(overflow="fold")
  table.add_column()
  meanings = field_docs(type(node))
  for name, kinds in settable(node).items():
    shown = _shown(children(node)[name])
    told = f"{type_name(kinds)} = {shown}"
    table.add_row(Text(join(path, name)), Text(told), Text(meanings.get(name, "")))
  return Padding(table, (0, 0, 1, 2))


def _shown(value: Any) -> Any:
  if is_object(value):
    return f"({', '.join(f'{name}={part}' for name, part in fields_of(value).items())})"
  described = describe(value)
  return "(empty)" if described == "" else described


def _summary(cls: type) -> str:
  """The first sentence of the docstring; nothing where `dataclass` wrote its own signature."""
  doc = cls.__dict__.get("__doc__") or ""
  if doc.startswith(f"{cls.__name__}("):
    return ""
  return " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())


def field_docs(cls: type) -> dict[str, str]:
  """One line of meaning for each field that the docstrings of a class and its bases document."""
  docs: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    docs |= _section(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
  return docs


def _section(doc: str) -> dict[str, str]:
  """The entries of the first "Attributes:" or "Args:" section, each joined to one line."""
  entries: dict[str, str] = {}
  inside, name, indent = False, "", 0
  for line in doc.splitlines():
    stripped, depth = line.strip(), len(line) - len(line.lstrip())
    if not inside:
      inside = bool(_SECTION.match(stripped))
    elif stripped and depth == 0:
      break
    elif (entry := _ENTRY.match(stripped)) and (not entries or depth <= indent):
      name, indent = entry[1], depth
      entries[name] = entry[2]
    elif stripped and name:
      entries[name] = f"{entries[name]} {stripped}".strip()
  return entries
