"""`vqjax inspect MODEL --vocabulary` prints what the tables look like, in three forms."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.commands.test_compress import model_folder
from tests.lm.tokenizers.test_tokenizers import words_of
from vqjax.commands import inspect

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return model_folder("llama", tmp_path_factory.mktemp("inspect") / "model")


PRETRAINED = """
import importlib, sys
from vqjax import cli
assert cli.main(["inspect", sys.argv[1]]) == 0
for name in ("compress", "draft", "export", "generate", "lens", "score", "trim", "grow"):
  importlib.import_module(f"vqjax.commands.{name}")
importlib.import_module("vqjax.commands.models").load_model(sys.argv[1])
print("MODULES", *sys.modules)
"""


def test_a_pretrained_model_is_loaded_without_the_trainer_and_its_libraries(folder):
  done = subprocess.run(
    [sys.executable, "-c", PRETRAINED, str(folder)], capture_output=True, text=True, check=True
  )
  loaded = {*done.stdout.partition("MODULES")[2].split()}
  assert "vqjax.lm.checkpoints.loading" in loaded
  slow = {"orbax", "grain", "tensorboardX", "matplotlib", "pandas", "tensorflow_datasets"}
  assert not slow & loaded
  assert {m for m in loaded if m.startswith("vqjax.lab.")} == {
    "vqjax.lab.exits",
    "vqjax.lab.signals",
  }


def test_the_tables_are_read_and_shown_alike(folder, tmp_path, capsys):
  text, page = tmp_path / "text.txt", tmp_path / "page.html"
  text.write_text(" ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, 40, 500)))
  options = "--vocabulary", "--text", str(text), "--nearest", "w3", "--unused", "80", "81", "82"
  assert inspect.main([str(folder), *options, "--json", "--page", str(page)]) == 0
  found = json.loads(capsys.readouterr().out)
  assert not found["tied"]
  assert list(found["tables"]) == ["embedding", "head"]
  for one in found["tables"].values():
    assert one["shape"] == [97, 32]
    assert 1 <= one["participation"] <= one["entropy_dimension"] <= 32
    assert len(one["nearest"]["w3"]) == 8
    assert "w3" not in [word for word, _ in one["nearest"]["w3"]]
    assert one["frequency"]["seen"] == 40
    assert one["untrained"]["reserved"] == 3
    assert one["untrained"]["is_output"] == (one is found["tables"]["head"])
  assert inspect.main([str(folder), *options]) == 0
  printed = capsys.readouterr().out
  html = page.read_text("utf-8")
  for part in ("participation ratio", "rank correlation", "nearest rows", "hardly trained"):
    assert part in " ".join(printed.split())
    assert part in html
  assert not re.search(r'(?:src|href)="(?!#)', html)


def test_rows_of_padding_stand_for_reserved_tokens_where_there_are_none(folder, tmp_path, capsys):
  padded = shutil.copytree(folder, tmp_path / "padded")
  words_of(90).save(str(padded / "tokenizer.json"))
  assert inspect.main([str(padded), "--vocabulary", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["padding"] == 7
  for one in found["tables"].values():
    assert one["untrained"]["reserved"] == 7
    assert all(token < 90 for token, _, _ in one["untrained"]["nearest"])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--vocabulary", "--nearest", ""), "`--nearest` must be a word that has a token"),
    (("--vocabulary", "--unused", "1", "400"), r"`unused` must be at least two tokens in \[0,"),
    (("--page", "v.html"), "need `--vocabulary`"),
  ],
)
def test_bad_input_is_named(folder, capsys, options, message):
  try:
    code = inspect.main([str(folder), *options])
  except SystemExit as error:
    code = error.code
  assert code == 2
  assert re.search(message, capsys.readouterr().err)


def test_tables_of_any_safetensors_are_found_by_shape_and_name(tmp_path, capsys):
  from safetensors.numpy import save_file

  shapes = {"embed.weight": (90, 8), "lm_head.weight": (90, 8), "position_embed": (64, 8)}
  shapes |= {"mlp.weight": (90, 8), "short_embed": (9, 8)}
  save_file(
    {name: np.zeros(x, np.float16) for name, x in shapes.items()}, tmp_path / "a.safetensors"
  )
  assert inspect.main([str(tmp_path / "a.safetensors"), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert {table["name"] for table in found["tables"]} == {"embed.weight", "lm_head.weight"}
  assert {table["format"] for table in found["tables"]} == {"F16"}
  assert (found["architecture"], found["tensors"]) == (None, 5)
  (tmp_path / "config.json").write_text('{"model_type": "other"}')
  assert inspect.main([str(tmp_path)]) == 0
  printed = " ".join(capsys.readouterr().out.split())
  assert "no architecture of this library" in printed
  assert "--table embed.weight" in printed


def test_one_tensor_in_two_files_without_an_index_is_refused(tmp_path, capsys):
  from safetensors.numpy import save_file

  for name in ("a", "b"):
    save_file({"embed.weight": np.zeros((90, 8), np.float16)}, tmp_path / f"{name}.safetensors")
  assert inspect.main([str(tmp_path)]) == 2
  assert "got embed.weight in two files. Remove b.safetensors" in capsys.readouterr().err
