"""The help text of an experiment: its settable fields and their meanings."""

from typing import Any

import docstring_parser
from flax import linen as nn
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vqjax.lab.config.experiment import Experiment
from vqjax.lab.config.experiment_tree import children, join, walk
from vqjax.lab.config.identity import describe
from vqjax.lab.config.override import settable, type_name

__all__ = ["help_text"]


def help_text(experiment: Experiment) -> Group:
  """Return every settable field as `path  type = value  meaning`, for `rich`.

  Meanings come from the "Attributes:" or "Args:" sections of the classes' docstrings.
  """
  groups: list[Any] = []
  first: dict[int, str] = {}
  for path, node in walk(experiment):
    heading = Text.assemble((path or "experiment", "bold"), "  ")
    if isinstance(node, nn.Module) and id(node) in first:
      groups.append(heading.append(f"the same object as {first[id(node)]}"))
      continue
    first[id(node)] = path
    summary, meanings = _documentation(type(node))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    table.add_column()
    for name, kinds in settable(node).items():
      value = describe(children(node)[name])
      typed = f"{type_name(kinds)} = {'(empty)' if value == '' else value}"
      table.add_row(Text(join(path, name)), Text(typed), Text(meanings.get(name, "")))
    groups += [heading.append(summary), Padding(table, (0, 0, 1, 2))]
  return Group(*groups)


def _documentation(cls: type) -> tuple[str, dict[str, str]]:
  """The class's name and summary, and the meanings of its fields and its bases'."""
  summary, meanings = cls.__name__, {}
  for base in reversed(cls.__mro__):
    text = base.__dict__.get("__doc__") or ""
    if text.startswith(f"{base.__name__}("):  # the signature that `dataclass` writes
      continue
    parsed = docstring_parser.parse(text, docstring_parser.DocstringStyle.GOOGLE)
    meanings |= {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}
    if base is cls and parsed.short_description:
      summary = f"{cls.__name__}: {parsed.short_description}"
  return summary, meanings
