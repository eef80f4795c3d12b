"""A new project is whole: its config and its study load, and its test passes."""

import runpy

import pytest

from vqjax.commands.new import main
from vqjax.lab.config import load_config
from vqjax.lab.study import load_study


@pytest.mark.slow
def test_a_new_project_loads_and_its_test_passes(tmp_path, monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(tmp_path / "mine"))
  folder = tmp_path / "mine"
  assert main([str(folder)]) == 0
  assert f"vqjax train {folder}/config.py" in capsys.readouterr().out
  assert load_config(folder / "config.py").name == "mine"
  assert [*load_study(folder / "study.py").rows] == ["dense", "codebook", "mine"]
  tests = runpy.run_path(str(folder / "test_head.py"))
  tests["test_probabilities_sum_to_one_and_are_those_of_log_prob"]()
  assert main([str(folder)]) == 2
  assert "must be a new folder" in capsys.readouterr().err


def test_a_name_that_no_python_file_could_have_is_refused(tmp_path, capsys):
  assert main([str(tmp_path / 'a"b')]) == 2
  assert "`name` must be of letters, digits" in capsys.readouterr().err
  assert not [*tmp_path.iterdir()]
