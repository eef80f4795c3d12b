"""The command takes options in any order, and refuses a wrong call."""

import pathlib

import pytest

from vqjax.commands import cluster

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/lm_dense.py")


@pytest.fixture
def corpus(tmp_path):
  """A folder of text, a file for each split."""
  folder = tmp_path / "text"
  folder.mkdir()
  for split, words in (("train", 2000), ("valid", 200), ("test", 200)):
    (folder / f"{split}.txt").write_text(" ".join(f"w{n * n % 61}" for n in range(words)))
  return folder


def test_fields_may_follow_the_options_and_a_folder_without_a_run_is_named(
  corpus, tmp_path, capsys
):
  missing, out = tmp_path / "none", tmp_path / "out"
  fields = f"data.path={corpus}", "tokenizer.min_count=2", "model.layers=1", "train.batch=8"
  assert cluster.main([CONFIG, str(missing), "--codes", "13", "--out", str(out), *fields]) == 2
  assert f"got {missing}" in capsys.readouterr().err


def test_more_codes_than_tokens_are_refused_before_a_folder_is_made(corpus, tmp_path, capsys):
  out = tmp_path / "out"
  options = "--codes", "9999", "--out", str(out)
  assert cluster.main([CONFIG, str(tmp_path), *options, f"data.path={corpus}"]) == 2
  error = capsys.readouterr().err
  assert "codes" in error
  assert "9999" in error
  assert not out.exists()
