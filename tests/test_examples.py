"""The examples and the README's snippets run as they stand."""

import pathlib
import re
import runpy
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs_and_prints(path, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", [str(path)])
  runpy.run_path(str(path), run_name="__main__")
  assert capsys.readouterr().out


@pytest.mark.slow
def test_the_readme_has_a_snippet_that_runs(capsys):
  assert SNIPPETS
  for number, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"README.md, snippet {number}", "exec"), {"__name__": "readme"})
  assert capsys.readouterr().out
