"""Do the README's snippets run as they stand?"""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_snippets_for_linen_for_nnx_for_the_op_and_for_embeddings():
  assert len(SNIPPETS) == 4
  assert "from flax import linen" in SNIPPETS[0]
  assert "bridge.ToNNX" in SNIPPETS[1]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = {"__name__": f"readme_{number}"}
  exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), names)
  assert names["value"] > 0
