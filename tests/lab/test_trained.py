"""Commands that generate and score read pretrained models and run folders."""

import json
import pathlib

import pytest

from vqjax.commands import generate, score

CONFIG = """
import pathlib
from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER

def experiment():
  return tiny.experiment(pathlib.Path({text!r}), DenseHead(FROM_TOKENIZER, 16))
"""


@pytest.fixture
def run(finished, tmp_path):
  """A trained run: its folder, its config file and its folder of text."""
  experiment, folder, _ = finished
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(text=experiment.data.path))
  return folder, config, pathlib.Path(experiment.data.path)


def test_a_run_generates_and_scores_its_text(run, capsys):
  folder, config, text = run
  given = [str(folder), "--config", str(config)]
  assert generate.main([*given, "--prompt", "w0 w7", "--max-tokens", "4"]) == 0
  assert capsys.readouterr().out.startswith("w0 w7")
  assert score.main([*given, "--text", str(text / "00.txt"), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  size = len((text / "00.txt").read_bytes())
  assert found["bytes"] == size
  nats = found["nats_per_token"] * found["tokens"]
  assert nats == pytest.approx(found["nats_per_byte"] * size)
  assert 0 < found["nats_per_token"] < 4.2  # below log 61, the uniform distribution


def test_a_run_without_its_config_or_with_another_is_refused(run, capsys):
  folder, config, _ = run
  assert generate.main([str(folder), "--prompt", "w0"]) == 2
  assert "--config" in capsys.readouterr().err
  other = [str(folder), "--config", str(config), "model.layers=2", "--prompt", "w0"]
  assert generate.main(other) == 2
  assert "layers" in capsys.readouterr().err


def test_wrong_arguments_for_a_pretrained_model_are_refused(real_data, capsys):
  given = [str(real_data / "stories260K" / "stories260K.bin"), "--prompt", "a"]
  for wrong, part in ((["model.layers=2"], "--config"), (["--seed", str(2**70)], "--seed")):
    assert generate.main([*given, *wrong]) == 2
    assert part in capsys.readouterr().err


def test_stories260k_continues_its_published_story_and_scores_it(real_data, tmp_path, capsys):
  model = str(real_data / "stories260K" / "stories260K.bin")
  published = (real_data / "stories260K" / "stories260K.md").read_text()
  story = published[published.index("Once upon") :][:400]
  prompt, rest = story[:17], story[17:]
  settings = ["--max-tokens", "180", "--temperature", "0", "--json"]
  assert generate.main([model, "--prompt", prompt, *settings]) == 0
  (continued,) = json.loads(capsys.readouterr().out)["continuations"]
  assert continued["text"].startswith(rest)
  file = pathlib.Path(tmp_path, "story.txt")
  file.write_text(prompt + continued["text"])
  assert score.main([model, "--text", str(file), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  # All but the tokens of the prompt are the ones that were generated.
  nats = -sum(continued["log_probs"])
  assert nats < found["nats_per_token"] * found["tokens"] < nats + 30


@pytest.mark.slow
def test_a_draft_model_leaves_the_greedy_text_as_it_is(real_data, capsys):
  model = str(real_data / "stories260K" / "stories260K.bin")
  given = [model, "--prompt", "Once upon a time", "--max-tokens", "32", "--temperature", "0"]
  texts = []
  for more in ([], ["--draft", model, "--draft-length", "3"]):
    assert generate.main([*given, *more, "--json"]) == 0
    texts.append(json.loads(capsys.readouterr().out)["continuations"][0]["text"])
  assert texts[0] == texts[1]
