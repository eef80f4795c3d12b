"""What an installed vqjax imports, and what it leaves alone."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import setuptools

from vqjax import convert


@pytest.mark.slow
@pytest.mark.parametrize(
  ("module", "absent"),
  [
    ("vqjax.ops.softmax", ("flax", "optax", "scipy.sparse")),
    ("vqjax", ("jax",)),
    ("vqjax.heads, vqjax.embeddings, vqjax.quantizers, vqjax.lm.models", ("vqjax.lab", "sklearn")),
    ("vqjax.convert", ("vqjax.lab", "sklearn", "matplotlib", "grain", "tensorflow_datasets")),
  ],
)
def test_an_import_loads_no_package_that_it_does_not_need(module, absent):
  code = f"import sys, {module}; print(*sys.modules)"
  loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert not set(absent) & set(loaded.stdout.split())


def test_subpackages_and_names_are_imported_at_first_use():
  code = "import vqjax; print(vqjax.convert.to_head.__name__, vqjax.GroupedHead.__name__)"
  shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert shown.stdout.split() == ["to_head", "GroupedHead"]


def test_a_star_takes_the_layers_and_functions_and_no_packages():
  code = "from vqjax import *; print(CodebookHead.__name__, compress.__name__, 'nnx' in dir())"
  shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert shown.stdout.split() == ["CodebookHead", "compress", "False"]


def test_every_conversion_is_described():
  page = pathlib.Path(__file__).parents[1] / "docs" / "api" / "convert.md"
  described = re.findall(r"vqjax\.convert\.(\w+)", page.read_text("utf-8"))
  assert set(convert.__all__) <= set(described)


def test_the_wheel_has_every_folder_of_the_package():
  root = pathlib.Path(__file__).parents[1]
  settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
  found = setuptools.find_packages(str(root), include=settings["packages"]["find"]["include"])
  there = {file.parent.relative_to(root) for file in (root / "vqjax").rglob("*.py")}
  assert {pathlib.Path(*name.split(".")) for name in found} == there
