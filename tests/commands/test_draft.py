"""`vqjax draft MODEL`: a drafter that is trained, resumed, used and refused elsewhere."""

import json
import re

import numpy as np
import pytest

from tests.commands.test_compress import model_folder
from tests.lm.checkpoints.families import V
from vqjax.commands import draft, generate
from vqjax.commands.models import load_model
from vqjax.lm.drafting import eagle_training, load_drafter
from vqjax.lm.generation import Sampling
from vqjax.lm.lenses import fitting

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
  monkeypatch.setattr(eagle_training, "timed", lambda eagle, *given: eagle)


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
  monkeypatch.setattr(fitting, "EVERY", 0.0)
  batch = eagle_training._batch
  with monkeypatch.context() as patch:

    def stop(count, size, step):
      if step == 2:
        raise KeyboardInterrupt
      return batch(count, size, step)

    patch.setattr(eagle_training, "_batch", stop)
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


@pytest.mark.slow
def test_medusas_blocks_are_trained_and_change_no_text_of_their_model(
  folder, tmp_path_factory, tmp_path, capsys
):
  text, out = tmp_path_factory.mktemp("cycle") / "text.txt", tmp_path / "drafter.safetensors"
  text.write_text(" ".join(f"w{n % 23}" for n in range(600)))
  given = [str(folder), "--medusa", "--text", str(text), "--out", str(out)]
  sizes = "--positions", "400", "--window", "12", "--batch", "32", "--steps", "30"
  tree = "--blocks", "2", "--size", "3", "--vocab", "20", "--rate", "0.02"
  assert draft.main([*given, *sizes, *tree, "--json"]) == 0
  printed = capsys.readouterr()
  losses = [float(x) for x in re.findall(r"step \d+: ([\d.]+) nats", printed.err)]
  assert losses[-1] < losses[0]
  found = json.loads(printed.out)
  assert found["tree"] >= found["chain"] >= 1
  assert all(0 < found["rounds"][way]["cost"] < 1 for way in ("greedy", "drawn"))
  assert [path.name for path in tmp_path.iterdir()] == [out.name]
  model, variables, _ = load_model(folder)
  drafter = load_drafter(out, model, variables)
  assert 0 < drafter.tree.size == found["size"] <= 3  # of those that the text reaches
  assert drafter.head.vocab == len(drafter.tokens) == 20
  assert drafter.times(Sampling())._asdict() == found["rounds"]["drawn"]
  texts = []
  call = [str(folder), "--prompt", "w1 w2 w3", "--max-tokens", "9", "--temperature", "0"]
  for options in ((), ("--draft", str(out))):
    assert generate.main([*call, *options]) == 0
    texts.append(capsys.readouterr().out)
  assert texts[0] == texts[1]
  assert generate.main([*call, "--draft", str(out), "--draft-length", "2"]) == 2
  assert "--draft-length" in capsys.readouterr().err


def test_a_wrong_call_is_refused(folder, text, tmp_path, capsys):
  out = tmp_path / "drafter.safetensors"
  assert train(folder, text, out, "--vocab", "0") == 2
  assert "--vocab" in capsys.readouterr().err
  assert train(folder, text, tmp_path / "drafter") == 2
  assert "--out` must end in .safetensors" in capsys.readouterr().err
  assert train(folder, text, out, "--size", "3") == 2
  assert "--size` must be left out without `--medusa`" in capsys.readouterr().err
  assert train(folder, text, out, "--medusa") == 2
  assert "--depth` must be left out with `--medusa`" in capsys.readouterr().err
  short = tmp_path / "short.txt"
  short.write_text("w1 w2")
  assert train(folder, short, out) == 2
  assert "two windows" in capsys.readouterr().err
  assert [*tmp_path.iterdir()] == [short]  # nothing was computed that another call could use
