"""The command prints the documents that the filters drop, and the tokens left."""

import json
import pathlib

import pytest

from vqjax.commands import corpus

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/vq_logits/c4.py")
STORY = "Once upon a time a fox lived by the river, and every day he counted {} stones. "


@pytest.fixture
def folder(tmp_path):
  lines = [STORY.format(n) * 9 for n in range(211)]
  for name, texts in (("train", [*lines, lines[0], "short"]), ("validation", lines[-41:])):
    text = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / f"c4-{name}.00000.json").write_text(text)
  return tmp_path


def test_counts_are_printed(folder, capsys):
  fields = "data.fraction=1", "tokenizer.vocab=303"
  assert corpus.main([CONFIG, f"data.source.path={folder}", *fields]) == 0
  printed = capsys.readouterr().out.splitlines()
  # 41 stories are held out, the first comes twice, and one document is short.
  assert printed[0] == (
    "train: read 213, not sampled 0, short 1, duplicates 42, other language 0, kept 170"
  )
  assert printed[3].startswith("vocabulary 303 ")
  assert printed[4].startswith("train: 170 documents, ")
  assert [line.split(",")[0] for line in printed[5:]] == [
    "valid: 21 documents",
    "test: 20 documents",
  ]


def test_a_separator_of_the_command_is_that_of_the_text(tmp_path, capsys):
  config = str(pathlib.Path(__file__).parents[2] / "configs/lm_dense.py")
  (tmp_path / "a.txt").write_text("\n".join(f"line {n}" for n in range(40)))
  call = config, f"data.path={tmp_path / 'a.txt'}", "tokenizer.vocab=9", "tokenizer.min_count=1"
  assert corpus.main([*call, "--separator", r"\n"]) == 0
  assert "train: 36 documents, " in capsys.readouterr().out
  assert corpus.main([CONFIG, "--separator", "x"]) == 2
  assert "`data.separator` must name a field of Filtered" in capsys.readouterr().err


def test_a_wrong_call_names_the_remedy(folder, capsys):
  arguments = CONFIG, f"data.source.path={folder}", "data.fraction=1"
  assert corpus.main([*arguments]) == 2
  assert "`tokenizer.vocab` must be at most" in capsys.readouterr().err
  assert corpus.main([]) == 2
