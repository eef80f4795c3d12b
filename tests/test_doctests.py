"""The examples in docstrings run as they stand."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in sorted((ROOT / "vqjax").rglob("*.py"))
  if ">>> " in path.read_text("utf-8")
]


def test_docstrings_have_examples():
  assert MODULES


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name):
  module = importlib.import_module(name.removesuffix(".__init__"))
  result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
  assert result.attempted
  assert not result.failed
