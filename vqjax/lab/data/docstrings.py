"""Which text is on every machine that runs Python?

The docstrings of its standard library: English prose about programs, some 350,000 words.
"""

import ast
import functools
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo"}
"""Folders of the standard library's path that hold other people's packages, tests or programs."""


def stdlib_modules() -> list[Path]:
  """The standard library's modules in Python source, sorted by their path inside it.

  Raises:
    FileNotFoundError: this Python carries its library in another form (a zip file).
  """
  root = Path(sysconfig.get_paths()["stdlib"])
  inside = (path.relative_to(root) for path in root.rglob("*.py"))
  kept = sorted((p for p in inside if not EXCLUDED & set(p.parts)), key=lambda p: p.as_posix())
  if not kept:
    raise FileNotFoundError(
      f"{root} holds no Python source to read docstrings from; give Text(path=...) a file or a "
      "folder"
    )
  return [root / path for path in kept]


@functools.lru_cache(maxsize=1)
def stdlib_documents() -> tuple[str, ...]:
  """One document for each module that has docstrings: they in source order, dedented."""
  documents = ("\n\n".join(docstrings(path.read_bytes())) for path in stdlib_modules())
  return tuple(document for document in documents if document)


def docstrings(module: bytes) -> Iterator[str]:
  """The docstrings of a module's source and of all classes and functions in it, in source order.

  The source is parsed, never imported. A module that does not parse (some are examples of errors)
  has none.
  """
  try:
    tree = ast.parse(module)
  except (SyntaxError, ValueError):
    return
  owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
  for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
    if text:
      # A lone surrogate is legal in Python source and has no UTF-8 form.
      yield text.encode("utf-8", "replace").decode("utf-8")
