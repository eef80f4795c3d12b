"""What every command that reads a model says of the arguments that name it."""

import argparse

import pytest

from vqjax.commands import models


def parsed(*arguments):
  parser = argparse.ArgumentParser()
  models.add_arguments(parser)
  return parser.parse_args(["model", *arguments])


def test_tables_of_memories_go_to_the_blocks_that_they_name(tmp_path, monkeypatch):
  given = {}
  monkeypatch.setenv("VQJAX_DATA", str(tmp_path))
  (tmp_path / "model").mkdir()
  loaded = models.Loaded(None, None, object())
  monkeypatch.setattr(
    models.checkpoints, "load", lambda _, **fields: given.update(fields) or loaded
  )
  tables = "--memory-table", "1=a.safetensors", "--memory-table", "12=b=c.safetensors"
  assert models.chosen_model(parsed(*tables)) == loaded
  assert given["memory_tables"] == {1: "a.safetensors", 12: "b=c.safetensors"}


@pytest.mark.parametrize("wrong", ["1", "a=b", "1=", "=t"])
def test_a_table_without_its_block_is_a_wrong_call(wrong, capsys):
  with pytest.raises(SystemExit):
    parsed("--memory-table", wrong)
  assert "it must be BLOCK=FILE; got" in capsys.readouterr().err


def test_a_run_has_the_memories_that_it_was_trained_with(tmp_path):
  (tmp_path / "checkpoints").mkdir()
  options = parsed("--memory-table", "1=t")
  options.model = str(tmp_path)
  with pytest.raises(ValueError, match=r"`--memory-table` must be given for a pretrained model"):
    models.chosen_model(options)
