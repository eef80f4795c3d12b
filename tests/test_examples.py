"""The examples, the README's snippets and those in docstrings run as they stand."""

import doctest
import importlib
import pathlib
import re
import runpy
import sys
import tempfile

import jax
import numpy as np
import pytest

from vqjax.lab.config import with_fields
from vqjax.lab.training import fit

ROOT = pathlib.Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
MODULES = [
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in sorted((ROOT / "vqjax").rglob("*.py"))
  if ">>> " in path.read_text("utf-8")
]
FAST = ("own_mesh", "study")


@pytest.mark.parametrize(
  "path",
  [
    pytest.param(path, marks=[] if path.stem in FAST else pytest.mark.slow, id=path.stem)
    for path in sorted((ROOT / "examples").glob("*.py"))
  ],
)
def test_an_example_runs_and_prints(path, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", [str(path)])
  # A program that fails exits with a code.
  monkeypatch.setattr(sys, "exit", lambda code: pytest.fail(f"exit {code}") if code else None)
  runpy.run_path(str(path), run_name="__main__")
  assert capsys.readouterr().out


@pytest.mark.slow
def test_the_study_of_text_trains(tmp_path):
  study = runpy.run_path(str(ROOT / "examples" / "study.py"))["study"]()
  short = {"train.steps": 2, "train.warmup": 1, "train.eval_every": 2, "train.save_every": 2}
  text = {"data.path": str(ROOT / "README.md")}
  result = fit(with_fields(study.base, short | text), tmp_path, test=False)
  assert result["status"] == "finished"


@pytest.mark.slow
def test_the_readme_has_a_snippet_that_runs(capsys):
  assert SNIPPETS
  for number, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"README.md, snippet {number}", "exec"), {"__name__": "readme"})
  assert capsys.readouterr().out


@pytest.mark.slow
def test_checkpoints_of_one_device_are_restored_on_eight(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  page = (ROOT / "docs" / "resuming.md").read_text("utf-8")
  cells = re.findall(r"```\{code-cell\} ipython3\n(.*?)```", page, re.DOTALL)
  code = "\n".join(cells).replace('jax.config.update("jax_num_cpu_devices", 8)', "")
  exec(compile(code, "docs/resuming.md", "exec"), page := {"__name__": "page"})
  assert page["VOCAB"] % 8
  saved, restored = page["state"], page["resumed"]
  for old, new in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
    np.testing.assert_array_equal(old, new)
    assert len(old.sharding.device_set) == 1
    assert len(new.sharding.device_set) == 8
  of_adam = restored["optimizer"][0]
  model, codebook = page["model"], page["model"].codebook[...]
  np.testing.assert_array_equal(model.assignment[...], page["both"][0].assignment[...])
  for table in (restored["variables"]["params"]["codebook"], of_adam.mu["codebook"], codebook):
    assert table.sharding.shard_shape(table.shape) == (50, 2)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", MODULES or pytest.fail("no docstring has an example"))
def test_the_examples_of_a_module_print_what_they_say(name):
  module = importlib.import_module(name.removesuffix(".__init__"))
  result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
  assert result.attempted
  assert not result.failed
