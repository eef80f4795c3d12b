"""`vqjax draft MODEL`: a drafter that is trained, resumed, used and refused elsewhere."""

import json
import re

import numpy as np
import pytest

from tests.checkpoints.families import V
from tests.lab.commands.test_compress import model_folder
from vqjax.lab import drafters, lenses
from vqjax.lab.commands import draft, generate

pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return model_folder("gemma3_text", tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text(" ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, V - 7, 1500)))
  return path


def train(folder, text, out, *options):
  sizes = "--positions", "400", "--window", "12", "--batch", "4", "--depth", "2", "--length", "2"
  return draft.main([str(folder), "--text", str(text), "--out", str(out), *sizes, *options])


@pytest.fixture
def untimed(monkeypatch):
  """Drafters that are not timed: times differ from call to call, and are written with them."""
  monkeypatch.setattr(drafters, "timed", lambda eagle, *given: eagle)


@pytest.mark.slow
def test_training_brings_a_drafter_nearer_and_leaves_its_file_alone(
  folder, text, tmp_path, untimed, capsys
):
  out = tmp_path / "drafter.safetensors"
  assert train(folder, text, out, "--steps", "40", "--vocab", "20", "--json") == 0
  printed = capsys.readouterr()
  first = float(re.search(r"step 1: ([\d.]+) nats", printed.err)[1])
  assert max(json.loads(printed.out)["kl"]) < 0.9 * first
  assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.slow
def test_an_interrupted_training_goes_on_and_its_drafter_changes_no_text_of_its_model(
  folder, text, tmp_path, untimed, monkeypatch, capsys
):
  whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
  assert train(folder, text, whole, "--steps", "4") == 0
  monkeypatch.setattr(lenses, "EVERY", 0.0)
  batch = drafters._batch
  with monkeypatch.context() as patch:

    def stop(count, size, step):
      if step == 2:
        raise KeyboardInterrupt
      return batch(count, size, step)

    patch.setattr(drafters, "_batch", stop)
    assert train(folder, text, resumed, "--steps", "4") != 0
  assert not resumed.exists()
  assert train(folder, text, resumed, "--steps", "4") == 0
  assert "going on with step 2 of 4" in capsys.readouterr().err
  assert whole.read_bytes() == resumed.read_bytes()
  texts = []
  for options in ((), ("--draft", str(whole), "--draft-length", "3")):
    call = [str(folder), "--prompt", "w1 w2 w3", "--max-tokens", "9", "--temperature", "0"]
    assert generate.main([*call, *options]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1]
  other = model_folder("qwen3", tmp_path / "other")
  call = [str(other), "--prompt", "w1", "--draft", str(whole)]
  assert generate.main(call) == 2
  assert "drafter of this model" in capsys.readouterr().err


def test_a_wrong_call_is_refused(folder, text, tmp_path, capsys):
  out = tmp_path / "drafter.safetensors"
  assert train(folder, text, out, "--vocab", "0") == 2
  assert "--vocab" in capsys.readouterr().err
  assert train(folder, text, tmp_path / "drafter") == 2
  assert "--out` must end in .safetensors" in capsys.readouterr().err
  short = tmp_path / "short.txt"
  short.write_text("w1 w2")
  assert train(folder, short, out) == 2
  assert "two windows" in capsys.readouterr().err
